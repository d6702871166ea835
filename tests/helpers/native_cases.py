"""What the native kernel's own tests share: float64 answers without loops, cached by case; faults collected.

The kernel must be right at every size and on every instruction set, so these tests run many small cases in one test
and name those that fail: `with collected() as attempt: attempt("S = 65", check, ...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from backends import NATIVE, attend, needs_native
from mask_cases import MASKS, Sizes
from torch import Tensor

from headwise import Mask
from headwise.ops.native.gradient import Training
from headwise.ops.native.mask_arguments import LoweredOptions, lowered
from headwise.ops.options import ScoreOptions
from headwise.testing import assert_close_like_torch, assert_same_bits, make_qkv, naive, ulp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("fp32", "bf16", "fp16")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)


def is_twin(backend: str, dtype: torch.dtype) -> bool:
    """Whether this is the code of another instruction set: amx_bf16 is avx512_vnni but for bfloat16.

    test_native_bits.py holds them to the same bits; all other tests of float32 and float16 need one of them.
    """
    return backend == "native-amx_bf16" and dtype != torch.bfloat16 and "native-avx512_vnni" in NATIVE


def is_close(backend: str, dtype: torch.dtype) -> bool:
    """Whether this is the code of another instruction set but for how keys are read, and so left to CI."""
    return backend == "native-avx512_bf16" and dtype != torch.bfloat16 and "native-avx512_vnni" in NATIVE


PAIRS = [
    pytest.param(dtype, backend, id=f"{name}-{backend}", marks=pytest.mark.slow if is_close(backend, dtype) else ())
    for dtype, name in zip(DTYPES, NAMES, strict=True)
    for backend in NATIVE
    if not is_twin(backend, dtype)
]
# `@natives` and `@dtypes` in one.
native_dtypes = pytest.mark.parametrize(
    ("dtype", "backend"), PAIRS or [pytest.param(torch.float32, "native", marks=needs_native)]
)


def rules_of(mask: Mask, T: int, S: int) -> LoweredOptions:
    """A mask alone in the operator's terms."""
    return lowered(ScoreOptions(mask, 1.0), T, S)


def training_of(mask: Mask, *qkv: Tensor) -> Training:
    """A call with this mask alone, as autograd keeps it."""
    query, key, value = qkv
    return Training(query, key, value, rules_of(mask, query.shape[2], key.shape[2]), 0.0, None)


def weights_of(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(weights (B, K, G T, S), lse (B, H, T)) in float64, all rows at once."""
    (B, H, T, D), (K, S) = query.shape, key.shape[1:3]
    q, k = query.double(), key.double()
    scores = (q.reshape(B, K, -1, D) @ k.mT).view(B, H, T, S) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = mask.allowed(T, S) if mask is not None else None
    added = mask.added(T, S) if mask is not None else None
    if added is not None:
        scores = scores + added.double()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, -1)
    empty = lse == -math.inf
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double().view(1, H, 1))
    weights = torch.exp(scores - lse.masked_fill(empty, 0)[..., None])
    return weights.view(B, K, -1, S), lse.masked_fill(empty, -math.inf)


def exact(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64; held against `oracle` by a test."""
    weights, lse = weights_of(query, key, **options)
    return (weights @ value.double()).view(*query.shape[:3], -1), lse


@dataclass(frozen=True, eq=False)
class Answer:
    """A case's inputs and its answers: out and lse in float64, out by naive PyTorch, which few cases need.

    And two sizes that roundings follow: the largest |score|, and the root of the largest sum of (weight * value)^2.
    """

    qkv: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    out: Tensor
    lse: Tensor
    roughly: Callable[[], tuple[Tensor, ...]]
    tallest: float
    spread: float

    @cached_property
    def rough(self) -> tuple[Tensor, ...]:
        return self.roughly()

    @cached_property
    def slack(self) -> Tensor:
        """The `values` of a budget: see `check_out`."""
        if self.qkv[0].dtype == torch.float32:
            return self.qkv[2] * max(1.0, self.tallest)
        return self.out.abs().max().clamp(min=self.spread)

    @cached_property
    def certain(self) -> float:
        """What the budget of `assert_close_like_torch` comes to without naive's error: all of it in the half dtypes."""
        dtype, largest = self.qkv[0].dtype, float(self.slack.abs().max()) if self.slack.numel() else 0.0
        floor = 0.0 if dtype == torch.float32 else float((self.out.to(dtype) - self.out).abs().max())
        return 1.5 * floor + ulp(largest, dtype) if math.isfinite(largest) else -math.inf


def answer_of(qkv: tuple[Tensor, Tensor, Tensor], **options: Any) -> Answer:
    """The answers for these inputs."""
    weights, lse = weights_of(*qkv[:2], **options)
    value = qkv[2].double()
    out = (weights @ value).view(*qkv[0].shape[:3], -1)
    spread = float((weights.square() @ value.square()).amax().sqrt())
    scale = options.get("scale")
    tops = [x.detach().double().norm(dim=-1).max() for x in qkv[:2]]
    tallest = float(tops[0] * tops[1]) * abs(qkv[0].shape[-1] ** -0.5 if scale is None else scale)
    return Answer(qkv, options, out, lse, lambda: naive(*qkv, **options), tallest, spread)


@cache
def answer(n: Sizes, dtype: torch.dtype, mask: str | None = None, kind: str = "normal", scale: float = 1.0) -> Answer:
    """The answers for the sizes, with one of `mask_cases.MASKS`."""
    qkv = make_qkv(*n, dtype=dtype, kind=kind, scale=scale)
    return answer_of(qkv, **({} if mask is None else {"mask": MASKS[mask](n).mask}))


def check(backend: str, wanted: Answer) -> None:
    """out within its budget, lse within its own, and out the same to the bit whether or not lse is asked for."""
    out = attend(backend, *wanted.qkv, **wanted.options)
    assert out.dtype == wanted.qkv[0].dtype and out.shape == wanted.out.shape
    check_out(out, wanted)
    again, lse = attend(backend, *wanted.qkv, **wanted.options, return_lse=True)
    assert_same_bits(again, out, what="out beside lse")
    check_lse(lse, wanted)


def check_out(out: Tensor, wanted: Answer) -> None:
    """Within the budget of `assert_close_like_torch`, with slack that fits a case of a few rows.

    There naive's largest error is luck. In float32 a score's own rounding is added, times the largest value; in the
    half dtypes 1 ulp of the largest output, or of what its terms come to where their signs differ. That is small:
    one key too many or too few of thousands is seen.
    """
    assert out.dtype == wanted.qkv[0].dtype and out.shape == wanted.out.shape
    if out.numel() == 0 or float((out.detach() - wanted.out).abs().max()) <= wanted.certain:
        return  # without naive's answer, which takes longer than all the rest
    assert_close_like_torch(out, wanted.out, wanted.rough, values=wanted.slack)


def check_lse(lse: Tensor, wanted: Answer) -> None:
    """float32; -inf in the same rows; elsewhere within a few roundings of the largest score.

    In the half dtypes, a 64th of the dtype's own rounding more: a weight exp(score - lse) stays right to that.
    """
    dtype = wanted.qkv[0].dtype
    assert lse.dtype == torch.float32 and lse.shape == wanted.lse.shape
    empty = wanted.lse == -math.inf
    assert bool((lse[empty] == -math.inf).all()), "lse of a row that may attend nothing is -inf"
    error = float((lse.double() - wanted.lse)[~empty].abs().nan_to_num(nan=math.inf).max()) if not empty.all() else 0.0
    slack = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 64
    top = float(wanted.lse[~empty].abs().max()) if not empty.all() else 0.0
    budget = 2 * ulp(max(wanted.tallest, top, 1.0), torch.float32) + slack
    assert error <= budget, f"lse: error {error:.3e}, budget {budget:.3e} (scores up to {wanted.tallest:.1f})"


@contextmanager
def collected(most: int = 6) -> Iterator[Callable[..., None]]:
    """Run many checks, then fail once with how many failed and the first few: `attempt(what, check, *arguments)`."""
    ran, faults = 0, []

    def attempt(what: object, run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        nonlocal ran
        ran += 1
        try:
            run(*args, **kwargs)
        except AssertionError as fault:
            faults.append(f"{what}: {fault}")

    yield attempt
    assert ran, "nothing was checked"
    assert not faults, "\n".join([f"{len(faults)} of {ran} fail", *faults[:most]])
