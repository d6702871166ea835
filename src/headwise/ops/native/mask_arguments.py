"""The score options as arguments of the native operator: two numbers per row, ids, rows of a tensor; never T x S.

`FORMS` has the conversion of each rule type, which also determines what the kernel does not support.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...shapes import DTYPES, INTEGERS
from ...shapes.arguments import FAR
from ..masks.mask import Mask
from ..masks.picked import Picked
from ..masks.positional_rules import Alibi, Blocks, Relative
from ..masks.rule import Rule
from ..masks.rules import Band, Bias, Keep, Lengths, Segments
from ..masks.tiles import tile_map
from ..options import ScoreOptions
from ..tracing import without_numbers

MAPS = "rules without a form of their own"
ROOM = {"mask tensors": 8, "pairs of segments": 4, "rules of ALiBi": 4, MAPS: 4}
"""The maximum number of each kind that the kernel accepts in one call."""
FIRSTS = "headwise's own kernel takes windows that all keep the same first keys in sight"


class LoweredOptions(NamedTuple):
    """`ScoreOptions` in the kernel's form for one T and S: the arguments that all operators of the library share.

    The order is that of `HEADWISE_RULES` in csrc. It is another type than the options because the rules of the mask are
    here numbers, ids and tensors, which depend on T and S. Dropout and gate are separate arguments of some operators.
    """

    scale: float
    softcap: float  # 0 means none
    sinks: Tensor | None  # float32 (H,)
    low: int  # row i may attend to i + low <= j < i + high, from the bands whose offset is a number
    high: int
    # If the mask has more: int64 (B|1, 4), low, high, start, stop over all rules; a fifth column: always.
    bounds: Tensor | None
    segments: list[Tensor] | None  # query ids, key ids, ...; None if empty, which is cheaper than an empty list
    dense: list[Tensor] | None  # (B|1, H|1, T|1, S|1)
    alibi: list[Tensor] | None  # slopes (B|1, H), offsets (B|1,), ...
    maps: list[Tensor] | None  # index, bits, ... of `TileMap`, for rules without another form
    relative: list[Tensor] | None  # float32 (B|1, H, T + S - 1): the bias of query i and key j at T - 1 + j - i


@dataclass
class _Terms:
    """The arguments collected from the rules so far."""

    T: int
    S: int
    numbers: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))  # low, high
    # low, high, start, stop, always
    tensors: tuple[list[Any], ...] = field(default_factory=lambda: ([], [], [], [], []))
    segments: list[Tensor] = field(default_factory=list)
    dense: list[Tensor] = field(default_factory=list)
    alibi: list[Tensor] = field(default_factory=list)
    maps: list[Tensor] = field(default_factory=list)
    relative: list[Tensor] = field(default_factory=list)

    def rules(self, scale: float, softcap: float, sinks: Tensor | None) -> LoweredOptions:
        """Return all arguments in the operator's form, together with the other options."""
        lows, highs = self.numbers
        low = reduce(torch.sym_max, lows) if lows else None
        high = reduce(torch.sym_min, highs) if highs else None
        bounds = _bounds((low, high, None, None, None), self.tensors) if any(self.tensors) else None
        return LoweredOptions(
            scale,
            softcap,
            sinks,
            low=-FAR if low is None else low,
            high=FAR if high is None else high,
            bounds=bounds,
            segments=self.segments or None,
            dense=self.dense or None,
            alibi=self.alibi or None,
            maps=self.maps or None,
            relative=self.relative or None,
        )


def ends_of(mask: Mask, T: int, S: int) -> tuple[int, int] | None:
    """Return `low` and `high` of a mask that has only bands at numbers, or no parts; None for any other mask."""
    band = mask.simple_band
    if band is None:
        return None
    low, high, at_end = band
    shift = S - T if at_end else 0
    return -FAR if low is None else low + shift, FAR if high is None else high + shift


class UnsupportedMask(TypeError):
    """The operator does not support a mask."""


def lowered(options: ScoreOptions, T: int, S: int) -> LoweredOptions:
    """Return the options as arguments of the operator; the operator itself refuses tensors that do not fit the call.

    Raises UnsupportedMask for a mask without a form, and for an index that is not an integer tensor, because a
    conversion would hide that error.
    """
    parts = options.mask.parts
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    softcap = options.softcap or 0.0
    traced = torch.compiler.is_compiling() or not (type(T) is type(S) is int)
    if not traced and (ends := ends_of(options.mask, T, S)) is not None:  # most calls
        return LoweredOptions(options.scale, softcap, sinks, *ends, None, None, None, None, None, None)
    terms = _Terms(T, S)
    if len(parts) > 1 and len(_firsts(options.mask)) > 1:
        raise UnsupportedMask(FIRSTS)
    for rule in parts:
        form = form_of(rule)
        if form is None:
            raise UnsupportedMask(_without_form(rule))
        form.put(rule, terms)
    return terms.rules(options.scale, softcap, sinks)


def trouble_with(mask: Mask) -> str | None:
    """Return the reason why the kernel does not support a mask; None if it does."""
    rooms = []
    for rule in mask.parts:
        form = form_of(rule)
        if form is None:
            return _without_form(rule)
        rooms.append(form.room)
    for room, n in Counter(rooms).items():
        if room is not None and n > ROOM[room]:
            return f"headwise's own kernel takes at most {ROOM[room]} {room}"
    return FIRSTS if len(_firsts(mask)) > 1 else None


def _without_form(rule: Rule) -> str:
    if rule.restricts and not rule.biases:
        return f"headwise's own kernel takes {type(rule).__name__} by a map of tiles, which is not made while tracing"
    return f"headwise's own kernel has no form for {type(rule).__name__}, which adds to the scores"


def _firsts(mask: Mask) -> set[int]:
    return {rule.first for rule in mask.parts if isinstance(rule, Band) and rule.left is not None}


def _put_band(rule: Band, terms: _Terms) -> None:
    shift = rule.shift(terms.T, terms.S)
    to = terms.tensors if isinstance(shift, Tensor) else terms.numbers
    if rule.left is not None:
        to[0].append(shift - rule.left + 1)
    if rule.right is not None:
        to[1].append(shift + rule.right + 1)
    if rule.kept:
        terms.tensors[4].append(_numbers(rule.kept, 1)[0])


def _put_lengths(rule: Lengths, terms: _Terms) -> None:
    terms.tensors[3].append(_indices(rule.stop))
    if rule.start is not None:
        terms.tensors[2].append(_int64(rule.start))


def _put_segments(rule: Segments, terms: _Terms) -> None:
    terms.segments += [_int64(rule.query_ids), _int64(rule.key_ids)]


def _put_blocks(rule: Blocks, terms: _Terms) -> None:
    terms.segments += rule.ids(terms.T, terms.S, torch.device("cpu"))


def _put_dense(rule: Keep | Bias, terms: _Terms) -> None:
    terms.dense.append(rule.full if rule.tensor.dtype in _READ else rule.full.float())


def _put_alibi(rule: Alibi, terms: _Terms) -> None:
    offset = terms.S - terms.T if rule.offset is None else rule.offset
    terms.alibi += [rule.slopes.float().view(-1, rule.slopes.shape[-1]), _indices(offset)]


def _put_relative(rule: Relative, terms: _Terms) -> None:
    R, T, S = rule.radius, terms.T, terms.S
    offset = S - T if rule.offset is None else rule.offset
    shift = _int64(offset).clamp(-FAR, FAR)[:, None] if isinstance(offset, Tensor) else offset
    apart = (torch.arange(1 - T, S, device="cpu") - shift).clamp(-R, R) + R  # for each diagonal; (B, n) or (n,)
    diagonals = rule.table.float().index_select(1, apart.flatten()).view(-1, *apart.shape)  # (H, n) or (H, B, n)
    terms.relative.append(diagonals[None] if diagonals.ndim == 2 else diagonals.transpose(0, 1))


def _put_map(rule: Rule, terms: _Terms) -> None:
    terms.maps += tile_map(rule, terms.T, terms.S)


def _put_picked(rule: Picked, terms: _Terms) -> None:
    raise UnsupportedMask("picked keys are gathered before the kernel runs")  # `picked_keys`


class RuleForm(NamedTuple):
    """The conversion of a rule type into arguments, and the kind in `ROOM` that limits its number."""

    put: Callable[[Any, _Terms], None]
    room: str | None = None


FORMS: dict[type[Rule], RuleForm] = {
    Band: RuleForm(_put_band),
    Lengths: RuleForm(_put_lengths),
    Segments: RuleForm(_put_segments, "pairs of segments"),
    Blocks: RuleForm(_put_blocks, "pairs of segments"),
    Keep: RuleForm(_put_dense, "mask tensors"),
    Bias: RuleForm(_put_dense, "mask tensors"),
    Alibi: RuleForm(_put_alibi, "rules of ALiBi"),
    Relative: RuleForm(_put_relative, "mask tensors"),
    Picked: RuleForm(_put_picked),
}


_BY_MAP = RuleForm(_put_map, MAPS)


def form_of(rule: Rule) -> RuleForm | None:
    """Return the form of a rule: its own, or a tile map if it only restricts; None if it is not supported."""
    form = FORMS.get(type(rule))
    if form is not None or rule.biases or without_numbers():
        return form
    return _BY_MAP


def _bounds(numbers: tuple[int | None, ...], tensors: tuple[list[Any], ...]) -> Tensor:
    """Return int64 (B|1, 4): low, high, start, stop of each batch row, the tightest over all rules.

    The result is (B|1, 5) if some first keys are always visible: the fifth column is their end.
    """
    if any(x.ndim != 1 for terms in tensors for x in terms):
        raise UnsupportedMask("an index has one number a row of the batch")
    n = next((x.shape[0] for terms in tensors for x in terms if x.shape[0] != 1), 1)
    columns: list[Tensor] = []
    tensors = tensors if tensors[4] else tensors[:4]
    for number, terms, (tightest, none) in zip(numbers, tensors, _ENDS, strict=False):
        ends = [x[:, None] for x in terms]
        if number is not None or not terms:
            ends.append(_numbers(none if number is None else number, n))
        column = reduce(tightest, ends)
        columns.append(column if column.shape[0] == n else column.expand(n, 1))
    return torch.cat(columns, dim=1)


# The dtypes of mask tensors that the operator supports; a bias of another float dtype is converted.
_READ = (torch.bool, *DTYPES)
# For each column: the function that joins two rules, and the value for no rule.
_ENDS = ((torch.maximum, -FAR), (torch.minimum, FAR), (torch.maximum, 0), (torch.minimum, FAR), (torch.minimum, 0))


def _numbers(number: int, n: int) -> Tensor:
    """Return an (n, 1) tensor filled with the number; on the CPU for any default device."""
    return torch.full((n, 1), number, dtype=torch.int64, device="cpu")


def _indices(index: Tensor | int) -> Tensor:
    """Return an index as a (B|1,) tensor."""
    return _int64(index) if isinstance(index, Tensor) else _numbers(index, 1)[0]


def _int64(index: Tensor) -> Tensor:
    """Return the index as int64; a float or bool tensor, or a tensor without an axis, is an error."""
    if index.ndim == 0:
        raise UnsupportedMask("an index has an axis, of the batch or of tokens")
    if index.dtype == torch.int64:
        return index
    if index.dtype not in INTEGERS:
        raise UnsupportedMask(f"an index is an integer tensor; got {index.dtype}")
    return index.long()
