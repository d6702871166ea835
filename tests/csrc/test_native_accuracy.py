"""How far the native kernel is from the exact answer, largest and root mean square; beside PyTorch written out.

Held: float32 at most 1.25 times naive float32's error, the half dtypes at most 1.5 times the error of merely rounding
the exact answer (they are given half inputs); lse beside float32's. The mean square has no slack (each regime is drawn
until luck evens out), the largest error has an ulp of the largest output. The table: `python
tests/csrc/test_native_accuracy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from backends import NATIVE, attend
from mask_cases import Sizes
from native_cases import DTYPES, exact, native_dtypes
from torch import Tensor

import headwise
from headwise.testing import make_qkv, naive, ulp

pytestmark = pytest.mark.unchecked


@dataclass(frozen=True)
class Regime:
    """Sizes, how often they are drawn, and what is asked."""

    n: Sizes
    draws: int = 1
    scale: float = 1.0  # of queries and keys
    kind: str = "normal"
    causal: bool = False
    softcap: float | None = None
    sinks: bool = False

    def options(self, dtype: torch.dtype) -> dict[str, Any]:
        sinks = {"sinks": torch.linspace(-2, 4, self.n.H).to(dtype)} if self.sinks else {}
        return {"mask": headwise.causal() if self.causal else None, "softcap": self.softcap, **sinks}


REGIMES = {
    "prefill D 64": Regime(Sizes(1, 2, 2, 256, 256, 64, 64)),
    "prefill causal D 64": Regime(Sizes(1, 2, 2, 300, 300, 64, 64), causal=True),
    "prefill causal GQA D 128": Regime(Sizes(1, 4, 1, 200, 333, 128, 128), causal=True),
    "prefill D 80": Regime(Sizes(1, 2, 1, 160, 257, 80, 80)),
    "prefill D 256": Regime(Sizes(1, 2, 2, 128, 257, 256, 256)),
    "prefill D 576, V 512": Regime(Sizes(1, 2, 1, 64, 300, 576, 512)),
    "prefill 8192 keys": Regime(Sizes(1, 1, 1, 64, 8192, 64, 64)),
    "decode D 64": Regime(Sizes(16, 4, 4, 1, 700, 64, 64)),
    "decode GQA D 128": Regime(Sizes(4, 16, 4, 1, 1500, 128, 128)),
    "decode 8192 keys": Regime(Sizes(4, 8, 2, 1, 8192, 64, 64)),
    "decode MLA 576, 512": Regime(Sizes(2, 32, 1, 1, 1100, 576, 512)),
    "decode, 8 rows D 576": Regime(Sizes(8, 8, 1, 1, 300, 576, 512)),
    "logits 16 times": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), scale=4, draws=4),
    "logits 100 times": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), scale=10, draws=8),
    "decode, logits 16 times": Regime(Sizes(32, 4, 2, 1, 700, 64, 64), scale=4, draws=2),
    "outlier channel": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), kind="outlier", draws=8),
    "sink key": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), kind="sink", draws=2),
    "duplicate keys": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), kind="duplicates", draws=2),
    "softcap": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), softcap=5.0, scale=2),
    "sinks": Regime(Sizes(1, 2, 2, 256, 256, 64, 64), sinks=True),
    "decode, everything": Regime(Sizes(16, 8, 2, 1, 700, 64, 64), softcap=5.0, sinks=True, scale=2, causal=True),
}
regimes = pytest.mark.parametrize("name", REGIMES)


@dataclass(frozen=True)
class Error:
    """Largest and root mean square distance from the exact answer."""

    most: float
    rms: float

    def __str__(self) -> str:
        return f"max {self.most:.2e} rms {self.rms:.2e}"


def error(approximate: list[Tensor], right: list[Tensor]) -> Error:
    apart = torch.cat([(x.double() - y).flatten() for x, y in zip(approximate, right, strict=True)])
    apart = apart.nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    return Error(float(apart.abs().max()), float(apart.square().mean().sqrt()))


@cache
def answers(name: str, dtype: torch.dtype) -> tuple[list[Any], list[Tensor], list[Tensor], Error, Error, Error]:
    """(inputs, exact outs, exact lses, naive's error, rounding's error, the error of a float32 lse)."""
    regime = REGIMES[name]
    options = regime.options(dtype)
    draws = [
        make_qkv(*regime.n, dtype=dtype, kind=regime.kind, scale=regime.scale, seed=s) for s in range(regime.draws)
    ]
    right = [exact(*qkv, **options) for qkv in draws]
    outs, lses = [x[0] for x in right], [x[1] for x in right]
    rough = [naive(*qkv, **options) for qkv in draws]
    each = [error([x[form] for x in rough], outs) for form in range(3)]
    worst = Error(max(e.most for e in each), max(e.rms for e in each))
    floats = [naive_lse(*(x.float() for x in qkv[:2]), **options) for qkv in draws]
    return draws, outs, lses, worst, error([x.to(dtype) for x in outs], outs), error(floats, lses)


def naive_lse(query: Tensor, key: Tensor, mask: Any, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
    """In float32, as one would write it."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask.allowed(*scores.shape[2:]), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return torch.logsumexp(scores, -1)


def measured(backend: str, name: str, dtype: torch.dtype) -> tuple[Error, Error]:
    """(of out, of lse)."""
    draws, outs, lses, *_ = answers(name, dtype)
    ours = [attend(backend, *qkv, **REGIMES[name].options(dtype), return_lse=True) for qkv in draws]
    return error([x[0] for x in ours], outs), error([x[1] for x in ours], lses)


def budget(backend: str, dtype: torch.dtype) -> float:
    """Times naive's error in float32, times the rounding floor in the half dtypes.

    The baseline has no fused multiply-add, and naive, which runs on this CPU's best instructions, has.
    """
    return 1.25 if dtype == torch.float32 and not backend.endswith("baseline") else 1.5


def check_lse(lse: Error, floats: Error, lses: list[Tensor], dtype: torch.dtype) -> None:
    """Within 1.5 times the error of a float32 lse; in the half dtypes a 64th of the dtype's own rounding is added.

    A weight exp(score - lse) stays right to that. The largest error moves by whole ulps.
    """
    slack = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 64
    step = ulp(max(float(x.abs().max()) for x in lses), torch.float32)
    message = f"lse: ours {lse}, float32's {floats}"
    assert lse.rms <= 1.5 * floats.rms + slack and lse.most <= 1.5 * floats.most + step + slack, message


@pytest.mark.sweep
@native_dtypes
@regimes
def test_forward(backend: str, dtype: torch.dtype, name: str) -> None:
    _, outs, lses, rough, floor, float_lse = answers(name, dtype)
    out, lse = measured(backend, name, dtype)
    bar, factor = rough if dtype == torch.float32 else floor, budget(backend, dtype)
    step = ulp(max(float(x.abs().max()) for x in outs), dtype)
    message = f"{name}: ours {out}, naive {rough}, rounding floor {floor}"
    assert out.rms <= factor * bar.rms and out.most <= factor * bar.most + step, message
    check_lse(lse, float_lse, lses, dtype)


def test_a_small_error_would_be_seen() -> None:
    """Scores rounded to half, or 1e-6 of a weight lost, lie outside."""
    for dtype, fault in (
        (torch.float32, lambda q: q * (1 + 1e-5)),
        (torch.bfloat16, lambda q: (q * 0.125).bfloat16() / 0.12),
    ):
        draws, outs, _, rough, floor, _ = answers("prefill D 64", dtype)
        ours = error([exact(fault(q), k, v)[0].to(dtype) for q, k, v in draws], outs)
        assert ours.rms > 1.25 * (rough if dtype == torch.float32 else floor).rms


def table(line: Callable[[str], None] = print) -> None:
    """The errors as a table: ours and naive's as multiples of the bar, and in figures."""
    for dtype in DTYPES:
        bar = "naive float32" if dtype == torch.float32 else "rounding floor"
        line(f"\n{str(dtype)[6:]}: largest / rms error as a multiple of the {bar}'s, then lse's largest")
        width = max(len(x) for x in NATIVE) - len("native-")
        line(f"{'':24} {'bar':>17} {'naive':>11} " + " ".join(f"{b.removeprefix('native-'):>{width}}" for b in NATIVE))
        for name in REGIMES:
            _, _, _, rough, floor, float_lse = answers(name, dtype)
            unit = rough if dtype == torch.float32 else floor
            cells, lses = [], []
            for backend in NATIVE:
                out, lse = measured(backend, name, dtype)
                cells.append(f"{out.most / unit.most:.2f} / {out.rms / unit.rms:.2f}".rjust(width))
                lses.append(f"{lse.most:.1e}")
            row = f"{name:24} {unit.most:.1e} / {unit.rms:.1e}"
            row += f" {rough.most / unit.most:4.1f} / {rough.rms / unit.rms:4.1f} "
            line(row + " ".join(cells) + f"   lse {' '.join(lses)}; float32's {float_lse.most:.1e}")


if __name__ == "__main__":
    table()
