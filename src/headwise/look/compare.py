"""Comparison of two looks: the heads with new roles, the change of their scores, and the change of their patterns."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..files.text import visible
from ..shapes.arguments import shown, whole_numbers
from .records.head import HeadRecord, by_layer
from .result import Look
from .views.palette import label

if TYPE_CHECKING:
    import rich.table

KeptRecords: TypeAlias = Mapping[Any, Any]
Layers = dict[int, list[HeadRecord]]

OTHERS = "*"
"""The key of a heads plan for every layer that it does not name."""

PLANNED = ({"keep"}, {"keep", "kv_heads"})
"""The possible keys of a layer in a heads plan if its query heads changed."""

MOST_ROWS = 48
"""The most heads in a printed table among those with unchanged roles: those that moved farthest."""


@dataclass(frozen=True)
class HeadChange:
    """One head before and after.

    Attributes:
        layer, head: its place in the first look.
        other_layer, other_head: its place in the second look.
        before: its roles in the first look, the most specific first; only roles that both looks measured.
        after: its roles in the second look, likewise.
        moved: the total variation between its two patterns: the mean over rows of ``1/2 sum_j |A_ij - B_ij|``, from 0
            (equal) to 1 (no key in common). Rows and columns are those of the records' maps: texts longer than a map
            are pooled, and pooling never increases the distance. None if the two looks did not read the same tokens
            or their maps differ in size.
        divergence: the Jensen-Shannon divergence of the same rows, mean over rows, in bits: from 0 to 1.
        near: the total variation between its mean masses by offset, 8 back to 8 ahead, and one class for the rest: it
            shows changes that pooling hides. None without the same tokens, or without offsets, as in cross-attention.
        scores: by role, both values; only roles that both looks measured.
    """

    layer: int
    head: int
    other_layer: int
    other_head: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    moved: float | None
    divergence: float | None
    near: float | None
    scores: Mapping[str, tuple[float, float]]

    @property
    def changed(self) -> bool:
        """True if its roles changed."""
        return set(self.before) != set(self.after)

    @property
    def distance(self) -> float:
        """The larger of `moved` and `near`; tables are sorted by it."""
        return max(self.moved or 0.0, self.near or 0.0)

    @property
    def largest(self) -> tuple[str, float, float] | None:
        """The role whose value changed most, with both values."""
        if not self.scores:
            return None
        name = max(self.scores, key=lambda role: abs(self.scores[role][1] - self.scores[role][0]))
        return (name, *self.scores[name])


@dataclass(frozen=True)
class Comparison:
    """A comparison of two looks: a record for each head in both. It prints as a table and converts to JSON.

    Attributes:
        model, other: the names of the two models.
        same_text: whether both read the same tokens (for many texts: equally many); patterns are compared only then.
        heads: by layer, then head, of the first look.
        gone: (layer, head) of the heads that only the first look has.
        new: (layer, head) of the heads that only the second look has.
        guessed: layers of the first look whose heads were paired by their patterns, because `kept` was missing.
        unshared: the roles that only one of the looks measured, such as those of annotated sentences; not compared.
    """

    model: str
    other: str
    same_text: bool
    heads: tuple[HeadChange, ...]
    gone: tuple[tuple[int, int], ...] = ()
    new: tuple[tuple[int, int], ...] = ()
    guessed: tuple[int, ...] = ()
    unshared: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[HeadChange, ...]:
        """The heads whose roles changed."""
        return tuple(head for head in self.heads if head.changed)

    def about(self) -> dict[str, Any]:
        """Return all fields except the heads."""
        return {name: value for name, value in asdict(self).items() if name != "heads"}

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per head: places, roles, distances, and ``ROLE.before`` and ``ROLE.after``."""
        rows = []
        for head in self.heads:
            row = {name: value for name, value in asdict(head).items() if name != "scores"}
            row |= {"before": ", ".join(head.before), "after": ", ".join(head.after), "changed": head.changed}
            for role, (first, second) in head.scores.items():
                row |= {f"{role}.before": first, f"{role}.after": second}
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers."""
        return asdict(self)

    def to_json(self) -> str:
        """Return the dictionary as JSON text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        lines = [_cells(head) for head in self._shown()]
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *lines, strict=True)]
        aligned = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        head = "  ".join(c.ljust(w) for c, w in zip(_COLUMNS, widths, strict=True)).rstrip()
        return "\n".join([*self.summary(), head, *aligned])

    def table(self) -> rich.table.Table:
        """Return a Rich table of the heads whose roles changed and those that moved farthest."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text("\n".join(self.summary())), header_style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _COLUMNS[2:5] else "left")
        for head in self._shown():
            table.add_row(*map(Text, _cells(head)), style="" if head.changed else "dim")
        return table

    def summary(self) -> list[str]:
        """Return the lines above the table."""
        counts = f"{len(self.changed)} of {len(self.heads)} heads changed role"
        lines = [f"{visible(self.model)} against {visible(self.other)}: {counts}"]
        lines += [f"{what}: {_places(heads)}" for what, heads in (("gone", self.gone), ("new", self.new)) if heads]
        if self.guessed:
            lines.append(f"paired by their patterns in layers {', '.join(map(str, self.guessed))}")
        if self.unshared:
            named = ", ".join(visible(label(name)) for name in self.unshared[:4]) + ", ..." * (len(self.unshared) > 4)
            lines.append(f"not compared, because only one of the looks measured it: {named}")
        if self.same_text:
            known = [head for head in self.heads if (head.moved, head.near) != (None, None)]
            lines.append(f"{sum(head.distance == 0 for head in known)} of {len(self.heads)} heads did not move")
            if len(known) < len(self.heads):
                lines.append(f"{len(self.heads) - len(known)} without maps of one size or offsets to compare")
        else:
            lines.append("they read other tokens: patterns are not compared")
        return lines

    def _shown(self) -> list[HeadChange]:
        same = [head for head in self.heads if not head.changed and (head.distance > 0 or not self.same_text)]
        first = sorted(same, key=lambda head: (-head.distance, head.layer, head.head))[:MOST_ROWS]
        return [*sorted(self.changed, key=lambda head: (-head.distance, head.layer, head.head)), *first]


_COLUMNS = ("head", "after", "moved", "JS", "near", "roles", "score that moved most")


def _cells(head: HeadChange) -> tuple[str, ...]:
    numbers = ("-" if x is None else f"{x:.3f}" for x in (head.moved, head.divergence, head.near))
    ways = (("lost", head.before, head.after), ("gained", head.after, head.before))
    parts = ((what, [visible(label(name)) for name in one if name not in other]) for what, one, other in ways)
    changes = [f"{what} {', '.join(names)}" for what, names in parts if names]
    largest = head.largest
    most = "-"
    if largest is not None and f"{largest[1]:.2f}" != f"{largest[2]:.2f}":
        most = f"{visible(label(largest[0]))} {largest[1]:.2f} -> {largest[2]:.2f}"
    roles = "; ".join(changes) or ", ".join(map(visible, map(label, head.before))) or "-"
    return f"{head.layer}.{head.head}", f"{head.other_layer}.{head.other_head}", *numbers, roles, most


def _places(places: Sequence[tuple[int, int]]) -> str:
    listed = ", ".join(f"{layer}.{head}" for layer, head in places[:24])
    return f"{listed}{f' and {len(places) - 24} more' if len(places) > 24 else ''}"


def compare(a: Look, b: Look, *, kept: KeptRecords | None = None) -> Comparison:
    """Compare two looks: of two checkpoints, or of a model before and after its heads were pruned or merged.

    Heads are paired by number. If a layer of `b` has fewer, `kept` lists their numbers in `a`; without it they are
    paired in order so that the sum of the distances between their patterns is smallest (pruning keeps the order, and a
    head that was kept in the first layer keeps its pattern). Records are of query heads: merged key-value heads change
    no number.

    Args:
        a: the look before.
        b: the look after, if possible on the same text.
        kept: by layer of `a`, the numbers of its heads that `b` kept, in the order of `b`: ``{0: [0, 1, 5]}``; or the
            heads plan of `headwise plan`, ``{"layers": {"0": {"keep": [0, 1, 5]}}}``. Other layers kept all heads.

    Raises:
        TypeError: an argument is not a look.
        ValueError: the layers cannot be paired, or `kept` does not fit them.

    Example:
        >>> from headwise import look
        >>> seen = look.Look("none", 0, 0, 0, (), (), "decoder", 0.0, "0")
        >>> print(look.compare(seen, seen).summary()[0])
        none against none: 0 of 0 heads changed role
    """
    for name, one in (("a", a), ("b", b)):
        if not isinstance(one, Look):
            raise TypeError(f"{name} is a headwise.look.Look; got {shown(one)}")
    plan = _plan(kept, a)
    before, after = by_layer(a.heads), by_layer(b.heads)
    same = (a.texts, a.length, a.tokens) == (b.texts, b.length, b.tokens)
    heads: list[HeadChange] = []
    gone: list[tuple[int, int]] = []
    new: list[tuple[int, int]] = []
    guessed: list[int] = []
    pairs = _paired_layers(before, after)
    for layer, other in pairs:
        ours, theirs = before.get(layer, []), after.get(other, [])
        chosen = _paired_heads(layer, ours, theirs, plan)
        if chosen is None:
            chosen = _nearest(ours, theirs)
            guessed.append(layer)
        heads += [_change(ours[i], theirs[j], same) for i, j in chosen]
        gone += [(layer, ours[i].head) for i in range(len(ours)) if i not in {i for i, _ in chosen}]
        new += [(other, theirs[j].head) for j in range(len(theirs)) if j not in {j for _, j in chosen}]
    measured = [dict.fromkeys(name for head in one.heads for name in head.scores) for one in (a, b)]
    unshared = tuple(name for name in measured[0] | measured[1] if not (name in measured[0] and name in measured[1]))
    return Comparison(a.model, b.model, same, tuple(heads), tuple(gone), tuple(new), tuple(guessed), unshared)


# --- pairing of heads -------------------------------------------------------------------------------------------------


def _plan(kept: object, look: Look) -> dict[int, list[int]]:
    """Return `kept` as head numbers by layer of the look; raise ValueError if it is not a plan."""
    if kept is None:
        return {}
    if isinstance(kept, Mapping) and set(kept) == {"layers"}:
        kept = kept["layers"]
    names = _names(look)
    plan: dict[int, list[int]] = {}
    entries = kept.items() if isinstance(kept, Mapping) else [(None, None)]
    for layer, heads in sorted(entries, key=lambda entry: entry[0] != OTHERS):
        if isinstance(heads, Mapping) and set(heads) == {"kv_heads"}:
            continue  # merged key-value heads: every query head remains
        heads = heads["keep"] if isinstance(heads, Mapping) and set(heads) in PLANNED else heads
        if type(layer) not in (int, str) or isinstance(heads, str) or not isinstance(heads, Sequence):
            raise ValueError(
                f"kept says by layer which heads are left, such as {{0: [0, 1, 5]}}; got {shown(layer)}: {shown(heads)}"
            )
        if str(layer) not in names and layer != OTHERS:
            raise ValueError(f"kept names layer {shown(layer)}, and the look has {', '.join(names)}")
        numbers = whole_numbers(f"kept[{layer}]", heads)
        plan |= dict.fromkeys(names.values(), numbers) if layer == OTHERS else {names[str(layer)]: numbers}
    return plan


def _names(look: Look) -> dict[str, int]:
    """Return the layer of each name in a heads plan: a number, in encoder-decoders that of decoder self-attention."""
    parts = {head.layer: head.part for head in look.heads}
    names, counts = {}, Counter[str]()
    for layer, part in sorted(parts.items()):
        apart = look.kind == "encoder-decoder" and part != "decoder"
        key = f"{part}.{counts[part]}" if apart else str(counts[part] if look.kind == "encoder-decoder" else layer)
        names[key] = layer
        counts[part] += 1
    return names


def _paired_layers(before: Layers, after: Layers) -> list[tuple[int, int]]:
    """Return pairs (layer, other) by number, or by module if the layer counts differ; -1 for a missing layer."""
    if len(before) == len(after):
        return list(zip(sorted(before), sorted(after), strict=True))
    theirs = {(heads[0].module, heads[0].call): layer for layer, heads in after.items()}
    ours = {(heads[0].module, heads[0].call): layer for layer, heads in before.items()}
    if not (theirs.keys() & ours.keys() and (theirs.keys() <= ours.keys() or ours.keys() <= theirs.keys())):
        raise ValueError(
            f"looks of {len(before)} and {len(after)} layers cannot be paired: their modules have other names; compare "
            "models whose layers correspond"
        )
    pairs = [(layer, theirs.get(where, -1)) for where, layer in ours.items()]
    return pairs + [(-1, layer) for where, layer in theirs.items() if where not in ours]


def _paired_heads(
    layer: int, ours: list[HeadRecord], theirs: list[HeadRecord], plan: Mapping[int, list[int]]
) -> list[tuple[int, int]] | None:
    """Return index pairs (i, j) by number or by the plan; None if neither applies."""
    if layer in plan:
        heads = plan[layer]
        if len(heads) != len(theirs) or len(set(heads)) != len(heads) or not all(0 <= h < len(ours) for h in heads):
            raise ValueError(
                f"kept[{layer}] lists different heads of 0 to {len(ours) - 1}, as many as the layer has after "
                f"({len(theirs)}); got {shown(heads)}"
            )
        return sorted(zip(heads, range(len(theirs)), strict=True))
    if len(ours) == len(theirs) or not ours or not theirs:
        return [(i, i) for i in range(min(len(ours), len(theirs)))]
    return None


def _nearest(ours: list[HeadRecord], theirs: list[HeadRecord]) -> list[tuple[int, int]]:
    """Return the pairing in order with the smallest sum of distances; each head of the shorter list gets a partner."""
    if len(ours) < len(theirs):
        return [(i, j) for j, i in _nearest(theirs, ours)]
    far = _distances(ours, theirs)
    # best[j]: the smallest sum for the first j of `theirs` among the first i of `ours`, with its pairs
    best: list[tuple[float, list[tuple[int, int]]]] = [(0.0, []), *[(math.inf, [])] * len(theirs)]
    for i in range(len(ours)):
        for j in range(len(theirs), 0, -1):
            total = best[j - 1][0] + far[i][j - 1]
            if total < best[j][0]:
                best[j] = (total, [*best[j - 1][1], (i, j - 1)])
    return best[-1][1]


# --- distances of heads -----------------------------------------------------------------------------------------------


def _change(a: HeadRecord, b: HeadRecord, same: bool) -> HeadChange:
    moved = divergence = near = None
    if same and _alike(a, b):
        p, q = (np.asarray(one.map, dtype=np.float64) for one in (a, b))
        moved, divergence = round(float(_variation(p, q)), 5), round(_divergence(p, q), 5)
    if same and a.offsets and b.offsets:
        near = round(_near(a, b), 5)
    scores = {name: (one.value, b.scores[name].value) for name, one in a.scores.items() if name in b.scores}
    before, after = (tuple(score.name for score in one.roles if score.name in scores) for one in (a, b))
    return HeadChange(a.layer, a.head, b.layer, b.head, before, after, moved, divergence, near, scores)


def _alike(a: HeadRecord, b: HeadRecord) -> bool:
    return bool(a.map and b.map) and (len(a.map), len(a.map[0])) == (len(b.map), len(b.map[0]))


def _distances(ours: list[HeadRecord], theirs: list[HeadRecord]) -> list[list[float]]:
    """Return the distances between two lists of heads, by offsets, and also by maps if all have the same size."""
    by_maps = all(_alike(ours[0], one) for one in (*ours, *theirs))
    if not by_maps and not all(one.offsets for one in (*ours, *theirs)):
        raise ValueError(
            f"layer {ours[0].layer}: {len(ours)} and {len(theirs)} heads are paired by their offsets or by maps of one "
            "size, and records have neither; give kept, the heads that are left"
        )
    far = np.array([[_near(a, b) for b in theirs] for a in ours])
    if by_maps:
        maps = np.array([one.map for one in theirs], dtype=np.float64)
        far += np.array([_variation(np.asarray(a.map, dtype=np.float64), maps) for a in ours])
    return far.tolist()


def _variation(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the mean over rows of half the sum of absolute differences, (..., rows, columns) -> (...)."""
    return np.asarray(np.abs(p - q).sum(-1).mean(-1) / 2)


def _divergence(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> float:
    """Return the mean over rows of the Jensen-Shannon divergence, in bits."""
    middle = (p + q) / 2
    parts = [x * np.log2(np.where(x > 0, x, 1) / np.where(x > 0, middle, 1)) for x in (p, q)]
    return float(max(0.0, (parts[0] + parts[1]).sum(-1).mean() / 2))


def _near(a: HeadRecord, b: HeadRecord) -> float:
    """Return the total variation of the mean masses by offset; mass outside the offsets is one further class.

    A head that cannot look ahead has mass 0 there. Only the backward offsets that both records have are compared.
    """
    width, back = max(len(a.ahead), len(b.ahead)), min(len(a.offsets), len(b.offsets))
    p, q = ([*one.offsets[:back], *one.ahead, *[0.0] * (width - len(one.ahead))] for one in (a, b))
    far = abs(sum(p) - sum(q))
    return (sum(abs(x - y) for x, y in zip(p, q, strict=True)) + far) / 2
