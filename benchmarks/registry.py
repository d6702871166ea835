"""The benchmark's cases: a name, a shape, a mask, and the marks that each should reach.

Tests run every case once at a reduced length, so that none breaks unnoticed (tests/meta/test_benchmarks.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.cache import StaticCache

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
HALVES = ("bfloat16", "float16")
FULL = "full"  # no mask: every query attends every key
PEERS = ("onnxruntime", "openvino", "vllm", "sglang")


@dataclass(frozen=True)
class Mark:
    """At least `must`, better `aim`. `of`: `limit` (our part of it) or a way (times as long as ours)."""

    of: str
    must: float
    aim: float | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table. Sizes are the legend's letters; `kind` names the mask; `width` is a window's."""

    regime: str
    B: int
    H: int
    K: int
    T: int
    S: int
    D: int
    dtype: str = "float32"
    kind: str = FULL
    V: int = 0
    width: int = 1024
    backward: bool = False
    marks: tuple[Mark, ...] = ()
    without: tuple[str, ...] = ()  # ways left out: they add nothing here, or take too long

    @property
    def name(self) -> str:
        heads = str(self.H) if self.H == self.K else f"{self.H}/{self.K}"
        length = str(self.T) if self.T == self.S else f"{self.T}on{self.S}"
        dim = str(self.D) if self.V in (0, self.D) else f"{self.D}/{self.V}"
        batch = f"{self.B}x" if self.B > 1 else ""
        short = next(short for short, full in DTYPES.items() if full == self.dtype)
        return f"{self.regime} {batch}{heads}x{length}x{dim} {short} {self.kind}"

    @property
    def value_dim(self) -> int:
        return self.V or self.D

    @property
    def int8(self) -> bool:
        """Keys and values are in int8."""
        return self.regime.startswith("int8")

    def short(self) -> Case:
        """The same case at a length that a test can afford."""
        T = min(self.T, 9)
        S = 12 if self.S > self.T else T
        H, K = (self.H // self.K, 1) if self.K > 1 and self.H > self.K else (min(self.H, 4), min(self.K, 4))
        return replace(self, B=min(self.B, 3), H=H, K=K, T=T, S=S, width=4)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value. Values narrower than keys are the keys' first columns, as MLA stores them."""
        dtype = getattr(torch, self.dtype)
        source = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source)

        q, k = draw(self.B, self.H, self.T, self.D), draw(self.B, self.K, self.S, self.D)
        v = None if self.V else draw(self.B, self.K, self.S, self.D)
        if self.kind.endswith("-logits"):  # the first feature alone gives each key its logit
            q[..., 0] = self.D**0.5
            k[..., 0] = self.cliff()
        q, k = (x.to(dtype).requires_grad_(self.backward) for x in (q, k))
        v = k[..., : self.V] if v is None else v.to(dtype).requires_grad_(self.backward)
        return (q, *self.kept(k, v)) if self.T == 1 and not self.backward else (q, k, v)

    def kept(self, key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        """Keys and values in the memory of a cache, on huge pages where there are any: where a single query meets them.

        All ways and the limits read them there; a way that must have copies makes them in memory of its own.
        """
        sizes = (self.B, self.K, self.D, self.value_dim)
        cache = StaticCache(*sizes, capacity=self.S, dtype=dtype or key.dtype, shared=bool(self.V))
        return cache.append(key, None if self.V else value).view()

    def mask(self) -> headwise.Mask | None:
        """The case's mask as an object of headwise."""
        if self.kind == FULL or self.kind.endswith("-logits"):
            return None
        if self.kind == "causal":
            return headwise.causal()
        if self.kind == "window":
            return headwise.window(self.width)
        if self.kind == "padded":
            return headwise.lengths(self.lengths())
        if self.kind.startswith("dense"):
            return self.dense()
        if self.kind.endswith("-bias"):
            return headwise.bias(self.cliff().view(1, 1, 1, self.S))
        raise ValueError(f"no such kind of mask: {self.kind}")

    def lengths(self) -> Tensor:
        """Keys of each sequence of a padded batch, from an eighth of the longest up."""
        return torch.linspace(self.S / 8, self.S, self.B).long().clamp(min=1)

    def dense(self) -> headwise.Mask:
        """A mask or a bias that is a tensor, drawn: one for all heads, or one a head."""
        source = torch.Generator().manual_seed(1)
        if self.kind == "dense-keep":
            return headwise.keep(torch.rand(1, 1, self.T, self.S, generator=source) < 0.8)
        return headwise.bias(torch.randn(1, self.H, self.T, self.S, generator=source).to(getattr(torch, self.dtype)))

    def cliff(self) -> Tensor:
        """Logits of the keys, every other one low: `far`, where float32's exponential is denormal or 0, or `near`."""
        logits = torch.zeros(self.S)
        logits[1::2] = torch.linspace(-88, -150, self.S // 2)
        return logits if self.kind.startswith("far") else logits / 100

    def near(self) -> Case:
        """A `far` case on ordinary numbers."""
        return replace(self, kind=self.kind.replace("far", "near"))

    def bytes_read(self) -> float:
        """Bytes of keys and values that are attended, each once; values that are columns of the keys do not count."""
        columns = self.D + (0 if self.V else self.D)
        rows = float(self.lengths().sum()) if self.kind == "padded" else float(self.B * self.S)
        if self.int8:  # a byte an element, and two scales
            return rows * self.K * (columns + 8)
        return rows * self.K * columns * getattr(torch, self.dtype).itemsize

    def flops(self) -> float:
        """Floating-point operations of the pairs that are attended; those masked do not count, unless at random."""
        rows = torch.arange(self.T, dtype=torch.float64) + self.S - self.T + 1
        pairs = float(self.T * self.S) * self.B
        if self.kind in ("causal", "window"):
            pairs = self.B * float(rows.clamp(max=self.width if self.kind == "window" else self.S).sum())
        elif self.kind == "padded":
            pairs = self.T * float(self.lengths().sum())
        return 2.0 * self.H * pairs * (self.D + self.value_dim)


def _prefill() -> list[Case]:
    cases = []
    sizes = ((12, 12, 512, 64), (12, 12, 2048, 64), (32, 8, 2048, 128), (8, 8, 8192, 128))
    for short, (H, K, N, D), kind in product(("fp32", "bf16"), sizes, (FULL, "causal")):
        marks: tuple[Mark, ...]
        if N == 512:
            marks = (Mark("torch", 4.0 if kind == "causal" else 2.5),)
        elif short == "fp32":
            of_peak = 0.80 if kind == FULL else 0.75
            marks = (Mark("limit", of_peak, 0.92), Mark("torch", 2.3), *(Mark(peer, 1.0) for peer in PEERS))
        else:
            others = (Mark(peer, 1.0) for peer in ("folded", "flex", *PEERS))
            marks = (Mark("limit", 0.70, 0.90), Mark("torch", 4.5), *others)
        cases.append(Case("prefill", 1, H, K, N, N, D, DTYPES[short], kind, marks=marks))
    for (H, K, N, D), kind in product(sizes[1:3], (FULL, "causal")):
        cases.append(Case("prefill", 1, H, K, N, N, D, "float16", kind, marks=(Mark("as-fp32", 1.0),)))
    return cases


def _masked() -> list[Case]:
    chunk, padding = (Mark("torch", 2.5),), (Mark("torch", 4.5),)
    window = (Mark("flex", 2.5), Mark("torch", 40.0))
    dtypes = ("float32", "bfloat16")
    return [
        *(Case("chunk", 1, 32, 8, 256, 8192, 128, dtype, "causal", marks=chunk) for dtype in dtypes),
        *(
            Case("window", 1, 8, 8, 16384, 16384, 64, dtype, "window", marks=window, without=("openvino",))
            for dtype in dtypes
        ),
        *(Case("padding", 8, 12, 12, 512, 512, 64, dtype, "padded", marks=padding) for dtype in dtypes),
    ]


def _decode() -> list[Case]:
    cases = []
    for dtype in ("float32", "bfloat16"):
        half = dtype == "bfloat16"
        grouped = (Mark("limit", 0.80, 0.90), Mark("torch", 23.0 if half else 3.5), Mark("folded", 1.6))
        single = (Mark("limit", 0.85),)
        shared = (Mark("limit", 0.60), Mark("folded", 2.0))
        latent = (Mark("limit", 0.60), Mark("folded", 1.5 if half else 2.0))
        cases += [
            Case("decode", 1, 12, 12, 1, 1024, 64, dtype),
            Case("decode", 1, 12, 12, 1, 32768, 64, dtype, marks=single),
            Case("decode", 1, 32, 8, 1, 4096, 128, dtype),
            Case("decode", 1, 32, 8, 1, 32768, 128, dtype, marks=grouped),
            Case("decode", 8, 32, 8, 1, 4096, 128, dtype),
            Case("decode", 1, 32, 8, 1, 131072, 128, dtype),
            Case("decode", 8, 32, 8, 1, 2048, 64, dtype, "padded"),
            Case("decode", 1, 32, 1, 1, 32768, 128, dtype, marks=shared),
            Case("decode", 1, 128, 1, 1, 4096, 576, dtype, V=512, marks=latent),
        ]
    for (H, K, D), marks in (((32, 8, 128), (Mark("as-bf16", 1.9, 2.0),)), ((12, 12, 64), ())):
        cases.append(Case("int8 decode", 1, H, K, 1, 32768, D, "bfloat16", marks=marks, without=("flex", *PEERS)))
    many = (Mark("as-bf16", 0.9),)
    for H, K, T, S, D in ((12, 12, 2048, 2048, 64), (32, 8, 2048, 2048, 128), (32, 8, 256, 8192, 128)):
        kind = FULL if T == S else "causal"
        cases.append(Case("int8 prefill", 1, H, K, T, S, D, "bfloat16", kind, marks=many, without=("flex", *PEERS)))
    return cases


def _short_decode() -> list[Case]:
    """One query on few keys: the first messages of a chat. Nobody should be faster."""
    marks, without = tuple(Mark(of, 1.0, 1.2) for of in ("torch", "vllm")), ("flex",)
    sizes = ((32, 8, 128), (28, 4, 128), (12, 12, 64), (16, 16, 128))
    cases = [
        Case("decode", B, H, K, 1, S, D, "bfloat16", marks=marks, without=without)
        for (H, K, D), B, S in product(sizes, (1, 8), (32, 256, 1024))
        if (H, B, S) != (12, 1, 1024)  # among the decoding cases already
    ]
    as_bf16 = (Mark("as-bf16", 1.0, 1.6),)
    without = ("flex", *PEERS)
    return cases + [
        Case("int8 decode", 1, 32, 8, 1, S, 128, "bfloat16", marks=as_bf16, without=without) for S in (512, 4096)
    ]


def _others() -> list[Case]:
    cases = []
    for dtype, kind in product(("float32", "bfloat16"), ("far-bias", "far-logits")):
        near = (Mark("near", 1 / 1.2),)  # at most 1.2 times the time on ordinary numbers
        cases.append(Case("denormal", 1, 8, 8, 1024, 1024, 64, dtype, kind, marks=near, without=("flex", *PEERS)))
    marks = (Mark("torch", 1.0, 1.3),)
    for dtype, kind in product(("float32", "bfloat16"), ("dense-keep", "dense-bias")):
        cases.append(Case("tensor", 1, 8, 8, 1024, 1024, 64, dtype, kind, marks=marks, without=("flex", *PEERS)))
        cases.append(Case("tensor", 1, 32, 8, 1, 4096, 128, dtype, kind, marks=marks, without=("flex", *PEERS)))
    for dtype in ("float32", "bfloat16"):  # a head dim that is no multiple of a vector, as Stable Diffusion's
        cases.append(Case("width", 1, 8, 8, 4096, 4096, 40, dtype, marks=marks, without=("flex", *PEERS)))
    for dtype, D in product(("float32", "bfloat16"), (64, 128)):
        alone = (Mark("alone", 1 / 1.3, 1 / 1.1),)  # output and statistics in at most 1.3 times attention's time
        cases.append(Case("statistics", 1, 8, 8, 8192, 8192, D, dtype, "causal", marks=alone, without=("flex", *PEERS)))
    return cases


def _short() -> list[Case]:
    """Batches of short sequences, forward and in training."""
    marks = (Mark("torch", 1.0, 1.3),)
    forward = (*marks, *(Mark(peer, 1.0) for peer in PEERS))
    kinds = product(("float32", "bfloat16"), ((128, 16), (32, 64)), (False, True))
    batches = [
        Case("train", B, 8, 8, N, N, 64, dtype, backward=True, marks=marks)
        if backward
        else Case("batch", B, 8, 8, N, N, 64, dtype, marks=forward, without=("flex",))
        for dtype, (B, N), backward in kinds
    ]
    ahead = tuple(Mark(of, 1.0) for of in ("torch", *PEERS))
    return [*batches, Case("prefill", 1, 12, 12, 128, 128, 64, "bfloat16", "causal", marks=ahead, without=("flex",))]


def _training() -> list[Case]:
    """Forward and backward."""
    fused = (Mark("torch", 1.5, 2.0),)
    cases = []
    for (H, K, N, D), dtype, kind in product(
        ((12, 12, 1024, 64), (32, 8, 2048, 128)), ("float32", "bfloat16"), (FULL, "causal")
    ):
        cases.append(Case("train", 1, H, K, N, N, D, dtype, kind, backward=True, marks=fused))
    cases.append(Case("train", 8, 8, 8, 256, 256, 64, kind="padded", backward=True))
    cases.append(Case("train", 2, 2, 2, 16, 16, 16, kind="causal", backward=True))  # the overhead of a call
    window = (Mark("torch", 10.0),)
    for dtype in ("float32", "bfloat16"):
        cases.append(Case("train", 1, 8, 8, 8192, 8192, 64, dtype, "window", backward=True, marks=window))
    return cases


def _held_to_avx2() -> tuple[Case, ...]:
    """Run by a process of their own, in which headwise and torch may use no more than AVX2."""
    cases = []
    marks, without = (Mark("torch", 1.0, 1.3),), ("flex", *PEERS)
    for dtype in ("float32", "bfloat16"):
        for kind in (FULL, "causal"):
            cases.append(Case("avx2", 1, 12, 12, 2048, 2048, 64, dtype, kind, marks=marks, without=without))
        cases.append(Case("avx2", 1, 32, 8, 1, 4096, 128, dtype, marks=marks, without=without))
    return tuple(cases)


CASES = (*_prefill(), *_masked(), *_decode(), *_short_decode(), *_others(), *_short(), *_training())
AVX2 = _held_to_avx2()
FOLD = tuple(
    Case("fold", 1, 4 * G, 4, T, S, 64, without=("flex", *PEERS))
    for S in (512, 4096)
    for G in (2, 4, 8)
    for T in (1, 2, 4, 8, 16, 32)
)
