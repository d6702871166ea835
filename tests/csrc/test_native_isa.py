"""The instruction set: chosen at load, forced by HEADWISE_ISA, switched for tests; each gives the same to rounding."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
import torch
from backends import ISAS, KNOWN, NATIVE, attend, natives, needs_native
from mask_cases import Sizes
from native_cases import dtypes

import headwise
from headwise.testing import make_qkv

pytestmark = needs_native


def printed(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    done = fresh.run(code, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


WHICH = """
import torch, headwise
from headwise.testing import make_qkv
headwise.attention(*make_qkv(1, 1, 1, 1, 3, 8, 8), backend="native")
print(torch.ops.headwise.isa())
"""


def test_the_best_comes_first_and_the_baseline_is_always_there() -> None:
    best = [name for name in KNOWN if name in ISAS]
    if "avx512_bf16" in ISAS and "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        pairs = best.index("avx512_bf16")  # they take Intel's CPUs more time than float32's
        best[pairs : pairs + 2] = ["avx512_vnni", "avx512_bf16"]
    assert list(ISAS) == best and best[-1] == "baseline"


@natives
def test_the_environment_forces_one(backend: str) -> None:
    name = backend.removeprefix("native-")
    assert printed(WHICH, HEADWISE_ISA=name) == name


def test_without_a_word_the_best_is_used() -> None:
    assert printed(WHICH, HEADWISE_ISA="") == ISAS[0]


def test_a_set_that_cannot_run_is_named_in_a_warning() -> None:
    done = fresh.run(WHICH, HEADWISE_ISA="avx3")
    assert done.returncode == 0 and done.stdout.strip() == ISAS[0]
    assert (
        f"HEADWISE_ISA=avx3 names no instruction set that can run here: the native kernel runs {ISAS[0]};"
        in done.stderr
    )
    assert fresh.run(WHICH, HEADWISE_ISA=ISAS[-1]).stderr == ""


def test_switching() -> None:
    ops = torch.ops.headwise
    before = ops.isa()
    try:
        for name in ISAS:
            assert ops.use_isa(name) and ops.isa() == name
        for name in ("", "avx", "AVX2", "sve", "avx2 ", "x" * 10_000):
            assert not ops.use_isa(name) and ops.isa() == ISAS[-1], "an unknown name changes nothing"
    finally:
        ops.use_isa(before)


@dtypes
@pytest.mark.parametrize("n", [Sizes(2, 4, 2, 1, 700, 64, 64), Sizes(1, 4, 2, 130, 257, 40, 24)], ids=["few", "many"])
def test_all_agree_to_rounding(dtype: torch.dtype, n: Sizes) -> None:
    """And they are different code: not all of them give the same last bit in float32."""
    qkv = make_qkv(*n, dtype=dtype)
    outs = [attend(backend, *qkv, mask=headwise.causal()) for backend in NATIVE]
    eps = torch.finfo(dtype).eps
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=8 * eps, atol=4 * eps)
    if dtype == torch.float32 and len(ISAS) > 1:
        assert not all(torch.equal(out, outs[0]) for out in outs[1:])
