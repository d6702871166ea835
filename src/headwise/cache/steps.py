"""Calls of one token a row as one call of the native kernel: decode steps, and the attention of the newest tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.compiled_calls import methods_outside_graphs
from ..ops.masks.mask import EVERYTHING, Mask
from ..ops.native.decode_step import CacheStep, RotaryStep, VisibleKeys, attend_stored, decode_step, runs_plain
from ..ops.native.mask_arguments import ends_of
from ..ops.options import ScoreOptions
from ..ops.storage.packed import BITS
from ..shapes import check_gate
from ..shapes.arguments import FAR
from .dropping import Dropping
from .rows import Append

STEP_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
"""The dtypes that queries of a decode step may have."""


class Steps(Dropping):
    """A cache whose calls of one token a row are one call of the native kernel; a part of `KVCache`."""

    head_dim: int
    value_dim: int
    dtype: torch.dtype
    shared: bool
    causal: bool
    _lengths: list[int]
    _last: Append
    _input_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        raise NotImplementedError

    def _rule(self, offset: Tensor | None) -> Mask:
        raise NotImplementedError

    def takes_steps(self, mask: Mask | None = None) -> bool:
        """Return True if `step` may be called now; modules call this before they compute anything.

        A class without its own `_reserve_step` returns False, even if it is derived from a class that has one.
        """
        return (
            runs_plain()
            and self.causal
            and "_reserve_step" in vars(type(self))
            and self.device.type == "cpu"
            and not (self._gone and mask is not None and mask.parts)
            and not (len(set(self.columns)) > 1 and ((mask is not None and mask.parts) or self._sight()[1]))
            and self._has_room()
        )

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        turn: RotaryStep | None = None,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor | None:
        """Append one token to each row and attend in one native kernel call, equal to `append` and then `attend`.

        Call it only if `takes_steps` has just returned True for this mask; that is not checked again.

        Args:
            query: (B, H, 1, D).
            key: (B, K, 1, D), in the cache's dtype; query and value have the same dtype.
            value: (B, K, 1, V); None if values are shared with the keys.
            turn: the rotary embedding that is applied to query and key first.
            mask: a further rule, as for `attend`.
            scale: as for `attend`.
            softcap: as for `attend`.
            sinks: as for `attend`.
            gate: as for `attend`.

        Returns:
            (B, H, 1, V) in the memory order (B, 1, H, V), bit for bit as from `append` and `attend`; with 4 and 3 bits
            within the rounding of the rotations. None if the kernel does not support the sizes, dtypes or mask. Then
            nothing was added; call `append` and `attend`, which also raise the errors.

        Raises:
            TypeError, ValueError: a gate that does not fit; the cache is unchanged.
        """
        mask = EVERYTHING if mask is None else mask
        if not self._fits(query, key, value, sinks):
            return None
        if gate is not None:
            gate = check_gate(gate, (*query.shape[:3], self.value_dim), self.device)
        storage = self._reserve_step()
        seen = self._in_sight(storage.places, mask)
        scale = self.head_dim**-0.5 if scale is None else float(scale)
        options = ScoreOptions(self._rule(None) & mask if seen is None else mask, scale, softcap, sinks, 0.0, gate)
        out = decode_step(query, key, value, turn, storage, options, seen)
        if out is not None:
            self._lengths = [n + 1 for n in self._lengths]
            self._last, self._input_dtype = Append(1, [1] * self.batch, "right"), key.dtype
        return out

    def _attend_newest(self, query: Tensor, further: Mask, options: dict[str, Any]) -> Tensor | None:
        """Attend with the query of each row's last token in one native call, without views of the store.

        Returns None for rows of different lengths, padding, other options than a scale, or masks that are no bands.
        """
        columns, last, scale = self.columns, self._last, options.get("scale")
        if (
            "_reserve_step" not in vars(type(self))
            or not (type(query) is Tensor and query.is_cpu and self.device.type == "cpu" and runs_plain())
            or min(columns) != max(columns)
            or (last.tokens == 1 and not all(last.counts))
            or (self._gone and further.parts)
            or not all(_is_plain(name, option) for name, option in options.items())
        ):
            return None
        storage, length = self._storage(), columns[0]
        ends = ends_of(self._rule(None) & further, 1, length)
        if ends is None or storage.rotations:
            return None
        return attend_stored(query, storage, length, self.head_dim**-0.5 if scale is None else scale, *ends)

    def _fits(self, query: Tensor, key: Tensor, value: Tensor | None, sinks: Tensor | None) -> bool:
        """Return True if the tensors of a step are plain, and the kernel supports their sizes and dtype."""
        if type(query) is not Tensor:
            return False
        B, K, dtype, H = self.batch, self.num_kv_heads, query.dtype, query.shape[1] if query.ndim == 4 else 0
        for x in (query, key) if value is None else (query, key, value):
            if type(x) is not Tensor or not x.is_cpu or x.dtype != dtype:
                return False
        return (
            (value is None) == self.shared
            and query.shape == (B, H, 1, self.head_dim)
            and H % K == 0
            and key.shape == (B, K, 1, self.head_dim)
            and (value is None or value.shape == (B, K, 1, self.value_dim))
            and dtype in STEP_DTYPES
            and self.dtype in (dtype, *BITS)
            and (sinks is None or (sinks.is_cpu and sinks.shape == (H,) and sinks.is_floating_point()))
        )

    def _reserve_step(self) -> CacheStep:
        """Reserve room for one more token of each row, and return its place."""
        raise NotImplementedError

    def _storage(self) -> CacheStep:
        """Return the tensors of the store, and the columns behind the last tokens, one number if all rows have one."""
        raise NotImplementedError

    def _has_room(self) -> bool:
        """Return True if each row has room for one more token; False also if `append` is to raise the error."""
        return False

    def _sight(self) -> tuple[int | None, int]:
        """Return how many keys a query attends, including its own (None for all), and how many first keys besides."""
        return None, 0

    def _in_sight(self, places: list[int], mask: Mask) -> VisibleKeys | None:
        """Return the visible keys of the queries at these columns; None if only a mask describes them."""
        window, first = self._sight()
        if len(places) > 1:
            rows = [[-FAR if window is None else n + 1 - window, n + 1, 0, n + 1] for n in places]
            return VisibleKeys(bounds=torch.tensor(rows, device="cpu"))
        band = mask.simple_band
        if band is None or first:
            return None
        low, high, at_end = band
        shift = places[0] if at_end else 0
        lows = [-FAR if low is None else low + shift, -FAR if window is None else places[0] + 1 - window]
        return VisibleKeys(max(lows), FAR if high is None else high + shift)


def _is_plain(name: str, option: Any) -> bool:
    """Return whether an option of `attend` has its default; the scale may be any float, the backend also the native."""
    if name in ("scale", "backend"):
        return option is None or type(option) is float if name == "scale" else option in ("auto", "native")
    return option is None or option is False or (type(option) is float and option == 0.0)


methods_outside_graphs(Steps, ("takes_steps",))
