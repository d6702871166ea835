"""Training curves of heads: the scores of every head at each step of a training run, as plain records and as a file.

The file is JSON Lines: one line about the run, then one line per measurement, appended and synced. An incomplete last
line of a killed run is ignored, and removed before the next line is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..files.atomic_file import get
from ..files.text import visible
from ..shapes.arguments import check_texts, shown
from .records.head import by_layer
from .records.schema import Damaged, PlainRecord, record
from .result import Look
from .views import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1

HeadValues = tuple[tuple[float | None, ...], ...]
"""One value per head, by layer; None if it was not measured."""

Places = tuple[tuple[int, int], ...]
"""(layer, head) of some heads."""


@dataclass(frozen=True)
class Point(PlainRecord):
    """One measurement.

    Attributes:
        step: the training step.
        seconds: the duration of the measurement.
        numbers: numbers from the training loop, such as its loss.
        scores: by role, the value of every head.
        plays: by role, the heads that play it.
    """

    CALLED = "a point of a curve is"

    step: int
    seconds: float
    numbers: Mapping[str, float]
    scores: Mapping[str, HeadValues]
    plays: Mapping[str, Places]

    @classmethod
    def of(cls, step: int, seen: Look, numbers: Mapping[str, float]) -> Point:
        """Return the point of a look at a step."""
        roles = dict.fromkeys(name for head in seen.heads for name in head.scores)
        layers = [heads for _, heads in sorted(by_layer(seen.heads).items())]
        scores = {role: tuple(tuple(_rounded(head.value(role)) for head in row) for row in layers) for role in roles}
        plays = {role: tuple((head.layer, head.head) for head in seen.with_role(role)) for role in roles}
        return cls(step, seen.seconds, dict(numbers), scores, {role: heads for role, heads in plays.items() if heads})

    def best(self, role: str) -> float | None:
        """Return the highest value of any head; None if the role was not measured."""
        values = [value for row in self.scores.get(role, ()) for value in row if value is not None]
        return max(values, default=None)

    def check(self) -> None:
        """Raise ValueError if a role is played by a head without a score."""
        for role, heads in self.plays.items():
            widest = max(map(len, self.scores.get(role, ())), default=0)
            for n, (_, head) in enumerate(heads):
                if head >= widest:  # layer numbers are not checked: some layers may not attend
                    raise Damaged(f"names a head without a score; got head {head}", "plays", role, n)


@dataclass(frozen=True)
class Curve:
    """The measurements of one run, by step.

    Attributes:
        model: the name of the model.
        thresholds: by role, the value that a head must exceed to play it.
        points: the measurements.
    """

    model: str
    thresholds: Mapping[str, float] = field(default_factory=dict)
    points: tuple[Point, ...] = ()

    def best(self, role: str) -> tuple[list[int], list[float]]:
        """Return the steps at which the role was measured, and the highest value of any head at each.

        Raises:
            ValueError: the role was never measured.
        """
        check_texts(role=role)
        points = [(point.step, value) for point in self.points if (value := point.best(role)) is not None]
        if not points:
            raise ValueError(f"measured were {', '.join(self.thresholds) or 'no roles'}; got {shown(role)}")
        return [step for step, _ in points], [value for _, value in points]

    def formed(self) -> list[str]:
        """Return the roles that any head played at any step, sorted by their number of heads at the last step."""
        names = dict.fromkeys(role for point in self.points for role in point.plays)
        last = self.points[-1].plays if self.points else {}
        return sorted(names, key=lambda role: (-len(last.get(role, ())), role))

    def about(self) -> dict[str, Any]:
        """Return the model and the thresholds, without the measurements."""
        return {"model": self.model, "thresholds": dict(self.thresholds)}

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per step and role: best value, number of heads that play it, and the step's numbers."""
        return [
            {
                "step": point.step,
                "role": role,
                "best": point.best(role),
                "heads": len(point.plays.get(role, ())),
                "seconds": point.seconds,
                **point.numbers,
            }
            for point in self.points
            for role in point.scores
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers."""
        return {"format": FORMAT, **self.about(), "points": [point.to_dict() for point in self.points]}

    def to_json(self) -> str:
        """Return the dictionary as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Curve:
        """Return the curve from the output of `to_dict` (or JSON); raise ValueError if it is invalid."""
        number = data.get("format") if isinstance(data, dict) else data
        if type(number) is not int or number != FORMAT:
            raise ValueError(f"a curve is read from format {FORMAT}, got {shown(number)}; write it with this version")
        return record(cls, data, "a curve is", needs=("thresholds", "points"))

    def plot_formation(self) -> Figure:
        """Return a Matplotlib figure: the best score of each role by step."""
        return figures.plot_formation(self)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# --- the file ---------------------------------------------------------------------------------------------------------


def read_curve(path: str | os.PathLike[str]) -> Curve:
    """Return the curve in a file of JSON Lines, without an incomplete last line.

    Raises:
        TypeError: not a path.
        OSError: the file cannot be read.
        ValueError: the file does not contain a curve.
    """
    content = get(path, "a curve")
    name = visible(str(os.fspath(path)))
    lines = content.split(b"\n")[:-1]  # bytes after the last newline are an incomplete line
    try:
        head, *points = [json.loads(line) for line in lines]
        return Curve.from_dict({**head, "points": points})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{name} is no curve: {error}; give what headwise.look.Watch wrote") from None


def lines_of(curve: Curve) -> bytes:
    """Return the content of the whole file."""
    head = {"format": FORMAT, **curve.about()}
    return b"".join(_line(one) for one in (head, *(point.to_dict() for point in curve.points)))


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def append(path: str | os.PathLike[str], point: Point) -> None:
    """Append a line and sync it; if that fails, restore the file.

    Raises:
        OSError: the write failed, for example because the disk is full.
    """
    line = _line(point.to_dict())
    with open(path, "ab") as file:
        size = file.seek(0, os.SEEK_END)
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except BaseException as error:
            with suppress(OSError):
                os.truncate(path, size)
            if isinstance(error, OSError):
                why = error.strerror or type(error).__name__
                raise OSError(f"cannot write {visible(os.fspath(path))}: {why}; free some space") from error
            raise


def finite(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a training loop as floats, without those that are not finite (JSON cannot store them).

    Raises:
        TypeError: a value is not a number.
    """
    kept = {}
    for name, number in numbers.items():
        try:
            if isinstance(number, (bool, np.bool_)):
                raise TypeError
            value = float(number.detach() if isinstance(number, Tensor) else number)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise TypeError(f"{name} is a number beside the scores, such as a loss; got {shown(number)}") from None
        if math.isfinite(value):
            kept[name] = round(value, 6)
    return kept
