"""The benchmark's cases: a name, a shape, a mask, and the ways of doing the same thing that are compared.

Tests run every case once at a reduced length, so that a benchmark cannot rot (tests/test_benchmarks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headwise

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison. `kind` names the mask; sizes are the legend's letters."""

    name: str
    B: int
    H: int
    K: int
    T: int
    S: int
    D: int
    kind: str = "none"
    dtype: str = "float32"
    backward: bool = False

    def short(self) -> Case:
        """The same case at a length that a test can afford."""
        return replace(self, T=min(self.T, 9), S=max(min(self.S, 11), min(self.T, 9)))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = getattr(torch, self.dtype)
        source = torch.Generator().manual_seed(0)
        shapes = ((self.B, self.H, self.T, self.D), *((self.B, self.K, self.S, self.D),) * 2)
        q, k, v = (torch.randn(s, generator=source).to(dtype).requires_grad_(self.backward) for s in shapes)
        return q, k, v

    def mask(self) -> headwise.Mask | None:
        """The case's mask, as headwise says it."""
        if self.kind in ("none", "fold"):
            return None
        if self.kind == "causal":
            return headwise.causal()
        if self.kind == "window":
            return headwise.window(max(2, self.S // 8))
        if self.kind == "padded":
            return headwise.lengths(torch.linspace(self.S / 2, self.S, self.B).long().clamp(min=1))
        raise ValueError(f"no such kind of mask: {self.kind}")

    def ways(self) -> dict[str, Run]:
        """By name: headwise; torch's SDPA with what a careful user would pass; and, for fold, the one-liner."""
        q, k, v = self.inputs()
        mask = self.mask()
        grouped = self.H != self.K
        square = self.kind == "causal" and self.T == self.S
        dense = None if mask is None or square else mask.dense(self.T, self.S)
        ways: dict[str, Run] = {
            "headwise": lambda: headwise.attention(q, k, v, mask=mask),
            "torch": lambda: scaled_dot_product_attention(
                q, k, v, attn_mask=dense, is_causal=square, enable_gqa=grouped
            ),
        }
        if grouped and mask is None:
            G = self.H // self.K
            folded = (self.B, self.K, G * self.T, self.D)
            ways["folded"] = lambda: scaled_dot_product_attention(q.reshape(folded), k, v).view(q.shape)
        if self.backward:
            ways = {name: _with_backward(run, (q, k, v)) for name, run in ways.items()}
        return ways


def _with_backward(run: Run, leaves: tuple[Tensor, ...]) -> Run:
    def both() -> Tensor:
        out = run()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out.detach()

    return both


CASES = (
    Case("prefill", 1, 8, 8, 1024, 1024, 64),
    Case("prefill-gqa", 1, 16, 4, 1024, 1024, 64),
    Case("causal", 1, 8, 8, 1024, 1024, 64, "causal"),
    Case("causal-gqa", 1, 16, 4, 1024, 1024, 64, "causal"),
    Case("causal-long", 1, 4, 4, 4096, 4096, 64, "causal"),
    Case("causal-chunk", 1, 8, 8, 256, 2048, 64, "causal"),
    Case("causal-train", 2, 8, 8, 512, 512, 64, "causal", backward=True),
    Case("causal-bf16", 1, 8, 8, 1024, 1024, 64, "causal", "bfloat16"),
    Case("window", 1, 8, 8, 2048, 2048, 64, "window"),
    Case("window-long", 1, 4, 4, 8192, 8192, 64, "window"),
    Case("padded", 8, 8, 8, 512, 512, 64, "padded"),
    Case("padded-train", 8, 8, 8, 256, 256, 64, "padded", backward=True),
    Case("decode", 8, 16, 16, 1, 2048, 64),
    Case("decode-gqa", 8, 32, 8, 1, 2048, 64),
    Case("decode-padded", 8, 32, 8, 1, 2048, 64, "padded"),
)

FOLD = tuple(
    Case(f"fold-T{T}-S{S}-G{G}", 1, 4 * G, 4, T, S, 64, "fold")
    for S in (512, 4096)
    for G in (2, 4, 8)
    for T in (1, 2, 4, 8, 16, 32)
)
