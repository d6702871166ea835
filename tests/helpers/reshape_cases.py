"""A layer's attention computed from its heads' weights, and layers whose heads are alike by construction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.nn.rotary import rotate
from headwise.reshape.layout.head_weights import HeadWeights, RotaryLayout

M, N_TEXT = 29, 2 * 53
ROTATIONS = {
    "none": None,
    "halves": RotaryLayout(14),
    "interleaved": RotaryLayout(14, interleaved=True),
    "partial": RotaryLayout(6),
    "partial-interleaved": RotaryLayout(6, interleaved=True),
}


def layer(H: int, K: int, *, D: int = 14, V: int = 11, rotary: RotaryLayout | None = None, **more: Any) -> HeadWeights:
    """A random layer with biases and sinks, in float64."""
    draw = lambda *sizes: torch.randn(*sizes, dtype=torch.float64)  # noqa: E731
    parts: dict[str, Any] = {
        "query_bias": draw(H, D),
        "key_bias": draw(K, D),
        "value_bias": draw(K, V),
        "output_bias": draw(M),
        "sinks": draw(H),
        **more,
    }
    return HeadWeights(draw(H, D, M), draw(K, D, M), draw(K, V, M), draw(M, H, V), rotary=rotary, **parts)


def text() -> Tensor:
    """(2, 53, M) inputs."""
    return torch.randn(2, N_TEXT // 2, M, dtype=torch.float64)


def project(weights: HeadWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, H, T, D), key (B, K, T, D) and value (B, K, T, V), as attention gets them."""

    def one(part: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.einsum("btm,hdm->bhtd", x, part)
        return out if bias is None else out + bias[:, None]

    query, key = one(weights.query, weights.query_bias), one(weights.key, weights.key_bias)
    query, key = normed(weights, query, weights.query_norm), normed(weights, key, weights.key_norm)
    if weights.rotary is not None:
        half = weights.rotary.rotary_dim // 2
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 10.0 ** -torch.arange(half, dtype=x.dtype)
        query, key = (
            rotate(part, angle.cos(), angle.sin(), interleaved=weights.rotary.interleaved) for part in (query, key)
        )
    return query, key, one(weights.value, weights.value_bias)


def normed(weights: HeadWeights, x: Tensor, norm: Tensor | None) -> Tensor:
    if norm is None:
        return x
    if weights.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    axes = (1, 3) if weights.norm == "across" else (3,)
    x = x / (x.square().mean(axes, keepdim=True) + 1e-6).sqrt()
    return x * (norm if norm.ndim == 1 else norm[:, None])


def output(weights: HeadWeights, x: Tensor) -> Tensor:
    """What the layer makes of x (B, T, M) under a causal mask."""
    query, key, value = project(weights, x)
    heads = headwise.attention(query, key, value, mask=headwise.causal(), sinks=weights.sinks, scale=0.3)
    out = torch.einsum("bhtv,mhv->btm", heads, weights.output)
    return out if weights.output_bias is None else out + weights.output_bias


def orthogonal(n: int) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
