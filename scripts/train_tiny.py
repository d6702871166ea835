"""Train the small Llama-style decoder that ships in ``headwise.models``.

The data are the running interpreter's own standard library sources (PSF licence), mixed with repeated random
tokens and repeated text so that induction heads form within minutes instead of hours. Every batch depends only on
``(seed, step)``, so a run that was stopped continues exactly where it was:

    python scripts/train_tiny.py --run runs/tiny --out src/headwise/models/tiny
    python scripts/train_tiny.py --run runs/tiny --out src/headwise/models/tiny --export-only
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 2048
MAX_POSITIONS = 512
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
NUM_SPECIAL = 2
IGNORE = -100  # label that the cross entropy skips

# Never trained on: whole modules, so that the held-out loss is a loss on unseen code.
HELD_OUT = {
    "configparser.py", "csv.py", "fractions.py", "heapq.py", "queue.py", "sched.py", "shlex.py", "statistics.py",
    "textwrap.py", "json/__init__.py", "json/decoder.py", "json/encoder.py", "json/scanner.py", "json/tool.py",
}  # fmt: skip
# Test suites are repetitive; `encodings` is tables of numbers; the last two record how this machine was built.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
SKIPPED_STARTS = ("_sysconfigdata", "config-")


def stdlib_files() -> tuple[list[Path], list[Path]]:
    """The standard library's source files as ``(training, held_out)``, each sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[Path] = []
    held_out: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.as_posix().startswith(SKIPPED_STARTS):
            continue
        (held_out if relative.as_posix() in HELD_OUT else training).append(path)
    return training, held_out


def read(paths: list[Path]) -> list[str]:
    """The files' texts; a byte that is not UTF-8 becomes the replacement character."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of ``VOCAB_SIZE`` tokens that puts BOS before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> torch.Tensor:
    """All texts as one stream of ids, each text followed by EOS; shape ``(N,)``."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        stream += [*encoding.ids, EOS_ID]
    return torch.tensor(stream, dtype=torch.long)


def load_data(run: Path) -> tuple[Tokenizer, torch.Tensor, torch.Tensor]:
    """The tokenizer and the two streams, from the run's folder where they were made before."""
    tokenizer_file, streams_file = run / "tokenizer.json", run / "streams.pt"
    if not streams_file.exists():
        training, held_out = map(read, stdlib_files())
        tokenizer = train_tokenizer(training)
        tokenizer.save(str(tokenizer_file))
        save_atomically([encode(tokenizer, training), encode(tokenizer, held_out)], streams_file)
    training_stream, held_out_stream = torch.load(streams_file)
    return Tokenizer.from_file(str(tokenizer_file)), training_stream, held_out_stream


def repeat_to(segment: torch.Tensor, length: int) -> torch.Tensor:
    """The segment again and again until ``length`` tokens."""
    return segment.repeat(-(-length // len(segment)))[:length]


def make_sequence(stream: torch.Tensor, length: int, kind: str, rng: torch.Generator) -> tuple[torch.Tensor, int]:
    """One training sequence of ``length`` ids, and how many of its first ids cannot be predicted.

    ``kind``: "random" (a random segment, repeated), "repeated" (a piece of text, repeated) or "text". The period
    differs from sequence to sequence: a head that looks back at one fixed offset gains nothing.
    """
    body = length - 1
    if kind in ("random", "repeated"):
        period = int(torch.randint(8, body // 2, (), generator=rng))
        if kind == "random":
            segment = torch.randint(NUM_SPECIAL, VOCAB_SIZE, (period,), generator=rng)
            unpredictable = period + 1
        else:
            start = int(torch.randint(len(stream) - period, (), generator=rng))
            segment, unpredictable = stream[start : start + period], 1
        tokens = repeat_to(segment, body)
    else:
        start = int(torch.randint(len(stream) - body, (), generator=rng))
        tokens, unpredictable = stream[start : start + body], 1
    return torch.cat([torch.tensor([BOS_ID]), tokens]), unpredictable


def make_batch(
    stream: torch.Tensor, rows: int, length: int, shares: tuple[float, float], rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and labels of a step, each ``(rows, length)``; the first copy of random tokens has no loss.

    ``shares``: of the rows, how many are random segments and how many are text repeated; the others are plain text.
    """
    random, repeated = shares
    draws = torch.rand(rows, generator=rng).tolist()
    kinds = ["random" if draw < random else "repeated" if draw < random + repeated else "text" for draw in draws]
    made = [make_sequence(stream, length, kind, rng) for kind in kinds]
    ids = torch.stack([tokens for tokens, _ in made])
    labels = ids.clone()
    for row, (_, unpredictable) in enumerate(made):
        labels[row, :unpredictable] = IGNORE
    return ids, labels


def text_rows(stream: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Evenly spaced windows of the stream, each with BOS before it; shape ``(rows, length)``."""
    starts = torch.linspace(0, len(stream) - length, rows).long().tolist()
    bos = torch.tensor([BOS_ID])
    return torch.stack([torch.cat([bos, stream[start : start + length - 1]]) for start in starts])


def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, rows: int, length: int = MAX_POSITIONS) -> float:
    """Mean cross entropy in nats a token on held-out windows of ``length`` tokens."""
    ids = text_rows(stream, rows, length)
    with torch.inference_mode():
        return sum(float(model(input_ids=row, labels=row, use_cache=False).loss) for row in ids.unsqueeze(1)) / rows


def attention_maps(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Every head's weights, ``(layers, rows, heads, length, length)``."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        maps = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("sdpa")
    return torch.stack(maps).float()


def head_scores(model: LlamaForCausalLM, stream: torch.Tensor, rows: int = 8) -> dict[str, torch.Tensor]:
    """Scores of every head, each ``(layers, heads)``, in [0, 1].

    previous: mean of A[i, i-1] on held-out text of 128 tokens. first: mean of A[i, 0] for i >= 8 on the same.
    induction: BOS, then random tokens twice, with a period of its own for each row; mean over the second copy,
    its first token left out, of A[i, i-p+1], the token after the current token's earlier occurrence.
    """
    text = attention_maps(model, text_rows(stream, rows, 128))
    previous = text.diagonal(offset=-1, dim1=-2, dim2=-1).mean(dim=(1, 3))
    first = text[..., 8:, 0].mean(dim=(1, 3))

    rng = torch.Generator().manual_seed(1234)
    per_row = []
    for _ in range(rows):
        period = int(torch.randint(20, 100, (), generator=rng))
        segment = torch.randint(NUM_SPECIAL, VOCAB_SIZE, (period,), generator=rng)
        maps = attention_maps(model, torch.cat([torch.tensor([BOS_ID]), segment, segment])[None])[:, 0]
        # Queries of the second copy but its first: i = period + 2 ... 2 * period.
        per_row.append(maps.diagonal(offset=1 - period, dim1=-2, dim2=-1)[..., 3:].mean(dim=-1))
    return {"previous": previous, "induction": torch.stack(per_row).mean(0), "first": first}


def new_model(seed: int) -> LlamaForCausalLM:
    """A fresh model: 4 layers of 8 heads with their own keys and values, so that it can be regrouped later."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def new_optimizers(model: LlamaForCausalLM, lr: float, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    embeddings = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" in name]
    norms = [p for p in model.parameters() if p.ndim == 1]
    decayed = embeddings if muon else embeddings + matrices
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))]
    if muon:
        # "match_rms_adamw" scales the update so that AdamW's learning rate fits.
        optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def lr_factor(step: int, steps: int, warmup: int = 100) -> float:
    """Linear warm-up, full rate until 40 % of the run, then a cosine down to 1 %."""
    if step < warmup:
        return (step + 1) / warmup
    progress = max(0.0, (step / steps - 0.4) / 0.6)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def save_atomically(value: Any, path: Path) -> None:
    """torch.save beside the file, then rename: a reader never meets half a file."""
    torch.save(value, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, record: dict[str, Any], out: Path) -> None:
    """Write the model (float16), its tokenizer and the loss curve to ``out``, each file in one move."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        half = LlamaForCausalLM(copy.deepcopy(model.config)).half()
        half.load_state_dict(model.state_dict())
        half.save_pretrained(folder)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=MAX_POSITIONS
        )
        fast.save_pretrained(folder)
        (Path(folder) / "loss_curve.json").write_text(json.dumps(record, indent=1) + "\n")
        (Path(folder) / "generation_config.json").unlink()  # says nothing that config.json does not
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def describe(scores: dict[str, torch.Tensor]) -> str:
    """The best head of each role, as ``role score (layer.head)``."""
    parts = []
    for role, table in scores.items():
        layer, head = divmod(int(table.argmax()), table.shape[1])
        parts.append(f"{role} {table.max():.2f} ({layer}.{head})")
    return "  ".join(parts)


class Run:
    """What a run has so far: model, optimizers, step, and the record kept beside the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer, self.training, self.held_out = load_data(args.run)
        self.model = new_model(args.seed)
        self.optimizers = new_optimizers(self.model, args.lr, args.muon)
        self.step = 0
        self.checkpoint = args.run / "checkpoint.pt"
        self.record: dict[str, Any] = {
            "python": platform.python_version(),
            "training_tokens_in_corpus": len(self.training),
            "tokens": 0,
            "seconds": 0.0,
            "curve": [],
        }
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.record = saved["step"], saved["record"]
        if not args.export_only:
            chosen = ("steps", "seed", "lr", "muon", "batch_tokens")
            self.record["settings"] = {name: getattr(args, name) for name in chosen}

    def save(self) -> None:
        """Write the checkpoint that a later start continues from."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step, "record": self.record}
        save_atomically(state, self.checkpoint)

    def shape(self) -> tuple[int, int]:
        """Rows and length of this step: short sequences first, which are quicker, then the model's full length."""
        length = 256 if self.step < 0.65 * self.args.steps else MAX_POSITIONS
        return self.args.batch_tokens // length, length

    def train_step(self) -> float:
        """One update; gives the training loss in nats a token."""
        rows, length = self.shape()
        # Much repetition until the induction heads stand, then half of it for the sake of the text.
        shares = (0.2, 0.1) if self.step < 0.4 * self.args.steps else (0.1, 0.05)
        rng = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
        ids, labels = make_batch(self.training, rows, length, shares, rng)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.args.lr * lr_factor(self.step, self.args.steps)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.record["tokens"] += rows * length
        return float(loss.detach())

    def measure(self, training_loss: float) -> str:
        """Add a point to the curve; gives a line for the reader."""
        self.model.eval()
        scores = head_scores(self.model, self.held_out)
        loss = held_out_loss(self.model, self.held_out, rows=16)
        self.model.train()
        best = {role: round(float(table.max()), 3) for role, table in scores.items()}
        point = {"step": self.step, "training_loss": round(training_loss, 4), "held_out_loss": round(loss, 4), **best}
        self.record["curve"].append(point)
        return f"step {self.step}: held-out {loss:.3f}  {describe(scores)}"

    def finish(self) -> None:
        """Measure the final model on all of the held-out text and export it."""
        self.model.eval()
        for parameter in self.model.parameters():
            parameter.data = parameter.data.half().float()  # what is shipped is what is measured
        scores = head_scores(self.model, self.held_out, rows=32)
        rows = len(self.held_out) // MAX_POSITIONS
        self.record["final"] = {
            "step": self.step,
            "held_out_tokens": len(self.held_out),
            "held_out_loss": round(held_out_loss(self.model, self.held_out, rows), 4),
            "heads": {role: [[round(s, 3) for s in row] for row in t.tolist()] for role, t in scores.items()},
        }
        export(self.model, self.tokenizer, self.record, self.args.out)
        print(f"final held-out loss {self.record['final']['held_out_loss']}  {describe(scores)}", flush=True)


def train(run: Run) -> None:
    """Run the remaining steps, with a progress line every few seconds."""
    run.model.train()
    started = shown = time.monotonic()
    before, smooth = run.record["seconds"], 0.0
    while run.step < run.args.steps:
        loss = run.train_step()
        smooth = loss if smooth == 0.0 else 0.95 * smooth + 0.05 * loss
        now = time.monotonic()
        run.record["seconds"] = round(before + now - started, 1)
        if now - shown > 10:
            rate = run.step / run.record["seconds"]
            left = (run.args.steps - run.step) / rate / 60
            print(f"step {run.step}/{run.args.steps}  loss {smooth:.3f}  {left:.0f} min left", flush=True)
            shown = now
        if run.step % run.args.measure_every == 0:
            print(run.measure(smooth), flush=True)
            run.save()


def parse_args() -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(description="Train the small model that ships with headwise.")
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"), help="folder for the checkpoint and the data")
    parser.add_argument("--out", type=Path, default=Path("runs/tiny/model"), help="folder of the exported model")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure-every", type=int, default=200, help="steps between measurements and checkpoints")
    parser.add_argument("--export-only", action="store_true", help="export the checkpoint as it is, train no further")
    return parser.parse_args()


def main() -> None:
    """Train (or go on training), then export."""
    args = parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    run = Run(args)
    if not args.export_only:
        train(run)
        run.save()
    run.finish()


if __name__ == "__main__":
    main()
