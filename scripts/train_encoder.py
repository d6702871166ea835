"""Train a small BERT on masked words, for measuring what reshaping costs an encoder (``benchmarks/reshape.py``).

Data, tokenizer and optimizers are those of ``train_tiny.py``; the weights are not shipped. Every batch depends only on
``(seed, step)``, so a run that was stopped goes on where it was:

    python scripts/train_encoder.py --run runs/tiny --out runs/encoder

``--run`` is the folder of data that ``train_tiny.py`` leaves, or an empty one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

import headwise.hf  # noqa: F401  registers attn_implementation="headwise"

try:
    from scripts import tiny_data as data
    from scripts import train_tiny
except ImportError:  # run as a script: this folder is on the path, its parent is not
    import tiny_data as data  # type: ignore[import-not-found,no-redef]
    import train_tiny  # type: ignore[import-not-found,no-redef]

MASK, MASK_ID = "<mask>", data.VOCAB_SIZE
LENGTH = 128
HIDDEN_SHARE = 0.3  # of the tokens, that are to be told


def text_rows(stream: Tensor, starts: Tensor) -> Tensor:
    """Windows of the stream between BOS and EOS, ``(rows, LENGTH)``."""
    rows = stream[starts[:, None] + torch.arange(LENGTH - 2)]
    return torch.cat([torch.full((len(rows), 1), data.BOS_ID), rows, torch.full((len(rows), 1), data.EOS_ID)], dim=1)


def hide(ids: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """What the model reads, and which places it must tell, both ``(rows, length)``: as many in every row.

    Of the places, eight in ten hold the mask, one in ten another token, one in ten its own, as in BERT's paper.
    """
    order = torch.rand(ids.shape, generator=rng).masked_fill(ids < data.NUM_SPECIAL, 1.0).argsort(dim=1)
    hidden = order[:, : round(HIDDEN_SHARE * (ids.shape[1] - 2))]
    masked, other, _ = hidden.tensor_split([round(0.8 * hidden.shape[1]), round(0.9 * hidden.shape[1])], dim=1)
    others = torch.randint(data.NUM_SPECIAL, data.VOCAB_SIZE, other.shape, generator=rng)
    read = ids.scatter(1, masked, MASK_ID).scatter(1, other, others)
    return read, torch.zeros_like(ids, dtype=torch.bool).scatter(1, hidden, True)


def held_out(stream: Tensor, rows: int, seed: int = 1234) -> tuple[Tensor, Tensor, Tensor]:
    """Evenly spaced windows: their ids, what is read, the places to tell; the same ones at each call."""
    ids = text_rows(stream, torch.linspace(0, len(stream) - LENGTH, rows).long())
    return (ids, *hide(ids, torch.Generator().manual_seed(seed)))


def masked_loss(model: nn.Module, ids: Tensor, read: Tensor, places: Tensor, rows: int = 16) -> float:
    """Mean cross entropy in nats of the tokens at the places."""
    total = 0.0
    with torch.inference_mode():
        for one, shown, hidden in zip(ids.split(rows), read.split(rows), places.split(rows), strict=True):
            logits = model(input_ids=shown).logits[hidden].float()
            total += float(nn.functional.cross_entropy(logits, one[hidden], reduction="sum"))
    return total / int(places.sum())


def new_model(seed: int, attention: str = "headwise") -> BertForMaskedLM:
    """4 layers of 8 heads, as the decoder has. Positions begin as sines, so that "one to the left" is one matrix for
    all places: from random positions the model tells words without their neighbours for thousands of steps."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=data.VOCAB_SIZE + 1,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
        attn_implementation=attention,
    )
    model = BertForMaskedLM(config)
    positions = model.bert.embeddings.position_embeddings.weight
    rates = torch.logspace(0, -2, positions.shape[1] // 2)  # radians a place
    angles = torch.arange(len(positions))[:, None] * rates
    with torch.no_grad():
        positions.copy_(torch.cat([angles.sin(), angles.cos()], dim=1) * (2**0.5 * config.initializer_range))
    return model


def tokenizer_with_mask(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The decoder's tokenizer with a mask, and EOS behind every text."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([MASK])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{data.BOS} $A {data.EOS}", special_tokens=[(data.BOS, data.BOS_ID), (data.EOS, data.EOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token=data.BOS,
        sep_token=data.EOS,
        mask_token=MASK,
        model_max_length=LENGTH,
    )


class Run:
    """The state of a run: model, optimizers, step and the losses so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer, self.training, self.validation = data.load_data(args.run)
        self.model = new_model(args.seed, args.attention)
        self.optimizers = train_tiny.new_optimizers(self.model, args.lr, muon=True)
        self.step, self.seconds, self.curve = 0, 0.0, list[dict[str, float]]()
        self.checkpoint = args.out / "checkpoint.pt"
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.step, self.seconds, self.curve = saved["step"], saved["seconds"], saved["curve"]

    def train_step(self) -> float:
        """One update; returns its loss in nats a hidden token."""
        rng = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
        starts = torch.randint(len(self.training) - LENGTH, (self.args.rows,), generator=rng)
        ids = text_rows(self.training, starts)
        read, places = hide(ids, rng)
        with torch.autocast("cpu", torch.bfloat16):
            states = self.model.bert(input_ids=read).last_hidden_state[places]  # no logits where nothing is asked
            loss = nn.functional.cross_entropy(self.model.cls(states).float(), ids[places])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.args.lr * train_tiny.lr_factor(self.step, self.args.steps)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def measure(self, training_loss: float) -> None:
        """Add a point to the curve and write the checkpoint."""
        self.model.eval()
        loss = masked_loss(self.model, *held_out(self.validation, 128))
        self.model.train()
        self.curve.append(
            {"step": self.step, "training_loss": round(training_loss, 4), "held_out_loss": round(loss, 4)}
        )
        print(f"{self.curve[-1]}  {self.seconds:.0f} s", flush=True)
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}
        data.save_atomically(state | {"seconds": self.seconds, "curve": self.curve}, self.checkpoint)

    def train(self) -> None:
        """Run the remaining steps."""
        self.model.train()
        smooth, before = 0.0, time.process_time() - self.seconds
        while self.step < self.args.steps:
            loss = self.train_step()
            smooth = loss if smooth == 0.0 else 0.95 * smooth + 0.05 * loss
            self.seconds = round(time.process_time() - before, 1)
            if self.step % self.args.measure_every == 0 or self.step == self.args.steps:
                self.measure(smooth)

    def export(self) -> None:
        """Write model, tokenizer and curve."""
        self.model.save_pretrained(self.args.out)
        tokenizer_with_mask(self.tokenizer).save_pretrained(self.args.out)
        chosen = ("steps", "seed", "lr", "rows", "attention", "threads")
        record = {"settings": {name: getattr(self.args, name) for name in chosen}, "cpu_seconds": self.seconds}
        (self.args.out / "loss_curve.json").write_text(json.dumps(record | {"curve": self.curve}, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(description="Train a small encoder on masked words.")
    parser.add_argument("--run", type=Path, default=Path("runs/tiny"), help="folder of the data")
    parser.add_argument("--out", type=Path, default=Path("runs/encoder"), help="folder of checkpoint and model")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32, help=f"sequences of {LENGTH} tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--attention", choices=train_tiny.ATTENTIONS, default="headwise")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure-every", type=int, default=200, help="steps between measurements and checkpoints")
    return parser.parse_args()


def main() -> None:
    """Train (or go on training), then export."""
    args = parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    run = Run(args)
    run.train()
    run.export()


if __name__ == "__main__":
    main()
