"""Train the small Llama-style decoder that ships in ``headwise.models``.

The data are the running interpreter's own standard library sources (PSF licence), mixed with repeated random
tokens and repeated text so that induction heads form within minutes instead of hours. Every batch depends only on
``(seed, step)``, so a run that was stopped continues exactly where it was:

    python scripts/train_tiny.py --run runs/tiny --out src/headwise/models/tiny
    python scripts/train_tiny.py --run runs/tiny --out src/headwise/models/tiny --export-only

``--watch heads.jsonl`` keeps what every head scores as it forms, and changes no weight.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headwise.hf  # registers attn_implementation="headwise"

try:
    from scripts import tiny_data as data
except ImportError:  # run as a script: this folder is on the path, its parent is not
    import tiny_data as data  # type: ignore[import-not-found,no-redef]

ATTENTIONS = ("eager", "sdpa", "headwise")


def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, rows: int, length: int = data.MAX_POSITIONS) -> float:
    """Mean cross entropy in nats a token on held-out windows of ``length`` tokens."""
    ids = data.text_rows(stream, rows, length)
    with torch.inference_mode():
        return sum(float(model(input_ids=row, labels=row, use_cache=False).loss) for row in ids.unsqueeze(1)) / rows


def attention_maps(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Every head's weights, ``(layers, rows, heads, length, length)``."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        maps = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return torch.stack(maps).float()


def head_scores(model: LlamaForCausalLM, stream: torch.Tensor, rows: int = 8) -> dict[str, torch.Tensor]:
    """Scores of every head, each ``(layers, heads)``, in [0, 1].

    previous: mean of A[i, i-1] on held-out text of 128 tokens. first: mean of A[i, 0] for i >= 8 on the same.
    induction: BOS, then random tokens twice, with a period of its own for each row; mean over the second copy,
    without its first token, of A[i, i-p+1], the token after the current token's earlier occurrence.
    """
    text = attention_maps(model, data.text_rows(stream, rows, 128))
    previous = text.diagonal(offset=-1, dim1=-2, dim2=-1).mean(dim=(1, 3))
    first = text[..., 8:, 0].mean(dim=(1, 3))

    rng = torch.Generator().manual_seed(1234)
    per_row = []
    for _ in range(rows):
        period = int(torch.randint(20, 100, (), generator=rng))
        segment = torch.randint(data.NUM_SPECIAL, data.VOCAB_SIZE, (period,), generator=rng)
        maps = attention_maps(model, torch.cat([torch.tensor([data.BOS_ID]), segment, segment])[None])[:, 0]
        # Queries of the second copy but its first: i = period + 2 ... 2 * period.
        per_row.append(maps.diagonal(offset=1 - period, dim1=-2, dim2=-1)[..., 3:].mean(dim=-1))
    return {"previous": previous, "induction": torch.stack(per_row).mean(0), "first": first}


def new_model(
    seed: int, attention: str = "headwise", positions: int = data.MAX_POSITIONS, heads: int = 8
) -> LlamaForCausalLM:
    """Make a fresh model: 4 layers of `heads` heads with their own keys and values, so that it can be regrouped later.

    The width stays 256, so any number of heads gives the same parameters, and one seed the same first weights.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=data.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=data.BOS_ID,
        eos_token_id=data.EOS_ID,
        attn_implementation=attention,
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


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, record: dict[str, Any], out: Path) -> None:
    """Write the model (float16), its tokenizer and the loss curve to ``out``, each file in one move."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        half = LlamaForCausalLM(copy.deepcopy(model.config)).half()
        half.load_state_dict(model.state_dict())
        half.save_pretrained(folder)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=data.BOS, eos_token=data.EOS, model_max_length=data.MAX_POSITIONS
        )
        fast.save_pretrained(folder)
        (Path(folder) / "loss_curve.json").write_text(json.dumps(record, indent=1) + "\n")
        (Path(folder) / "generation_config.json").unlink()  # says nothing that config.json does not
        for path in Path(folder).iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def new_watch(run: Run, path: Path) -> headwise.look.Watch:
    """Looks at held-out text while the model trains, within 2 % of the time."""
    marks = {i for i in range(data.VOCAB_SIZE) if run.tokenizer.decode([i]).strip(" ") in {*".,;:!?\n"}}
    text = data.text_rows(run.held_out, 3, 128)[1]
    watch = headwise.look.Watch(run.model, text, path=path, delimiters=marks)
    watch.step(run.step)
    return watch


def describe(scores: dict[str, torch.Tensor]) -> str:
    """The best head of each role, as ``role score (layer.head)``."""
    parts = []
    for role, table in scores.items():
        layer, head = divmod(int(table.argmax()), table.shape[1])
        parts.append(f"{role} {table.max():.2f} ({layer}.{head})")
    return "  ".join(parts)


class Run:
    """The state of a run: model, optimizers, step, and the record that is exported with the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer, self.training, self.held_out = data.load_data(args.run)
        self.model = new_model(args.seed, args.attention, args.context or data.MAX_POSITIONS, args.heads)
        self.optimizers = new_optimizers(self.model, args.lr, args.muon)
        self.step = 0
        self.checkpoint = args.run / "checkpoint.pt"
        self.record: dict[str, Any] = {
            "python": platform.python_version(),
            "training_tokens_in_corpus": len(self.training),
            "tokens": 0,
            "seconds": 0.0,
            "curve": [],
            "losses": [],
        }
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.record = saved["step"], saved["record"]
            self.record.setdefault("losses", [])
        if not args.export_only:
            chosen = ("steps", "seed", "lr", "muon", "batch_tokens", "attention", "context", "threads", "heads")
            self.record["settings"] = {name: getattr(args, name) for name in chosen}

    def save(self) -> None:
        """Write the checkpoint that a later start continues from."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step, "record": self.record}
        data.save_atomically(state, self.checkpoint)

    def shape(self) -> tuple[int, int]:
        """Rows and length of this step: short sequences first, which take less time, then the full length."""
        length = self.args.context or (256 if self.step < 0.65 * self.args.steps else data.MAX_POSITIONS)
        return self.args.batch_tokens // length, length

    def train_step(self) -> float:
        """One update; returns the training loss in nats a token."""
        rows, length = self.shape()
        # Much repetition until the induction heads have formed; then half of it, and more text.
        shares = (0.2, 0.1) if self.step < 0.4 * self.args.steps else (0.1, 0.05)
        rng = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
        ids, labels = data.make_batch(self.training, rows, length, shares, rng)
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
        self.record["losses"].append(round(float(loss.detach()), 4))
        return float(loss.detach())

    def measure(self, training_loss: float) -> str:
        """Add a point to the curve; returns a line for the reader."""
        self.model.eval()
        scores = head_scores(self.model, self.held_out)
        loss = held_out_loss(self.model, self.held_out, 16, self.args.context or data.MAX_POSITIONS)
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
        length = self.args.context or data.MAX_POSITIONS
        rows = len(self.held_out) // length
        self.record["final"] = {
            "step": self.step,
            "held_out_tokens": len(self.held_out),
            "held_out_loss": round(held_out_loss(self.model, self.held_out, rows, length), 4),
            "heads": {role: [[round(s, 3) for s in row] for row in t.tolist()] for role, t in scores.items()},
        }
        losses = self.record.pop("losses")  # of every step: for comparing runs, beside the checkpoint
        run = {"settings": self.record["settings"], "seconds": self.record["seconds"], "losses": losses}
        (self.args.run / "losses.json").write_text(json.dumps(run) + "\n")
        export(self.model, self.tokenizer, self.record, self.args.out)
        print(f"final held-out loss {self.record['final']['held_out_loss']}  {describe(scores)}", flush=True)


def train(run: Run) -> None:
    """Run the remaining steps, with a progress line every few seconds."""
    run.model.train()
    started = shown = time.monotonic()
    before, smooth = run.record["seconds"], 0.0
    watch = None if run.args.watch is None else new_watch(run, run.args.watch)
    while run.step < run.args.steps:
        loss = run.train_step()
        if watch is not None:
            (watch.measure if run.step == run.args.steps else watch.step)(run.step, loss=loss)
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
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--attention", choices=ATTENTIONS, default="headwise", help="transformers' attn_implementation")
    parser.add_argument("--context", type=int, help="tokens of every sequence (by default 256 first, 512 later)")
    parser.add_argument(
        "--heads", type=int, default=8, help="heads a layer: 1, 2, 4 ... 64; the width of all stays 256"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure-every", type=int, default=200, help="steps between measurements and checkpoints")
    parser.add_argument("--watch", type=Path, help="keep what every head scores, step by step, in this file")
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
