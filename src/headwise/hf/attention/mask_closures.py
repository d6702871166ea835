"""Conversion of transformers' mask functions to headwise masks.

transformers describes a mask by an index function, `mask_function(batch, head, query, key) -> bool`, made by closures:
causal, sliding window, chunks, packed sequences, padding, and intersections of those. `read_mask` converts such a
closure to rules, so that no T x S tensor is made. The closures are private to transformers, therefore

- each reader is tested once in a process against the evaluation by the installed transformers; a reader that
  disagrees (for example after an upgrade) is not used, and a warning is logged;
- a function that cannot be converted completely is evaluated: see `mask_functions`, and `dense_mask` for the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import and_
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from ...ops.masks.constructors import keep, lengths, segments, window
from ...ops.masks.mask import EVERYTHING, Mask

logger = logging.getLogger("headwise.hf")

MaskFunction: TypeAlias = Callable[..., Any]
Cells: TypeAlias = dict[str, Any]
"""The variables of a closure, by name."""


@dataclass(frozen=True)
class Frame:
    """The size of a mask, and the positions of its first query and first key."""

    B: int
    T: int
    S: int
    q_offset: int = 0
    kv_offset: int = 0
    device: torch.device | str = "cpu"
    positions: Tensor | None = None
    """(B|1, T) positions that replace the indices, as in a packed batch; then T == S, and the offsets are 0."""

    def places(self) -> list[Tensor]:
        """Return the positions of the queries (B|1, T) and of the keys (B|1, S)."""
        if self.positions is not None:
            return [self.positions, self.positions]
        spans = ((self.q_offset, self.T), (self.kv_offset, self.S))
        return [torch.arange(first, first + n, device=self.device)[None] for first, n in spans]

    def is_square_with(self, per_token: Tensor) -> bool:
        """Return True if a (B, n) tensor describes both the queries and the keys."""
        return self.T == self.S == per_token.shape[-1] and self.q_offset == self.kv_offset == 0


@dataclass(frozen=True)
class ClosureRules:
    """The meaning of a closure: a band around the query's own position (counted as in `window`), and further masks."""

    left: int | None = None
    right: int | None = None
    masks: tuple[Mask, ...] = ()

    def __and__(self, other: ClosureRules) -> ClosureRules:
        return ClosureRules(_least(self.left, other.left), _least(self.right, other.right), self.masks + other.masks)

    def mask(self, offset: int) -> Mask:
        """Return one mask. `offset` is the position of query 0 among the keys. Without rules, the mask has no parts."""
        band = EVERYTHING if self.left is None and self.right is None else window(self.left, self.right, offset=offset)
        return reduce(and_, self.masks, band)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def read_mask(function: MaskFunction, frame: Frame) -> Mask | None:
    """Return the headwise mask of a mask function, or None if no reader fits.

    >>> frame = Frame(B=1, T=2, S=4, q_offset=2)
    >>> read_mask(theirs.sliding_window_causal_mask_function(3), frame)
    Mask(parts=(Band(left=3, right=0, offset=2, first=0),))
    >>> read_mask(lambda b, h, q, k: q != k, frame) is None
    True
    """
    rules = _read(function, frame, trusted_readers())
    return None if rules is None else rules.mask(frame.q_offset - frame.kv_offset)


def read_padding(padding: Tensor, frame: Frame) -> Mask:
    """Return the mask of this frame's keys for a 2-D padding mask (True = a real token) over absolute key positions.

    Keys beyond its end do not exist yet (static caches) and may not be attended. If each row has one run of real
    tokens, as left or right padding gives, the mask stores two numbers for each row; else a (B, 1, 1, S) tensor.
    """
    if padding.ndim != 2:
        raise ValueError(
            f"a padding mask is (B, S), True for a real token; got {tuple(padding.shape)}: one of queries by keys is "
            "(B, 1, T, S), attention_mask[:, None]"
        )
    padding = padding.to(device=frame.device, dtype=torch.bool)[:, frame.kv_offset : frame.kv_offset + frame.S]
    if padding.is_meta:  # a meta tensor has no numbers to read
        return keep(padding.new_empty(len(padding), 1, 1, frame.S))
    if padding.shape[1] == frame.S and bool(padding.all()):
        return EVERYTHING
    padding = torch.nn.functional.pad(padding, (0, frame.S - padding.shape[1]))
    count = padding.sum(-1)
    start = padding.to(torch.int8).argmax(-1)
    j = torch.arange(frame.S, device=frame.device)
    if torch.equal(padding, (j >= start[:, None]) & (j < (start + count)[:, None])):
        return lengths(start + count, start)
    return keep(padding[:, None, None, :])


def dense_mask(function: MaskFunction, frame: Frame, padding: Tensor | None = None, *, use_vmap: bool = False) -> Mask:
    """Return the mask as transformers itself evaluates it: a (B, 1, T, S) tensor."""
    grid = theirs.sdpa_mask(
        batch_size=frame.B,
        q_length=frame.T,
        kv_length=frame.S,
        q_offset=frame.q_offset,
        kv_offset=frame.kv_offset,
        mask_function=function,
        attention_mask=padding,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=frame.device,
    )
    return keep(grid)


# -- readers: the variables of a closure and a frame -> ClosureRules, or None if no rule describes it -----------------

Readers: TypeAlias = Mapping[CodeType | None, Any]
"""The reader of each closure, by its code."""
ClosureReader: TypeAlias = Callable[[Cells, Frame, Readers], ClosureRules | None]


def _read(function: MaskFunction, frame: Frame, readers: Readers) -> ClosureRules | None:
    reader = readers.get(_code_of(function))
    return None if reader is None else reader(_cells(function), frame, readers)


def _code_of(function: MaskFunction) -> CodeType | None:
    return getattr(function, "__code__", None)  # a callable object has none


def _cells(function: MaskFunction) -> Cells:
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _sliding(cells: Cells, frame: Frame, readers: Readers) -> ClosureRules | None:
    width = cells["sliding_window"]  # key > query - width: `width` keys including the query's own, as in headwise
    return ClosureRules(left=width) if width >= 1 else None


def _sliding_both_ways(cells: Cells, frame: Frame, readers: Readers) -> ClosureRules | None:
    width = cells["sliding_window"]  # |query - key| <= width: on the left, the query's own key is counted in addition
    return ClosureRules(left=width + 1, right=width) if width >= 0 else None


def _chunked(cells: Cells, frame: Frame, readers: Readers) -> ClosureRules | None:
    size, first = cells["chunk_size"], cells["left_padding"].to(frame.device)[:, None]
    chunks = [torch.div(at - first, size, rounding_mode="floor") for at in frame.places()]
    return ClosureRules(masks=(segments(*chunks),))


def _packed(cells: Cells, frame: Frame, readers: Readers) -> ClosureRules | None:
    ids = cells["packed_sequence_mask"]
    return ClosureRules(masks=(segments(ids),)) if frame.is_square_with(ids) else None


def _padding(cells: Cells, frame: Frame, readers: Readers) -> ClosureRules | None:
    return ClosureRules(masks=(read_padding(cells["padding_mask"], frame),))


def _all_of(cells: Cells, frame: Frame, readers: Readers) -> ClosureRules | None:
    functions = cells["mask_functions"]
    renumber = getattr(theirs, "remap_positions_for_packed_sequence", None)  # does not exist in 5.20
    joined = ClosureRules()
    for function in functions:
        is_renumbered = renumber is not None and _code_of(function) is _code_of(renumber(None, None))
        rules = _renumbered(function, functions, frame, readers) if is_renumbered else _read(function, frame, readers)
        if rules is None:
            return None
        joined = joined & rules
    return joined


def _renumbered(
    function: MaskFunction, beside: tuple[MaskFunction, ...], frame: Frame, readers: Readers
) -> ClosureRules | None:
    """Return the rules of a mask over positions that restart at 0 in every packed sequence.

    Inside a sequence, these positions differ from the indices by a constant, so a band stays the same band. Across
    sequences they mean nothing: the rule is valid only together with the mask that separates these same sequences.
    """
    cells = _cells(function)
    positions = cells["position_ids"]
    if not frame.is_square_with(positions):
        return None
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    packed = _code_of(theirs.packed_sequence_mask_function(None))
    apart = [_cells(other)["packed_sequence_mask"] for other in beside if _code_of(other) is packed]
    if not any(torch.equal(ids, sequence) for ids in apart):
        return None
    return _read(cells["mask_function"], replace(frame, positions=positions), readers)


# -- the reader of each closure, and the check that the installed transformers agrees with it -------------------------


_SQUARE, _LATER = Frame(B=2, T=6, S=6), Frame(B=2, T=3, S=7, q_offset=5, kv_offset=1)


def _samples() -> dict[str, tuple[ClosureReader, list[MaskFunction]]]:
    """Return the reader and sample closures for each of transformers' factories; a reader comes after those it uses."""
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]], device="cpu")
    starts = torch.tensor([0, 2], device="cpu")
    padding = torch.arange(8, device="cpu") >= starts[:, None]
    chunks = theirs.chunked_causal_mask_function(3, starts)
    packed = theirs.packed_sequence_mask_function(theirs.find_packed_sequence_indices(positions))
    renumber = getattr(theirs, "remap_positions_for_packed_sequence", None)  # does not exist in 5.20
    renumbered = [] if renumber is None else [theirs.and_masks(renumber(chunks, positions), packed)]
    return {
        "causal_mask_function": (lambda *_: ClosureRules(right=0), [theirs.causal_mask_function]),
        "bidirectional_mask_function": (lambda *_: ClosureRules(), [theirs.bidirectional_mask_function]),
        "sliding_window_overlay": (_sliding, [theirs.sliding_window_overlay(3)]),
        "sliding_window_bidirectional_overlay": (_sliding_both_ways, [theirs.sliding_window_bidirectional_overlay(2)]),
        "chunked_overlay": (_chunked, [theirs.chunked_overlay(3, starts)]),
        "packed_sequence_mask_function": (_packed, [packed]),
        "padding_mask_function": (_padding, [theirs.padding_mask_function(padding)]),
        "and_masks": (_all_of, [chunks, *renumbered]),
    }


@cache
def trusted_readers() -> Readers:
    """Return the readers that agree with the installed transformers; they are tested once, in about 10 ms."""
    trusted: dict[CodeType | None, ClosureReader] = {}
    with torch.device("cpu"):  # independent of the caller's default device
        for name, (reader, functions) in _samples().items():
            code = functions[0].__code__
            if all(_agrees(function, trusted | {code: reader}) for function in functions):
                trusted[code] = reader
            else:
                logger.warning("transformers' %s has changed its meaning: such masks are evaluated, not read", name)
    return trusted


def _agrees(function: MaskFunction, readers: Readers) -> bool:
    """Return True if a function can be read on some frame, and every reading equals the evaluation by transformers."""
    understood = 0
    for frame in (_SQUARE, _LATER):
        try:
            rules = _read(function, frame, readers)
        except Exception:  # a changed closure may raise any error, and then it is not read
            return False
        if rules is None:
            continue
        understood += 1
        mask = rules.mask(frame.q_offset - frame.kv_offset)
        ours, exact = (m.dense(frame.T, frame.S).expand(2, 1, -1, -1) for m in (mask, dense_mask(function, frame)))
        if not torch.equal(ours, exact):
            return False
    return understood > 0
