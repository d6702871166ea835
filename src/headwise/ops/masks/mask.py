"""Structural masks and biases: the keys that each query may attend to, without a T x S tensor.

A mask marks what *may be attended to*: True = attend. Masks are small frozen objects, combined with `&`, `|` and `~`. A
kernel that supports their structure needs no matrix; other backends compute the rows that they need.

>>> from headwise import causal, lengths, window
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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import is_

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...shapes import MASK_RULE, check_integers, check_made
from ...shapes.arguments import MOST, check_counts, check_device, check_dtype, check_span
from ..tracing import statically_true
from .algebra import both, either, neither
from .indexing import Region, RowIndex, Span, check_asked, checked_at, full_rank, wide
from .pytrees import register
from .rule import Rule
from .rules import Band, Bias, Keep
from .tiles import kinds_of_intervals, kinds_of_pairs

EMPTY, MIXED, FULL = 0, 1, 2  # a tile counts one if it allows some pair, and one more if it allows every pair


@register
@dataclass(frozen=True, eq=False)
class Mask:
    """Rules that all apply; without rules every key is allowed. Created by `causal()`, `window()`, ...; frozen.

    `a & b` allows what both allow, `a | b` what either allows, `~a` what `a` forbids. Biases combine only by `&`.

    >>> from headwise import causal, window
    >>> (causal() & window(4)).parts
    (Band(left=4, right=0, offset=None, first=0),)
    >>> print((~causal() | window(1)).draw(3, 3))
    ■ ■ ■
    · ■ ■
    · · ■
    """

    parts: tuple[Rule, ...]

    def __and__(self, other: Mask) -> Mask:
        if not _operand("&", other).parts:  # the same object, because it caches its results
            return self
        return Mask(both(self.parts + other.parts)) if self.parts else other

    def __or__(self, other: Mask) -> Mask:
        return Mask(either(_rules_to_join("|", self), _rules_to_join("|", _operand("|", other))))

    def __invert__(self) -> Mask:
        return Mask(neither(_rules_to_join("~", self)))

    def __rand__(self, other: object) -> Mask:
        return self & _operand("&", other)  # raises an error: if the left operand is a mask, its own `&` runs

    def __ror__(self, other: object) -> Mask:
        return self | _operand("|", other)

    def __bool__(self) -> bool:
        """Raise TypeError: `a and b` would be only b, and `not a` would be False, so a rule would silently be lost."""
        raise TypeError(
            "a mask is neither true nor false: join masks by `&`, `|` and `~`, not by `and`, `or` and `not`; whether "
            "there is one at all, `mask is not None` tells"
        )

    def allowed(
        self, T: int, S: int, *, rows: RowIndex = None, cols: RowIndex = None, device: torch.device | None = None
    ) -> Tensor | None:
        """Return the allowed places, bool (B|1, H|1, R, C), True = attend; None if every place is allowed.

        `rows`, `cols`: a slice or 1-D index tensor of queries and keys; all by default.
        """
        check_asked(T, S, rows, cols, device)
        grids = []
        for part in self.parts:
            if part.restricts:
                grid = part.grid(T, S, rows, cols, device)
                grids.append(grid != -torch.inf if part.biases else grid)
        return full_rank(reduce(torch.logical_and, grids), T, S, rows, cols) if grids else None

    def added(
        self, T: int, S: int, *, rows: RowIndex = None, cols: RowIndex = None, device: torch.device | None = None
    ) -> Tensor | None:
        """Return what is added to the scores: float (B|1, H|1, R, C); None if nothing is added."""
        check_asked(T, S, rows, cols, device)
        biases = [wide(part.grid(T, S, rows, cols, device)) for part in self.parts if part.biases]
        return full_rank(reduce(torch.add, biases), T, S, rows, cols) if biases else None

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> tuple[Tensor | None, Tensor | None]:
        """Return (allowed, added) at the given places; i, j: integer tensors that broadcast to (B, H, R, C)."""
        i, j = checked_at(i, j, T, S)
        allowed: list[Tensor] = []
        added: list[Tensor] = []
        for part in self.parts:
            rule = part.at(i, j, T, S)
            if part.biases:
                added.append(wide(rule))
                rule = rule != -torch.inf
            if part.restricts:
                allowed.append(rule)
        return reduce(torch.logical_and, allowed) if allowed else None, reduce(torch.add, added) if added else None

    def dense(self, T: int, S: int, *, device: torch.device | None = None) -> Tensor:
        """Return the whole matrix, as for torch's SDPA: bool, or float with -inf if one of the rules is a bias."""
        allowed, added = self.allowed(T, S, device=device), self.added(T, S, device=device)
        if added is None:
            return torch.ones(1, 1, T, S, dtype=torch.bool, device=device) if allowed is None else allowed
        return added if allowed is None else added.masked_fill(~allowed, -torch.inf)

    def draw(self, T: int, S: int, *, batch: int = 0, head: int = 0) -> str:
        """Return a T x S picture of one head: one line per query; `·` is forbidden; a bias is shown as a number."""
        check_counts(T=T, S=S, batch=batch, head=head)
        grid = self.to("cpu").dense(T, S, device=torch.device("cpu"))
        grid = grid[min(batch, grid.shape[0] - 1), min(head, grid.shape[1] - 1)]
        if grid.dtype == torch.bool:
            return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in grid.tolist())
        cells = [["·" if cell == -torch.inf else f"{cell + 0.0:g}" for cell in row] for row in grid.tolist()]
        width = max((len(cell) for row in cells for cell in row), default=1)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)

    @property
    def is_top_left(self) -> bool:
        """True if the mask equals torch's `is_causal`: j <= i."""
        if len(self.parts) != 1 or not isinstance(self.parts[0], Band):
            return False
        band = self.parts[0]
        top_left = band.left is None and band.right == 0 and band.offset is not None
        return top_left and not isinstance(band.offset, Tensor) and statically_true(band.offset == 0)

    @cached_property
    def simple_band(self) -> tuple[int | None, int | None, bool] | None:
        """(low, high, at_end): row i may attend to i + low <= j < i + high; if at_end, S - T is added to both.

        None if the mask has other rules than bands, or bands of both kinds. Cached, because each decode step uses it.
        """
        if not self.parts:
            return None, None, False
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
        if len(at_end) > 1:
            return None
        return max(lows) if lows else None, min(highs) if highs else None, at_end.pop()

    @property
    def learns(self) -> bool:
        """True if a bias, slopes or a table need a gradient."""
        return any(rule.learns for rule in self.parts)

    @property
    def is_same_for_rows(self) -> bool:
        """True if every row may attend to the same keys with the same bias, as with padding."""
        return all(rule.is_same_for_rows for rule in self.parts)

    def bounds(self, T: int, S: int, device: torch.device | None = None) -> tuple[Tensor, Tensor] | None:
        """Return (lo, hi), each (B|1, T): row i may attend to exactly lo[i] <= j < hi[i]; None if not intervals."""
        check_asked(T, S, None, None, device)
        lo = torch.zeros(1, T, dtype=torch.long, device=device)
        hi = torch.full((1, T), S, dtype=torch.long, device=device)
        for rule in self.parts:
            if not rule.restricts:
                continue
            ends = rule.bounds(T, S, device)
            if ends is None:
                return None
            lo = lo if ends[0] is None else torch.maximum(lo, ends[0])
            hi = hi if ends[1] is None else torch.minimum(hi, ends[1])
        lo, hi = torch.broadcast_tensors(lo.clamp(0, S), hi.clamp(0, S))
        return lo, torch.maximum(lo, hi)

    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        """Return an interval (k0, k1) with every key that the queries first <= i < last may attend to.

        These are plain integers, computed without reading tensors, so the interval may be too wide.
        """
        check_counts(T=T, S=S, first=first, last=last)
        k0, k1 = 0, S
        for rule in self.parts:
            low, high = rule.reach(first, last, T, S)
            k0, k1 = max(k0, low), min(k1, high)
        k0 = min(max(k0, 0), S)
        return k0, min(max(k1, k0), S)

    def tiles(
        self, T: int, S: int, *, tile_q: int = 64, tile_k: int = 64, device: torch.device | None = None
    ) -> Tensor:
        """Return which tiles are EMPTY (0), MIXED (1), FULL (2): int8 (B|1, H|1, ceil(T/tile_q), ceil(S/tile_k)).

        Some rows of tiles are computed at a time: memory is linear in S.

        >>> from headwise import causal
        >>> causal().tiles(128, 128, tile_q=64, tile_k=32)[0, 0]
        tensor([[1, 1, 0, 0],
                [2, 2, 1, 1]], dtype=torch.int8)
        """
        check_counts(1, tile_q=tile_q, tile_k=tile_k)
        check_asked(T, S, None, None, device)
        bounds = self.bounds(T, S, device)
        if bounds is not None:
            return kinds_of_intervals(*bounds, S, (tile_q, tile_k))

        def seen(rows: slice) -> Tensor:
            allowed = self.allowed(T, S, rows=rows, device=device)
            assert allowed is not None  # a mask that allows every pair is one of intervals
            return allowed

        return kinds_of_pairs(seen, T, S, (tile_q, tile_k), device)

    def trimmed(self, T: int, S: int) -> Mask:
        """Return an equivalent mask for this size, without the rules that forbid nothing.

        >>> from headwise import causal
        >>> causal().trimmed(1, 7)        # one query at the end sees every key
        Mask(parts=())
        """
        check_counts(T=T, S=S)
        return Mask(tuple(rule for rule in (rule.trimmed(T, S) for rule in self.parts) if rule is not None))

    def placed(self, offset: int | Tensor) -> Mask:
        """Return the mask with query 0 at `offset` among the keys, in rules whose offset is not set."""
        check_integers("offset of placed()", offset, tensor=True)
        return self if offset is None else self._with([rule.placed(offset) for rule in self.parts])

    def sized(self, B: int, H: int) -> Mask:
        """Return the mask for B rows of H heads, which a `rule()` needs to call its function."""
        check_counts(B=B, H=H)
        return self._with([rule.sized(B, H) for rule in self.parts])

    def part(
        self,
        rows: Span | None = None,
        cols: Span | None = None,
        T: int = 0,
        S: int = 0,
        *,
        heads: Span | None = None,
        batch: Span | None = None,
    ) -> Mask:
        """Return the mask of a call with only these queries, keys, heads and rows of the batch; all by default.

        Each is (start, stop). T and S, the sizes of the whole call, are needed with `rows` or `cols`.

        >>> from headwise import causal
        >>> print(causal().part((2, 4), (1, 4), 4, 4).draw(2, 3))
        ■ ■ ·
        ■ ■ ■
        """
        check_counts(T=T, S=S)
        spans = {"rows": (rows, T), "cols": (cols, S), "heads": (heads, MOST), "batch": (batch, MOST)}
        given = [None if span is None else check_span(name, span, size) for name, (span, size) in spans.items()]
        region = Region(*given)
        return Mask(tuple(rule.part(region, T, S) for rule in self.parts))

    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        """Return whether a query in `rows` may attend to a key in `cols`; True also if the rules do not decide it."""
        check_counts(T=T, S=S)
        rows, cols = check_span("rows", rows, T), check_span("cols", cols, S)
        if rows[0] >= rows[1] or cols[0] >= cols[1]:
            return False
        return all(rule.meets(rows, cols, T, S) for rule in self.parts if rule.restricts)

    def forbids(self) -> Mask:
        """Return what the mask forbids to every head, without its biases."""
        return Mask(tuple(rule for rule in (rule.forbids() for rule in self.parts) if rule is not None))

    def _with(self, rules: Sequence[Rule]) -> Mask:
        return self if all(a is b for a, b in zip(rules, self.parts, strict=True)) else Mask(tuple(rules))

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        """Raise ValueError if the tensors of a rule do not fit a call of this shape."""
        check_counts(B=B, H=H)
        check_asked(T, S, None, None, device)
        for part in self.parts:
            if not isinstance(part, Rule):
                raise TypeError(f"{MASK_RULE}; got a Mask of {type(part).__name__}, made by none of them")
            part.check(B, H, T, S, device)

    def computed_in(self, dtype: torch.dtype) -> Mask:
        """Return the mask for a float32 or float64 computation: no bias is wider, and slopes have this dtype."""
        check_dtype(dtype, (torch.float32, torch.float64))
        parts = tuple(part.computed_in(dtype) for part in self.parts)
        return self if all(map(is_, parts, self.parts)) else Mask(parts)

    def to(self, device: torch.device | str) -> Mask:
        """Return the mask with its tensors on another device."""
        check_device(device)
        leaves, shape = pytree.tree_flatten(self)
        moved = [leaf.to(device) for leaf in leaves]
        return self if all(a is b for a, b in zip(moved, leaves, strict=True)) else pytree.tree_unflatten(moved, shape)


def _operand(sign: str, other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise TypeError(f"`{sign}` joins masks; got {type(other).__name__}; wrap a bool tensor in keep()")


def _rules_to_join(sign: str, mask: Mask) -> tuple[Rule, ...]:
    """Return the rules of a mask for `|` and `~`; raise TypeError if one is a bias."""
    biases = [type(rule).__name__ for rule in mask.parts if rule.biases]
    if biases:
        raise TypeError(
            f"a bias adds to the scores and joins by `&` alone; `{sign}` met {', '.join(biases)}; "
            "join the rules first, then `& bias(...)`"
        )
    return mask.parts


EVERYTHING = Mask(())
"""The mask without rules; one object is enough because masks are frozen."""


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Return a mask from an argument: a Mask, a bool tensor (keep), a float tensor (bias), or None (all allowed)."""
    if mask is None:
        return EVERYTHING
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype == torch.bool:
            check_made("keep()", mask, "bool", "True = attend; a float mask goes to bias()")
            return Mask((Keep(mask),))
        if mask.is_floating_point():
            check_made("bias()", mask, "float", "a bool mask goes to keep()")
            return Mask((Bias(mask),))
        raise TypeError(
            f"{MASK_RULE}; got a tensor of {mask.dtype}: a 0/1 mask becomes one by mask.bool() (True = attend)"
        )
    way = "; make a tensor of it with torch.as_tensor" if isinstance(mask, list) or hasattr(mask, "__array__") else ""
    if callable(mask):
        way = "; call it, as in causal(), or wrap a function of (b, h, i, j) in rule()"
    elif hasattr(mask, "mask_mod"):
        way = "; wrap its mask_mod in rule()"
    elif isinstance(mask, str):
        way = "; write the rule as a call, such as headwise.causal()"
    raise TypeError(f"{MASK_RULE}; got {type(mask).__name__}{way}")
