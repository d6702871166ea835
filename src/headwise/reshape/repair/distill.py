"""Distillation: train a changed model for a few steps to predict the same as its original.

A plain loop in PyTorch. Each batch depends only on the seed and the step number, so a run that continues after a stop
gives the same result. The state file is written completely or not at all.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed.workers import Processes
from ...files.atomic_file import check_destination, writing
from ...nn.hooks.eval_mode import in_eval_mode, in_eval_mode_without_grad
from ...shapes import INTEGERS, describe
from ...shapes.arguments import check_counts, check_numbers, check_paths, check_tensor, shown
from ..arguments import check_kind, check_models, check_rows, check_told

Forward = Callable[[nn.Module, Tensor], Tensor]

STATE = {"recipe", "student", "optimizer", "step", "steps", "held", "text", "teacher"}
"""The keys of the state file of a run."""
MARKED = 1024
"""The number of values that are hashed of a float tensor, at least, if it has that many."""


@dataclass(frozen=True)
class DistillConfig:
    """Settings of a distillation.

    Attributes:
        steps: Updates of the weights.
        rows: Windows of text per step, over all processes.
        length: Tokens per window.
        lr: Largest learning rate of AdamW; after a linear warm-up it falls by a cosine to a hundredth.
        warmup: Steps of the warm-up.
        weight_decay: Weight decay of matrices; vectors have none.
        text: Weight of the loss on the text itself, added to the divergence from the teacher.
        seed: Seed for drawing the windows of the text.

    Raises:
        TypeError, ValueError: a value that is not a number, or out of range.

    Example:
        >>> config = DistillConfig(steps=200, warmup=10)
        >>> config.rate(0), config.rate(10)
        (1e-05, 0.0001)
    """

    steps: int
    rows: int = 8
    length: int = 512
    lr: float = 1e-4
    warmup: int = 20
    weight_decay: float = 0.0
    text: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, rows=self.rows)
        check_counts(2, length=self.length)
        check_counts(0, warmup=self.warmup, seed=self.seed)
        check_numbers(above=0.0, lr=self.lr)
        check_numbers(weight_decay=self.weight_decay, text=self.text)
        if self.text < 0 or self.weight_decay < 0:
            raise ValueError(f"text and weight_decay are at least 0; got {self.text} and {self.weight_decay}")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        check_counts(step=step)
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def batch(self, stream: Tensor, step: int, first: int | None = None) -> Tensor:
        """Return the windows (rows, length) of a step; each begins with the token `first` if it is given."""
        check_counts(step=step)
        _check_stream(stream, self, first)
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        body = self.length - (first is not None)
        starts = torch.randint(len(stream) - body + 1, (self.rows,), generator=draw, device="cpu").tolist()
        windows = torch.stack([stream[start : start + body] for start in starts])
        return windows if first is None else torch.cat([windows.new_full((self.rows, 1), first), windows], 1)


@dataclass
class LossCurve:
    """The losses measured during a distillation, as plain data.

    Attributes:
        steps: Loss of each step: the divergence from the teacher, plus the weighted loss on the text.
        held: [step, divergence, loss] on held-out text, in nats per token.
    """

    steps: list[float]
    held: list[list[float | int]]


def distill(
    student: nn.Module,
    teacher: nn.Module,
    stream: Tensor,
    config: DistillConfig,
    *,
    held: Tensor | None = None,
    first: int | None = None,
    state: str | os.PathLike[str] | None = None,
    every: int = 50,
    call: Forward | None = None,
    accelerator: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> LossCurve:
    """Train `student` in place to predict the teacher's distribution of the next token.

    The loss is the Kullback-Leibler divergence of the student's distribution from the teacher's, per token (Hinton et
    al. 2015, arXiv 1503.02531). Under torchrun each process reads a share of the windows, and gradients are averaged.

    Args:
        student: The changed model, in float32.
        teacher: The original; it is not trained.
        stream: Text as one row of ids (N,), longer than a window.
        config: Steps, batch, learning rate.
        held: Held-out windows (n, T), measured at the start, after every `every` steps, and at the end.
        first: A token to put before every window, such as BOS.
        state: A file for the state of the run, written after every `every` steps. A run continues from an existing
            file, if its config, text and teacher are the same.
        every: Steps between two measurements and between two writes of the state.
        call: Returns the logits (B, T, vocabulary) of a model; by default of a transformers model, without a cache.
        accelerator: An `accelerate.Accelerator`, which places the models and runs the backward pass.
        progress: Called as ``progress(done, total)`` after each step.

    Returns:
        The losses, the same in every process.

    Raises:
        TypeError, ValueError: `stream` is not a row of ids, or too short; the state has another config, text or
            teacher.
        OSError: `state` cannot be written.

    Example:
        >>> from torch.nn import Embedding, Linear, Sequential
        >>> teacher, student = (Sequential(Embedding(7, 5), Linear(5, 7)) for _ in range(2))
        >>> config = DistillConfig(30, rows=2, length=9, lr=0.1, warmup=1)
        >>> curve = distill(student, teacher, torch.arange(60) % 7, config, call=lambda model, ids: model(ids))
        >>> curve.steps[-1] < curve.steps[0]
        True
    """
    check_counts(1, every=every)
    check_models(student=student, teacher=teacher)
    check_kind(DistillConfig, "headwise.reshape.DistillConfig", config=config)
    check_told(call=call, progress=progress)
    if state is not None:
        check_paths(state=state)
    if held is not None:
        check_rows([held], 1)
    _check_stream(stream, config, first)
    run = _Run(student, teacher, config, call or logits_of, accelerator, Path(state) if state is not None else None)
    if state is not None:
        run.marks = {"text": _mark_of(stream, held, first), "teacher": _mark_of(*teacher.state_dict().items())}
    run.begin()
    with in_eval_mode(run.student, run.teacher):  # without dropout each step depends on its batch alone
        for step in range(run.step, config.steps):
            if held is not None and step % every == 0:
                run.measure(held)
            run.update(config.batch(stream, step, first))
            if progress is not None:
                progress(run.step, config.steps)
            if run.step % every == 0 and run.step < config.steps:
                run.save()
        if held is not None and (not run.curve.held or run.curve.held[-1][0] < run.step):
            run.measure(held)
        run.save()
    return run.curve


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of the next token from a transformers model."""
    return model(input_ids=ids, use_cache=False).logits


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of the distributions, summed over positions, in nats."""
    said, known = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    apart = (known - said).masked_fill(known == -math.inf, 0.0)  # probability 0 adds 0 log 0 = 0
    return (known.exp() * apart).sum()


class _Run:
    """A run of a distillation: models, optimizer, step and losses."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        config: DistillConfig,
        call: Forward,
        accelerator: Any,
        state: Path | None,
    ) -> None:
        self.config, self.call, self.accelerator, self.state = config, call, accelerator, state
        self.processes = Processes.here()
        if config.rows < self.processes.size:
            raise ValueError(f"each of {self.processes.size} processes reads windows; got rows {config.rows} a step")
        self.plain = student
        decayed = [p for p in student.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in student.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer: Any = torch.optim.AdamW([group for group in groups if group["params"]], lr=config.lr)
        self.student, self.teacher = student, teacher
        self.step, self.curve = 0, LossCurve([], [])
        self.marks: dict[str, str] = {}

    def begin(self) -> None:
        """Continue from the state file if it exists, and prepare the models for the accelerator."""
        if self.state is not None and not self.processes.rank:
            check_destination(self.state)
        if self.state is not None and self.state.exists():
            saved = _state_of(self.state)
            mine = asdict(self.config)
            if saved["recipe"] != mine:
                names = [name for name in mine if saved["recipe"].get(name) != mine[name]]
                other = ", ".join(f"{name} {shown(saved['recipe'].get(name))}, not {mine[name]}" for name in names)
                raise ValueError(f"{self.state}: the state of another run ({other}); remove it, or distill as it says")
            for name, what in (("text", "on another text"), ("teacher", "with another teacher")):
                if saved[name] != self.marks[name]:
                    raise ValueError(f"{self.state}: the state of a run {what}; remove it to begin anew")
            try:
                self.plain.load_state_dict(saved["student"])
                self.optimizer.load_state_dict(saved["optimizer"])
            except (RuntimeError, ValueError):  # the saved tensors have other names or sizes
                raise ValueError(f"{self.state}: the state of another model; remove it to begin anew") from None
            self.step, self.curve = saved["step"], LossCurve(saved["steps"], saved["held"])
        if self.accelerator is not None:
            self.student, self.optimizer = self.accelerator.prepare(self.plain, self.optimizer)
            self.teacher = self.teacher.to(self.accelerator.device)

    def update(self, rows: Tensor) -> None:
        """Run one optimizer step on a batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate(self.step)
        ids = self.processes.share(rows).to(next(self.plain.parameters()).device)
        loss = self.loss(ids) / len(rows)
        self.backward(loss)
        if self.accelerator is None:
            self.processes.add_gradients(self.parameters())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.curve.steps.append(round(float(self.processes.add(loss.detach().clone())), 6))

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.plain.parameters() if p.requires_grad]

    def loss(self, ids: Tensor) -> Tensor:
        """Return the mean loss over the positions of each row, summed over rows."""
        said = self.call(self.student, ids)
        with torch.no_grad():
            known = self.call(self.teacher, ids)
        total = divergence(said, known) / ids.shape[1]
        if self.config.text:
            places = said[:, :-1].flatten(0, 1).float()
            text = nn.functional.cross_entropy(places, ids[:, 1:].flatten(), reduction="sum")
            total = total + self.config.text * text / (ids.shape[1] - 1)
        return total

    def backward(self, loss: Tensor) -> None:
        if self.accelerator is None:
            loss.backward()
        else:  # the accelerator averages over processes, but each process has a part of the sum
            self.accelerator.backward(loss * self.processes.size)

    def measure(self, rows: Tensor) -> None:
        """Add the losses on held-out text to the curve."""
        device = next(self.plain.parameters()).device
        far = loss = torch.zeros((), dtype=torch.float64, device=device)
        with in_eval_mode_without_grad(self.plain):
            for ids in self.processes.share(rows).to(device).split(1):
                said, known = self.call(self.plain, ids), self.call(self.teacher, ids)
                far = far + divergence(said, known).double()
                text = nn.functional.cross_entropy(said[0, :-1].float(), ids[0, 1:], reduction="sum")
                loss = loss + text.double()
        far, loss = self.processes.add(far), self.processes.add(loss)
        counts = rows.numel(), rows[:, 1:].numel()
        self.curve.held.append([self.step, float(far) / counts[0], float(loss) / counts[1]])

    def save(self) -> None:
        """Write the state file, completely or not at all."""
        if self.state is None or self.processes.rank:
            return
        parts = {"student": self.plain.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        with writing(self.state, "the state of the run") as file:
            torch.save({**parts, **self.marks, **asdict(self.curve), "recipe": asdict(self.config)}, file)


def _mark_of(*parts: Any) -> str:
    """Return a hash that identifies texts and models.

    Of a float tensor only some values from all over it are hashed: enough to identify a model, and quick for a large
    one.
    """
    mark = hashlib.sha256()
    for part in parts:
        name, value = part if isinstance(part, tuple) else ("", part)
        mark.update(repr(name).encode())
        if not isinstance(value, Tensor):
            mark.update(repr(value).encode())
            continue
        mark.update(repr((tuple(value.shape), value.dtype)).encode())
        numbers = value.detach().flatten()
        if value.is_floating_point():
            numbers = numbers[:: max(1, numbers.numel() // MARKED)].double()
        mark.update(numbers.cpu().contiguous().numpy().tobytes())
    return mark.hexdigest()


def _state_of(path: Path) -> dict[str, Any]:
    """Return the state of a run from its file; raise ValueError for any other file, whose code torch must not run."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception:  # errors of pickle, zipfile and torch
        saved = None
    if not isinstance(saved, dict) or not saved.keys() >= STATE:
        raise ValueError(f"{path}: no state that a distillation left; remove it to begin anew")
    return saved


def _check_stream(stream: Tensor, config: DistillConfig, first: int | None) -> None:
    check_tensor("stream", stream, "a row of ids (N,)")
    if first is not None:
        check_counts(first=first)
    if stream.ndim != 1 or stream.dtype not in INTEGERS:
        raise ValueError(f"stream is a row of ids (N,); got {describe(stream)}")
    if len(stream) < config.length - (first is not None):
        raise ValueError(
            f"a window is {config.length} tokens, and the text has {len(stream)}; give a longer text, or less length"
        )
