"""Rotary position embedding: pairs of components of queries and keys, rotated by angles proportional to the position.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv 2104.09864. Scores then depend on
positions only through their difference.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops.native.decode_step import RotaryStep
from ..shapes import DTYPES, INTEGERS, describe
from ..shapes.arguments import (
    check_counts,
    check_dtype,
    check_flags,
    check_numbers,
    check_tensor,
    fits,
    is_one_of,
    real_numbers,
)

Positions = Tensor | tuple[Tensor, Tensor] | None


def rotate(
    x: Float[Tensor, "*batch D"],
    cos: Float[Tensor, "*angles R"],
    sin: Float[Tensor, "*angles R"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch D"]:
    """Rotate pairs among the first 2R components of `x` by angles given as cosines and sines; the others do not change.

    Components n and n + R form a pair (the two halves), or with `interleaved` 2n and 2n + 1, as in the paper.

    Args:
        x: (..., D); any float dtype. Half precision is computed in float32 and rounded once.
        cos: (..., R) with 2R <= D; the leading axes broadcast against those of `x`.
        sin: As `cos`.
        interleaved: True if adjacent components form pairs.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: `cos` and `sin` differ in shape or have too many pairs for `x`; or another dtype or device.

    Example:
        >>> quarter = torch.tensor([0.0]), torch.tensor([1.0])                 # cos and sin of 90 degrees
        >>> rotate(torch.tensor([1.0, 2.0, 7.0]), *quarter)                   # the 7 is beyond the turned part
        tensor([-2.,  1.,  7.])
    """
    check_flags(interleaved=interleaved)
    half = _check_angles(x, cos, sin)
    dtype = torch.promote_types(x.dtype, torch.float32)
    turned, kept = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos.to(dtype), sin.to(dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Check the arguments of `rotate`, and return the number of pairs."""
    for name, part in (("x", x), ("cos", cos), ("sin", sin)):
        check_tensor(name, part, "a float tensor (..., n)")
        if part.dtype not in DTYPES or part.device != x.device or part.ndim == 0:
            raise ValueError(f"{name} is a float tensor (..., n) on the device of x; got {describe(part)}")
    half = cos.shape[-1]
    if cos.shape != sin.shape or 2 * half > x.shape[-1] or not _broadcasts(cos.shape[:-1], x.shape[:-1]):
        raise ValueError(
            "cos and sin share one shape (..., R), which broadcasts to that of x, and turn 2R of its D numbers; got "
            f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}, x {tuple(x.shape)}"
        )
    return half


def _broadcasts(sizes: Sequence[int], to: Sequence[int]) -> bool:
    return len(sizes) <= len(to) and all(fits(n, m) for n, m in zip(reversed(sizes), reversed(to), strict=False))


def _made(
    base: float,
    rotary_dim: int,
    inv_freq: tuple[float, ...] | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the frequency of each pair in radians per position, (rotary_dim / 2,)."""
    if inv_freq is not None:
        return torch.tensor(inv_freq, device=device, dtype=dtype)
    pair = torch.arange(0, rotary_dim, 2, device=device, dtype=dtype)
    return base ** (-pair / rotary_dim)


_frequencies = lru_cache(maxsize=64)(_made)  # cached for decode steps on the CPU, one call per token


@lru_cache(maxsize=4)
def _turned(
    base: float,
    rotary_dim: int,
    inv_freq: tuple[float, ...] | None,
    interleaved: bool,
    positions: tuple[int, ...],
    first: int,
) -> RotaryStep:
    """Compute `Rotary.turn`; it is cached, as all layers of a decode step need the same one."""
    alike = len(set(positions)) == 1
    at = float(positions[0]) if alike else torch.tensor(positions, device="cpu").float()[:, None]
    angle = _frequencies(base, rotary_dim, inv_freq) * at
    return RotaryStep(angle.cos(), angle.sin(), rotary_dim, first, interleaved)


class Rotary(nn.Module):
    """Rotary position embedding for `headwise.MultiHeadAttention`: ``rotary(query, key, positions)``.

    Pair n is rotated by ``position * base ** (-2n / rotary_dim)``. Angles are computed at every call in float32
    (float64 for float64 queries) and not stored, so there is no table that limits positions, is rounded to half
    precision, or is lost on the meta device.

    Args:
        head_dim: Size D of a query or key.
        base: Base of the wavelengths, which grow from 2 pi to ``2 pi * base``.
        rotary_dim: Number of rotated components, even; D by default.
        interleaved: True for adjacent pairs (2n, 2n + 1) instead of halves (n, n + rotary_dim / 2).
        frequencies: Radians per position for each of the rotary_dim / 2 pairs, instead of those from `base`; for
            example `headwise.nn.yarn_frequencies`.

    Raises:
        ValueError: `rotary_dim` is odd, below 2 or above `head_dim`; `base` is not positive; or the number of
            `frequencies` is not the number of pairs.

    Example:
        >>> query, key = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8)
        >>> turned, _ = Rotary(8)(query, key)
        >>> torch.equal(turned[:, :, 0], query[:, :, 0])          # position 0 does not turn
        True
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        frequencies: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_counts(head_dim=head_dim, rotary_dim=rotary_dim)
        check_flags(interleaved=interleaved)
        check_numbers(base=base)
        if frequencies is not None:
            frequencies = real_numbers("frequencies", frequencies)
        if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
            raise ValueError(
                f"rotary positions turn pairs, so rotary_dim is even with 2 <= rotary_dim <= head_dim; got rotary_dim "
                f"{rotary_dim}, head_dim {head_dim}; give an even rotary_dim to turn a part of each head"
            )
        if not base > 0:
            raise ValueError(f"base sets the wavelengths 2 pi * base ** (2n / rotary_dim), so base > 0; got {base}")
        if frequencies is not None and len(frequencies) != rotary_dim // 2:
            raise ValueError(
                f"frequencies are one number a pair, rotary_dim / 2 = {rotary_dim // 2}; got {len(frequencies)}"
            )
        self.head_dim = head_dim
        self.base = base
        self.rotary_dim = rotary_dim
        self.interleaved = interleaved
        self.frequencies = None if frequencies is None else tuple(frequencies)

    def forward(
        self, query: Float[Tensor, "B H T D"], key: Float[Tensor, "B K S D"], positions: Positions = None
    ) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B K S D"]]:
        """Rotate query and key.

        Args:
            query: (B, H, T, D).
            key: (B, K, S, D).
            positions: (T,) or (B, T) numbers for both queries and keys, or a pair of such tensors for queries and
                keys; 0 .. T - 1 by default.

        Raises:
            ValueError: another head dim, positions of another length, or no positions although T and S differ.
        """
        for name, x in (("query", query), ("key", key)):
            check_tensor(name, x, "a float tensor (B, heads, T, D)")
            if x.dtype not in DTYPES:
                raise ValueError(f"{name} is a float tensor (B, heads, T, D); got {describe(x)}")
        if query.ndim != 4 or key.ndim != 4 or not query.shape[3] == key.shape[3] == self.head_dim:
            raise ValueError(
                f"Rotary({self.head_dim}) turns heads of {self.head_dim} numbers; got query {tuple(query.shape)}, "
                f"key {tuple(key.shape)}; build it with the module's head_dim"
            )
        if positions is None:
            if query.shape[2] != key.shape[2]:
                raise ValueError(
                    f"queries and keys of unequal length need positions of their own: got T = {query.shape[2]}, "
                    f"S = {key.shape[2]}; pass positions=(query_positions, key_positions)"
                )
            positions = torch.arange(query.shape[2], device=query.device)
        pair = positions if isinstance(positions, tuple) else (positions, positions)
        if len(pair) != 2:
            raise TypeError(f"positions are one tensor, or a pair (of the queries, of the keys); got {len(pair)}")
        for_query, for_key = pair
        return self._turn(query, for_query, "query"), self._turn(key, for_key, "key")

    def angles(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (..., rotary_dim / 2) of the angles at `positions` (...), for `rotate`."""
        check_tensor("positions", positions, "a tensor of numbers")
        check_dtype(dtype, (torch.float32, torch.float64))
        if positions.dtype not in (*INTEGERS, *DTYPES):
            raise TypeError(f"positions are integers or floats; got {describe(positions)}")
        frequencies = _made(self.base, self.rotary_dim, self.frequencies, positions.device, dtype)
        angle = positions.to(dtype)[..., None] * frequencies
        return angle.cos(), angle.sin()

    def turn(self, positions: Sequence[int], *, first: int = 0) -> RotaryStep:
        """Return the rotation of one new token per row, with the angles of `forward`, for `step` of a cache.

        `first` is the first rotated number of a key, 0 unless the rotated part is behind others.

        Example:
            >>> turn = Rotary(8).turn([5, 5, 5])
            >>> turn.cos.shape, turn.size
            (torch.Size([4]), 8)
        """
        return _turned(self.base, self.rotary_dim, self.frequencies, self.interleaved, tuple(positions), first)

    def _turn(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        check_tensor("positions", positions, "a tensor (T,) or (B, T), or a pair of them")
        if positions.device != x.device:
            raise ValueError(f"positions live on the {name}'s device {x.device}; got {describe(positions)}")
        if not is_one_of(positions.shape, ((x.shape[2],), (x.shape[0], x.shape[2]), (1, x.shape[2]))):
            raise ValueError(
                f"positions are (T,) or (B, T), one for each {name}: (B, T) = {(x.shape[0], x.shape[2])}; "
                f"got {tuple(positions.shape)}; keys of another length take positions=(query_positions, key_positions)"
            )
        cos, sin = self.angles(positions, torch.promote_types(x.dtype, torch.float32))
        if positions.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]  # the same angle for all heads
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        """Return the arguments."""
        part = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        turns = f"base={self.base:g}" if self.frequencies is None else "frequencies=..."
        return f"{self.head_dim}, {turns}{part}" + (", interleaved=True" if self.interleaved else "")
