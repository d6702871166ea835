"""Measurements during training that do not change the training: modes, gradients and random numbers stay the same."""

from __future__ import annotations

import os
import random
import statistics
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from ...extras import MissingExtra
from ...files.atomic_file import check_destination, put
from ...shapes.arguments import check_counts, shown
from .. import curve
from ..curve import Curve, Point
from ..inputs import ids as inputs
from ..inputs.repeated_tokens import Repeats
from ..result import Look
from ..roles.call_tokens import Passage, id_set
from .text import REPEATS, Ids, at

SHARE = 0.02
"""The largest share of the training time that measurements may take."""


@runtime_checkable
class Writer(Protocol):
    """The interface of TensorBoard's SummaryWriter that a watch uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one number."""


class Watch:
    """Scores of every head by step, in any training loop: call `step` once per update.

    A measurement is `headwise.look.at` on a fixed text and fixed random tokens. It restores the modes, gradients and
    all random numbers: the same run without a watch gives the same weights, bit for bit.

    Args:
        model: the model in training.
        ids: the text to measure, as for `headwise.look.at`.
        every: measure at each multiple of this step. The default is as often as `share` allows.
        share: the largest share of the training time that measurements may take; the first one runs immediately. Costs
            are estimated by the median, so one delayed measurement (a suspended machine) has no effect.
        path: a file of JSON Lines to which each measurement is appended. An existing file is continued; its points from
            the first new step on are dropped, as for a run that restarts at a checkpoint.
        tensorboard: a SummaryWriter, or the folder for one.
        delimiters, repeats, readings: as for `headwise.look.at`.

    Raises:
        TypeError, ValueError: arguments of the wrong kind; at the first measurement, the errors of `headwise.look.at`.
            Later errors become warnings, so that a measurement never ends a training run.
        OSError: the file cannot be written.
        MissingExtra: a folder for TensorBoard is given, and tensorboard is not installed.

    Example:
        >>> import headwise
        >>> from headwise.testing.constructed import constructed
        >>> model, _ = constructed([["previous-token"]])
        >>> with headwise.look.Watch(model, [1, 2, 3, 5, 8, 13, 21, 34], every=2) as watch:
        ...     for step in range(5):
        ...         point = watch.step(step, loss=1.0)  # after the update
        >>> [point.step for point in watch.curve.points]
        [0, 2, 4]
    """

    def __init__(
        self,
        model: nn.Module,
        ids: Ids,
        *,
        every: int | None = None,
        share: float = SHARE,
        path: str | os.PathLike[str] | None = None,
        tensorboard: Writer | str | os.PathLike[str] | None = None,
        delimiters: Collection[int] | None = None,
        repeats: Repeats | None = REPEATS,
        readings: Mapping[str, Sequence[Passage]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"a watch needs a torch.nn.Module, got {type(model).__name__}; load the model first")
        if every is not None:
            check_counts(1, every=every)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"share is a part of the training time, above 0 and at most 1; got {shown(share)}")
        self.model, self.ids, self.every, self.share = model, inputs.as_row(ids), every, float(share)
        inputs.check_options(None, 1, False, repeats, None)
        if delimiters is not None:
            id_set("delimiters", delimiters)
        self.options: dict[str, Any] = {"delimiters": delimiters, "repeats": repeats, "readings": readings}
        self.path = None if path is None else os.fspath(check_destination(path))
        self.curve = _continued(self.path)
        self.spent = self.cost = 0.0
        self.costs: list[float] = []
        self.started: float | None = None
        self.last = -1
        self._opened = isinstance(tensorboard, (str, os.PathLike))
        self.writer: Any = _writer(tensorboard)

    def step(self, step: int | None = None, **numbers: Any) -> Point | None:
        """Count an update, and measure if a measurement is due.

        Args:
            step: the number of the step; the default is one more than the last.
            numbers: numbers to store with the scores, such as ``loss=``.

        Returns:
            The measurement, or None.
        """
        number = self._number(step)
        self.started = time.perf_counter() if self.started is None else self.started
        if self.every is not None:
            due = number % self.every == 0
        else:  # this measurement and all earlier ones fit into the share
            trained = time.perf_counter() - self.started - self.spent
            due = not self.costs or (len(self.costs) + 1) * self.cost <= self.share * trained
        return self._measure(number, numbers) if due else None

    def measure(self, step: int | None = None, **numbers: Any) -> Point | None:
        """Measure now, for example at the end of a run. Return None, with a warning, if that failed."""
        return self._measure(self._number(step), numbers)

    def close(self) -> None:
        """Close the writer of TensorBoard if the watch opened it."""
        if self._opened and self.writer is not None:
            self.writer.close()
            self.writer = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _number(self, step: int | None) -> int:
        if step is not None:
            check_counts(step=step)
        self.last = self.last + 1 if step is None else int(step)
        return self.last

    def _measure(self, step: int, numbers: Mapping[str, Any]) -> Point | None:
        kept = curve.finite(numbers)
        first, began = not self.costs, time.perf_counter()
        try:
            with undisturbed(self.model):
                seen = at(self.model, self.ids, map_size=1, full_maps=False, **self.options)
            point = Point.of(step, seen, kept)
            self._keep(point, seen)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            if first:
                raise
            warnings.warn(f"no measurement of heads at step {step}: {error}", RuntimeWarning, stacklevel=3)
            point = None
        self.costs.append(time.perf_counter() - began)
        self.spent += self.costs[-1]
        self.cost = statistics.median(self.costs)  # not the mean: one may be delayed for minutes
        return point

    def _keep(self, point: Point, seen: Look) -> None:
        """Add a point to the curve, the file and TensorBoard."""
        before = tuple(one for one in self.curve.points if one.step < point.step)
        thresholds = {name: score.threshold for head in seen.heads for name, score in head.scores.items()}
        whole = replace(self.curve, model=self.curve.model or seen.model, points=(*before, point))
        whole = replace(whole, thresholds={**whole.thresholds, **thresholds})
        if self.path is not None:
            same = whole.about() == self.curve.about() and len(before) == len(self.curve.points) and before
            if same:
                curve.append(self.path, point)
            else:
                put(curve.lines_of(whole), self.path)
        self.curve = whole
        if self.writer is not None:
            for role in point.scores:
                self.writer.add_scalar(f"heads/{role}/best", point.best(role), point.step)
                self.writer.add_scalar(f"heads/{role}/number", len(point.plays.get(role, ())), point.step)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the states of all random generators at exit, and run without autocast's cache of casts.

    In torch 2.10 weights that autocast casts without gradients would otherwise stay in its cache and get no gradient
    from the next forward pass in the same block.
    """
    device = inputs.device_of(model)
    kind = device.type
    if kind == "cuda":
        torch.cuda.synchronize(device)  # else pending training kernels would count as measurement time
    states = random.getstate(), np.random.get_state()
    forked: tuple[list[Any], str] = ([], "cuda") if kind == "cpu" else ([device], kind)
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
    try:
        with torch.random.fork_rng(forked[0], device_type=forked[1]), cast:
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _continued(path: str | None) -> Curve:
    """Return the curve in the file, without an incomplete last line; an empty curve if there is no file."""
    if path is None or not os.path.exists(path) or not os.path.getsize(path):
        return Curve("")
    earlier = curve.read_curve(path)
    if os.path.getsize(path) != len(curve.lines_of(earlier)):
        put(curve.lines_of(earlier), path)
    return earlier


def _writer(tensorboard: Any) -> Any:
    if tensorboard is None or isinstance(tensorboard, Writer):
        return tensorboard
    if not isinstance(tensorboard, (str, os.PathLike)):
        raise TypeError(f"tensorboard is a SummaryWriter, or a folder for one; got {shown(tensorboard)}")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra(
            "a watch that writes for TensorBoard needs tensorboard, which is not installed; pip install tensorboard"
        ) from None
    return SummaryWriter(os.fspath(tensorboard))
