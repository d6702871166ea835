"""``headwise patch`` and ``headwise attribute``: which heads make an answer, between two texts or in one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .importance import PAGE, Device, Json, check_out, measured, pairs_of, write_out
from .options.models import Dtype, ModelArgument
from .options.texts import typed_text, typed_token
from .output import show

AnswerToken = Annotated[str, typer.Option(help="What should follow the text, one token, with its space: ' Mary'.")]
WrongToken = Annotated[str, typer.Option(help="The token that it is compared with: ' John'.")]


def patch(
    clean: Annotated[str, typer.Option(help="The text that --answer follows.")],
    corrupt: Annotated[str, typer.Option(help="A text of as many tokens that --wrong follows.")],
    answer: AnswerToken,
    wrong: WrongToken,
    model: ModelArgument = None,
    heads: Annotated[str | None, typer.Option(help="Only these heads, as layer.head: 3.1,2.4.")] = None,
    positions: Annotated[bool, typer.Option("--positions", help="Patch each position of a head alone.")] = False,
    out: Annotated[
        str | None, typer.Option(help="Write a page (.html), a figure (.svg, .png) or the record (.json).")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Put each head's output on one text into the run on another, and show how much of the difference it restores."""
    chosen = None if heads is None else pairs_of(heads)
    texts = [typed_text(clean, "--clean"), typed_text(corrupt, "--corrupt")]
    answer, wrong = typed_token(answer, "--answer"), typed_token(wrong, "--wrong")
    check_out(out, (PAGE, ".svg", ".png", ".json"))

    def work(loaded: Any, show: Any) -> Any:
        from headwise.look import LogitDifference, patch

        metric = LogitDifference(*two_tokens(loaded, answer, wrong))
        clean_ids, corrupted_ids = (loaded.encode(text)[0] for text in texts)
        show("patching")
        options = {"heads": chosen, "positions": positions, "decode": loaded.decode, "name": loaded.name}
        return patch(loaded.model, clean_ids, corrupted_ids, metric, progress=show, **options)

    result = measured("patch", model, device, dtype, work)
    show(result.to_dict(), lambda _: result, as_json)
    write_out(result, out, as_json)


def attribute(
    text: Annotated[str, typer.Option(help="The text that --answer follows.")],
    answer: AnswerToken,
    wrong: WrongToken,
    model: ModelArgument = None,
    out: Annotated[str | None, typer.Option(help="Write a page (.html) or the record (.json).")] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show what each head adds directly to the logit of one token minus that of another."""
    content = typed_text(text)
    answer, wrong = typed_token(answer, "--answer"), typed_token(wrong, "--wrong")
    check_out(out, (PAGE, ".json"))

    def work(loaded: Any, show: Any) -> Any:
        from headwise.look import attribute

        pair = two_tokens(loaded, answer, wrong)
        ids = loaded.encode(content)[0]
        return attribute(loaded.model, ids, *pair, decode=loaded.decode, name=loaded.name)

    result = measured("attribute", model, device, dtype, work)
    show(result.to_dict(), lambda _: result, as_json)
    write_out(result, out, as_json)


def two_tokens(loaded: Any, answer: str, wrong: str) -> tuple[int, int]:
    """Return the ids of ``--answer`` and ``--wrong``; raise BadParameter if they are not two tokens."""
    pair = one_token(loaded, "--answer", answer), one_token(loaded, "--wrong", wrong)
    if pair[0] == pair[1]:
        raise typer.BadParameter(f"--answer and --wrong are two tokens to compare; both are {answer!r}; change one")
    return pair


def one_token(loaded: Any, option: str, text: str) -> int:
    """Return the id of a text that is one token for the model's tokenizer.

    Raises:
        BadParameter: the text is several tokens, or none.
    """
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        tokens = ", ".join(repr(loaded.decode(token)) for token in ids)
        raise typer.BadParameter(
            f"{option} takes one token, and {text!r} is {len(ids)} ({tokens}); take a word of one token, with the "
            "space that belongs to it, such as ' Mary'"
        )
    return int(ids[0])
