"""Structural masks and biases: what each query may attend, said without a T x S tensor.

A mask says what *may be attended*: True = attend. Masks are small frozen objects; `&` joins them. A kernel that
understands their structure never sees a matrix; everything else asks for the rows it needs.

>>> print(causal().draw(3, 5))        # bottom-right: the last query sees the last key
■ ■ ■ · ·
■ ■ ■ ■ ·
■ ■ ■ ■ ■
>>> print((window(2) & lengths(torch.tensor([4]))).draw(3, 5))     # 2 keys, self included; 4 real keys
· ■ ■ · ·
· · ■ ■ ·
· · · ■ ·
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from ..shapes import MASK_RULE, check_integers, check_made
from ..shapes.kinds import check_counts, check_device, check_index, check_tensor
from .rules import Alibi, Band, Bias, Keep, Lengths, Part, Rows, Segments, check_asked, checked_at, full_rank, register
from .symbols import known

EMPTY, MIXED, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Mask:
    """Rules joined by `and`. Made by `causal()`, `window()`, ...; joined with `&`; frozen.

    >>> (causal() & window(4)).parts
    (Band(left=None, right=0, offset=None, first=0), Band(left=4, right=0, offset=None, first=0))
    """

    parts: tuple[Part, ...]

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise TypeError(f"{MASK_RULE}: `&` joins masks; got {type(other).__name__}; wrap a bool tensor in keep()")
        return Mask(self.parts + other.parts)

    def allowed(
        self, T: int, S: int, *, rows: Rows = None, cols: Rows = None, device: torch.device | None = None
    ) -> Tensor | None:
        """What may be attended: bool (B|1, H|1, R, C), True = attend; None where everything may be.

        `rows`, `cols`: a slice or 1-D index tensor of the queries and keys wanted; all by default.
        """
        check_asked(T, S, rows, cols, device)
        found = []
        for part in self.parts:
            if part.restricts:
                rule = part.grid(T, S, rows, cols, device)
                found.append(rule != -torch.inf if part.biases else rule)
        return full_rank(reduce(torch.logical_and, found), T, S, rows, cols) if found else None

    def added(
        self, T: int, S: int, *, rows: Rows = None, cols: Rows = None, device: torch.device | None = None
    ) -> Tensor | None:
        """What is added to the scores: float (B|1, H|1, R, C); None where nothing is."""
        check_asked(T, S, rows, cols, device)
        found = [part.grid(T, S, rows, cols, device) for part in self.parts if part.biases]
        return full_rank(reduce(torch.add, found), T, S, rows, cols) if found else None

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> tuple[Tensor | None, Tensor | None]:
        """(allowed, added) at gathered places; i, j: integer tensors that broadcast to (B, H, R, C)."""
        i, j = checked_at(i, j, T, S)
        allowed: list[Tensor] = []
        added: list[Tensor] = []
        for part in self.parts:
            rule = part.at(i, j, T, S)
            if part.biases:
                added.append(rule)
                rule = rule != -torch.inf
            if part.restricts:
                allowed.append(rule)
        return reduce(torch.logical_and, allowed) if allowed else None, reduce(torch.add, added) if added else None

    def dense(self, T: int, S: int, *, device: torch.device | None = None) -> Tensor:
        """The whole matrix, as torch's SDPA takes it: bool, or float with -inf where a bias is among the rules."""
        allowed, added = self.allowed(T, S, device=device), self.added(T, S, device=device)
        if added is None:
            return torch.ones(1, 1, T, S, dtype=torch.bool, device=device) if allowed is None else allowed
        return added if allowed is None else added.masked_fill(~allowed, -torch.inf)

    def draw(self, T: int, S: int, *, batch: int = 0, head: int = 0) -> str:
        """The T x S picture of one head: a line a query; `·` may not be attended; a bias shows its number."""
        check_counts(T=T, S=S, batch=batch, head=head)
        grid = self.dense(T, S)
        grid = grid[min(batch, grid.shape[0] - 1), min(head, grid.shape[1] - 1)]
        if grid.dtype == torch.bool:
            return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in grid.tolist())
        cells = [["·" if cell == -torch.inf else f"{cell + 0.0:g}" for cell in row] for row in grid.tolist()]
        width = max((len(cell) for row in cells for cell in row), default=1)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)

    @property
    def is_interval(self) -> bool:
        """True where each row's keys are one interval, so that `bounds` tells all."""
        rules = [part for part in self.parts if part.restricts]
        return all(isinstance(part, Lengths) or (isinstance(part, Band) and not part.kept) for part in rules)

    @property
    def is_top_left(self) -> bool:
        """True where this is exactly what `is_causal` means to torch: j <= i."""
        if len(self.parts) != 1 or not isinstance(self.parts[0], Band):
            return False
        band = self.parts[0]
        top_left = band.left is None and band.right == 0 and band.offset is not None
        return top_left and not isinstance(band.offset, Tensor) and known(band.offset == 0)

    @cached_property
    def simple_band(self) -> tuple[int | None, int | None, bool] | None:
        """(low, high, at the end): row i sees i + low <= j < i + high, where S - T is to be added to both at the end.

        None where the mask is more than bands, all at the end or all at numbers. Kept: decoding asks at every step.
        """
        lows, highs, at_end = [], [], set()
        for part in self.parts:
            if not isinstance(part, Band) or isinstance(part.offset, Tensor) or part.kept:
                return None
            shift = part.offset or 0
            at_end.add(part.offset is None)
            if part.left is not None:
                lows.append(shift - part.left + 1)
            if part.right is not None:
                highs.append(shift + part.right + 1)
        return (max(lows, default=None), min(highs, default=None), at_end.pop()) if len(at_end) == 1 else None

    @property
    def learns(self) -> bool:
        """True where a bias or ALiBi's slopes are to get a gradient."""
        return any(
            (part.tensor if isinstance(part, Bias) else part.slopes).requires_grad  # type: ignore[attr-defined]
            for part in self.parts
            if part.biases
        )

    @property
    def is_same_for_rows(self) -> bool:
        """True where every row may attend the same keys with the same bias, as under padding."""
        return all(
            isinstance(part, Lengths) or (isinstance(part, (Keep, Bias)) and part.full.shape[2] == 1)
            for part in self.parts
        )

    def bounds(self, T: int, S: int, device: torch.device | None = None) -> tuple[Tensor, Tensor] | None:
        """(lo, hi), each (B|1, T): row i may attend exactly lo[i] <= j < hi[i]; None if rows are no intervals."""
        check_asked(T, S, None, None, device)
        if not self.is_interval:
            return None
        lo = torch.zeros(1, T, dtype=torch.long, device=device)
        hi = torch.full((1, T), S, dtype=torch.long, device=device)
        for part in self.parts:
            if isinstance(part, Band):
                shift = part.shift(T, S)
                pos = torch.arange(T, device=device)[None] + (shift[:, None] if isinstance(shift, Tensor) else shift)
                lo = lo if part.left is None else torch.maximum(lo, pos - part.left + 1)
                hi = hi if part.right is None else torch.minimum(hi, pos + part.right + 1)
            elif isinstance(part, Lengths):
                lo = lo if part.start is None else torch.maximum(lo, part.start.view(-1, 1))
                hi = torch.minimum(hi, part.stop.view(-1, 1))
        lo, hi = torch.broadcast_tensors(lo.clamp(0, S), hi.clamp(0, S))
        return lo, torch.maximum(lo, hi)

    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        """The keys k0 <= j < k1 outside of which the queries first <= i < last see nothing.

        Plain integers, from the bands alone (no look at any tensor), so it may be wider than the truth.
        """
        check_counts(T=T, S=S, first=first, last=last)
        k0, k1 = 0, S
        for part in self.parts:
            shift = part.shift(T, S) if isinstance(part, Band) else None
            if isinstance(part, Band) and not isinstance(shift, Tensor) and shift is not None:
                k0 = k0 if part.left is None or part.kept else max(k0, first + shift - part.left + 1)
                k1 = k1 if part.right is None else min(k1, last + shift + part.right)
        k0 = min(max(k0, 0), S)
        return k0, min(max(k1, k0), S)

    def tiles(
        self, T: int, S: int, *, tile_q: int = 64, tile_k: int = 64, device: torch.device | None = None
    ) -> Tensor:
        """Which (query, key) tiles are EMPTY (0), MIXED (1), FULL (2): int8 (B|1, H|1, ceil(T/tile_q), ceil(S/tile_k)).

        Reads one row of tiles at a time: memory O(tile_q * S).

        >>> causal().tiles(128, 128, tile_q=64, tile_k=32)[0, 0]
        tensor([[1, 1, 0, 0],
                [2, 2, 1, 1]], dtype=torch.int8)
        """
        check_counts(1, tile_q=tile_q, tile_k=tile_k)
        check_asked(T, S, None, None, device)
        nk = -(-S // tile_k)
        lines = []
        for first in range(0, T, tile_q):
            rows = slice(first, min(first + tile_q, T))
            seen = self.allowed(T, S, rows=rows, device=device)
            if seen is None:
                seen = torch.ones(1, 1, rows.stop - first, S, dtype=torch.bool, device=device)
            pad = (0, nk * tile_k - S)
            some = torch.nn.functional.pad(seen, pad, value=False).unflatten(-1, (nk, tile_k)).any(-1).any(-2)
            every = torch.nn.functional.pad(seen, pad, value=True).unflatten(-1, (nk, tile_k)).all(-1).all(-2)
            lines.append(some.to(torch.int8) + every.to(torch.int8))
        if not lines:
            return torch.zeros(1, 1, 0, nk, dtype=torch.int8, device=device)
        return torch.stack(lines, dim=2)

    def trimmed(self, T: int, S: int) -> Mask | None:
        """The same meaning at this size with the rules that forbid nothing left out; None if none is left.

        >>> causal().trimmed(1, 7) is None        # one query at the end sees every key
        True
        """
        check_counts(T=T, S=S)
        kept = tuple(
            part
            for part in (part.trimmed(T, S) if isinstance(part, Band) else part for part in self.parts)
            if part is not None
        )
        return Mask(kept) if kept else None

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        """Raise ValueError where a rule's tensors do not fit a call of this shape."""
        check_counts(B=B, H=H)
        check_asked(T, S, None, None, device)
        for part in self.parts:
            if not isinstance(part, Part):
                raise TypeError(f"{MASK_RULE}; got a Mask of {type(part).__name__}, made by none of them")
            part.check(B, H, T, S, device)

    def to(self, device: torch.device | str) -> Mask:
        """The mask with its tensors on another device."""
        check_device(device)

        def moved(part: Part) -> Part:
            tensors = {f.name: v for f in fields(part) if isinstance(v := getattr(part, f.name), Tensor)}
            return replace(part, **{name: tensor.to(device) for name, tensor in tensors.items()})

        return Mask(tuple(moved(part) for part in self.parts))


def causal(*, offset: int | Tensor | None = None) -> Mask:
    """Query i sees key j iff j <= i + offset.

    `offset` is the position of query 0 among the keys: by default S - T, so the last query sees the last key
    (bottom-right); an int or a (B,) integer tensor says otherwise.

    >>> print(causal().draw(2, 4))
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    if offset is None:
        return _CAUSAL
    check_integers("offset of causal()", offset, tensor=True)
    return Mask((Band(None, 0, offset),))


_CAUSAL = Mask((Band(None, 0, None),))  # one for all: frozen, and what it has worked out it need not again


def causal_top_left() -> Mask:
    """Query i sees key j iff j <= i, whatever S: the convention of `is_causal` in torch's SDPA.

    >>> print(causal_top_left().draw(2, 4))
    ■ · · ·
    ■ ■ · ·
    """
    return causal(offset=0)


def window(left: int | None, right: int | None = 0, *, offset: int | Tensor | None = None, first: int = 0) -> Mask:
    """Query at pos = i + offset sees pos - left < j <= pos + right.

    `left` counts keys with **self included**, `right` counts the keys after self; None = no limit on that side.
    `window(W)` is therefore W keys, self included, none in the future. Others count W + 1: convert at the edge.
    The `first` keys stay in sight however far the window has moved on, as attention sinks (Xiao et al. 2023,
    arXiv 2309.17453).

    >>> print(window(2).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    >>> print(window(2, first=1).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ · ■ ■
    >>> print(window(1, 1).draw(3, 3))
    ■ ■ ·
    · ■ ■
    · · ■
    """
    for side, keys in (("left", left), ("right", right)):
        check_integers(f"{side} of window()", keys, tensor=False)
    check_integers("offset of window()", offset, tensor=True)
    check_counts(first=first)
    if left is not None and left < 1:
        raise ValueError(f"window(left) counts keys with self included, so left >= 1 or None; got {left}")
    if right is not None and right < 0:
        raise ValueError(f"window(right) counts the keys after self, so right >= 0 or None; got {right}")
    return Mask((Band(left, right, offset, first),))


def lengths(stop: Tensor, start: Tensor | None = None) -> Mask:
    """Row b of the batch may attend the keys start[b] <= j < stop[b]; `stop`, `start`: integer (B,).

    Right padding needs `stop` alone; left padding gives `start`, with stop = S.
    """
    check_index("an integer tensor (B,) for lengths()", stop=stop, start=stop if start is None else start)
    return Mask((Lengths(stop, start),))


def segments(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """A query attends the keys that carry its own id: packed documents. Integer (T,) or (B, T), and (S,) or (B, S).

    >>> print(segments(torch.tensor([0, 0, 1])).draw(3, 3))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    key_ids = query_ids if key_ids is None else key_ids
    check_index("an integer tensor (n,) or (B, n) for segments()", query_ids=query_ids, key_ids=key_ids)
    return Mask((Segments(query_ids, key_ids),))


def keep(tensor: Tensor) -> Mask:
    """A boolean tensor, True = attend, that broadcasts from the right to (B, H, T, S)."""
    check_made("keep()", tensor, "bool", "True = attend; a float mask goes to bias()")
    return Mask((Keep(tensor),))


def bias(tensor: Tensor) -> Mask:
    """A float tensor added to the scaled (and softcapped) scores; broadcasts to (B, H, T, S); -inf forbids."""
    check_made("bias()", tensor, "float", "a bool mask goes to keep()")
    return Mask((Bias(tensor),))


def alibi(slopes: Tensor, *, offset: int | Tensor | None = None) -> Mask:
    """Adds -slope * |pos - j|, pos = i + offset (S - T by default); slopes: float (H,) or (B, H).

    Press et al. 2021, "Train Short, Test Long", arXiv 2108.12409.

    >>> print(alibi(torch.tensor([0.5])).draw(2, 3))
    -0.5    0 -0.5
      -1 -0.5    0
    """
    check_tensor("slopes of alibi()", slopes, "a float tensor (H,) or (B, H)")
    check_integers("offset of alibi()", offset, tensor=True)
    if not slopes.is_floating_point() or slopes.ndim not in (1, 2):
        raise TypeError(f"alibi() takes float slopes (H,) or (B, H); got {slopes.dtype} {tuple(slopes.shape)}")
    return Mask((Alibi(slopes, offset),))


def alibi_slopes(num_heads: int) -> Tensor:
    """The geometric slopes of the ALiBi paper, float32 (num_heads,); odd counts are filled in as its authors do.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    check_counts(1, 2**20, num_heads=num_heads)
    floor = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / floor) for n in range(floor)]
    extra = [2.0 ** (-4.0 * (n + 1) / floor) for n in range(0, 2 * (num_heads - floor), 2)]
    return torch.tensor(slopes + extra)


def as_mask(mask: Mask | Tensor | None) -> Mask | None:
    """A mask from what users pass: a Mask, a bool tensor (keep), a float tensor (bias), or None."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype == torch.bool:
            return keep(mask)
        if mask.is_floating_point():
            return bias(mask)
        raise TypeError(
            f"{MASK_RULE}; got a tensor of {mask.dtype}: a 0/1 mask becomes one by mask.bool() (True = attend)"
        )
    raise TypeError(f"{MASK_RULE}; got {type(mask).__name__}")


def fitted(mask: Mask | Tensor | None, query: Tensor, key: Tensor) -> Mask | None:
    """`as_mask`, and checked against a call of query (B, H, T, D) and key (B, K, S, D)."""
    mask = as_mask(mask)
    if mask is not None:
        B, H, T, _ = query.shape
        mask.check(B, H, T, key.shape[2], query.device)
    return mask


register(Mask)
