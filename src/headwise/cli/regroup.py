"""``headwise regroup`` and ``headwise distill``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .options.models import MODELS, RequiredModel, folder_of
from .options.reshape import (
    DryRun,
    OutOption,
    Reconstruct,
    Roles,
    Verify,
    check_has_text,
    check_out,
    check_place,
    libraries,
    print_facts,
    rows_of,
    tensors,
    texts_of,
)
from .options.texts import File
from .output import AsJson, progress, put_table

MOST_HELD = 16  # the most windows that are held out in a distillation
Corpus = Annotated[str | None, typer.Option(help="Many texts instead: a file, a folder, or JSON Lines.")]


def _regroup(
    model: RequiredModel,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads in each layer of the result.")],
    method: Annotated[
        str, typer.Option(help="How the shared keys and values are made: first, mean, aligned or fitted.")
    ] = "fitted",
    text: Annotated[
        str | None, typer.Option(help="The text on which heads are compared, and to which --reconstruct fits.")
    ] = None,
    file: File = None,
    corpus: Corpus = None,
    reconstruct: Reconstruct = False,
    seed: Annotated[int, typer.Option(help="Seed for the search for groups if there are many heads.")] = 0,
    out: OutOption = None,
    dry_run: DryRun = False,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Let groups of heads share keys and values (MHA to GQA or MQA); unmodified transformers loads the result."""
    check_out(out, dry_run)
    if seed < 0:
        raise typer.BadParameter(f"--seed is at least 0; got {seed}")
    check_has_text(reconstruct, text, file, corpus)
    texts = texts_of(text, file, corpus) if (text, file, corpus) != (None,) * 3 else None
    with progress() as show:
        show("loading the libraries")
        hf = libraries("headwise regroup")
        from headwise import reshape
        from headwise.reshape.regrouping.regrouped_checkpoint import checked

        folder, _ = hf.files.hub.find_folder(model, lambda _: None)
        with hf.checkpoint(folder) as source:
            check_place(out, source)
            checked(source, kv_heads, method)  # type: ignore[arg-type]  # `checked` refuses an unknown method
            loaded, read = None, list[list[int]]()
            if texts is not None:
                show("reading the model")
                loaded = hf.load(folder)
                read = rows_of(hf, loaded, texts, reconstruct=reconstruct)
            rows = tensors(read)
            request: dict[str, Any] = {"method": method, "model": loaded and loaded.model, "rows": rows, "seed": seed}
            tell = _told(show)
            plan = reshape.plan_regroup(source, kv_heads, **request, progress=tell)
            if reconstruct and loaded is not None:
                plan = reshape.reconstruct(plan, loaded.model, rows, progress=partial(tell, "reconstructing"))
            if dry_run or out is None:
                facts = plan.facts()
            else:
                proof = _proof(reshape, rows) if verify else None
                roles = Roles(hf, loaded, read[0], show) if verify and loaded is not None else None
                facts = reshape.write_regrouped(plan, out, proof=proof, progress=tell, remark=roles)
                facts |= {} if roles is None else {"roles": roles.record}
    _show(facts, None if dry_run else out, as_json)


def _distill(
    folder: Annotated[str, typer.Argument(help="The checkpoint folder to distill.")],
    teacher: Annotated[str, typer.Option(help=f"The original: {MODELS}", callback=folder_of)],
    steps: Annotated[int, typer.Option(help="Number of training steps.")],
    file: Annotated[str | None, typer.Option(help="The training text from a file (UTF-8), or - for stdin.")] = None,
    corpus: Corpus = None,
    rows: Annotated[int, typer.Option(help="Windows of text per step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    lr: Annotated[float, typer.Option(help="The largest learning rate.")] = 1e-4,
    text_weight: Annotated[
        float, typer.Option(help="Weight of the next-token loss, which is added to the teacher's loss.")
    ] = 0.0,
    every: Annotated[int, typer.Option(help="Steps between evaluations; the state is saved as often.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed for the choice of windows.")] = 0,
    out: OutOption = None,
    verify: Verify = True,
    as_json: AsJson = False,
) -> None:
    """Train a changed model to predict what its original predicts; a stopped run continues where it stopped."""
    if out is None:
        raise typer.BadParameter("give --out, the folder to write")
    check_out(out, False)
    if file is None and corpus is None:
        raise typer.BadParameter("give --file or --corpus, the text to train on")
    if not 0 <= text_weight < math.inf:
        raise typer.BadParameter(f"--text-weight is a number of at least 0; got {text_weight}")
    if every < 1:
        raise typer.BadParameter(f"--every is at least 1 step; got {every}")
    texts = texts_of(None, file, corpus)
    with progress() as show:
        show("loading the libraries")
        hf = libraries("headwise distill")
        from headwise import reshape

        training = reshape.DistillConfig(steps, rows=rows, length=length, lr=lr, text=text_weight, seed=seed)
        checked = [hf.loading.model.checked(name) for name in (folder, teacher)]
        with hf.checkpoint(folder) as source:
            check_place(out, source)
            for name, config in zip((folder, teacher), (one[2] for one in checked), strict=True):
                _check_length(hf, name, config, length)
            show("reading the text")
            stream, first = _stream(hf, checked[0][0], checked[0][2], texts)
            cut = max(0, min(len(stream) // 20 // length, MOST_HELD)) * length
            training.batch(stream[: len(stream) - cut], 0, first)  # raises if the text is shorter than a window
            show("reading the models")
            student, original = hf.load(folder), hf.load(teacher)
            _check_pair(student, original)
            held_out = stream[len(stream) - cut :].view(-1, length) if cut else None
            state = Path(out).with_name(f"{Path(out).name}.distill-state")
            show("distillation")
            curve = reshape.distill(
                student.model,
                original.model,
                stream[: len(stream) - cut],
                training,
                held=held_out,
                first=first,
                state=state,
                every=every,
                accelerator=_accelerator(),
                progress=show,
            )
            if reshape.Processes.here().rank:  # only rank 0 writes
                return
            facts = reshape.distill_facts(source, teacher, training, curve)
            show("writing")
            proof = reshape.Proof(tuple(held_out[0].tolist()) if held_out is not None else ()) if verify else None
            facts = reshape.write_distilled(source, student.model, out, facts, proof=proof)
            with contextlib.suppress(OSError):
                state.unlink()
    _show(facts, out, as_json)


def _check_length(hf: Any, name: str, config: Any, length: int) -> None:
    places = hf.loading.model.declared_positions(config)
    if places is not None and length > places:
        raise typer.BadParameter(f"--length {length}: {name} supports {places:,} tokens; give at most that many")


def _stream(hf: Any, folder: Path, config: Any, texts: Iterable[str]) -> tuple[Any, int | None]:
    """Return the tokens of all texts in one row, without the first token of a text (BOS or CLS), and that token."""
    import torch

    tokenizer = hf.loading.tokenizer.load_tokenizer(folder, config)
    first = hf.loading.tokenizer.bos_id(tokenizer, config.get_text_config().vocab_size)
    ids: list[int] = []
    for text in texts:
        tokens, _ = hf.loading.tokenizer.encode(tokenizer, text, None)
        ids += tokens[1:] if tokens[:1] == [first] else tokens
    return torch.tensor(ids, dtype=torch.long), first


def _accelerator() -> Any:
    """Return an `accelerate.Accelerator` with the devices of `accelerate config`; None if it is not installed."""
    try:
        from accelerate import Accelerator  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return Accelerator()


def _check_pair(student: Any, teacher: Any) -> None:
    sizes = [loaded.model.get_input_embeddings().num_embeddings for loaded in (student, teacher)]
    if sizes[0] != sizes[1] or {student.kind, teacher.kind} != {"decoder"}:
        raise typer.BadParameter(
            f"--teacher {teacher.name}: a {teacher.kind} with a vocabulary of {sizes[1]}, and the model to distill is "
            f"a {student.kind} with {sizes[0]}; both must be decoders with the same vocabulary"
        )


def _proof(reshape: Any, rows: list[Any]) -> Any:
    """Return the proof, with every fifth row, or the last: text that nothing was fitted to."""
    kept = rows[4::5] or rows[-1:]
    return reshape.Proof(tuple(int(i) for row in kept for i in row[0]))


def _told(show: Any) -> Any:
    """Return a callback for progress: it shows the step, and how much of it is done."""
    now = [""]

    def tell(what: str, done: int, total: int) -> None:
        if what != now[0]:
            now[0] = what
            show(what, total)
        show(done, total)

    return tell


def _show(facts: dict[str, Any], out: str | None, as_json: bool) -> None:
    """Print the tables of a regrouping or a distillation, then those of every reshaped checkpoint."""
    for head, body in () if as_json else facts["tables"]:
        put_table(head, body)
    print_facts(facts, out, as_json)
