"""Every way the op can be computed, as a test parameter: `@every_backend` and `attend(backend, q, k, v, ...)`.

A backend may refuse what it cannot honour, but only clearly, and only if it is not one of MUST. A refusal is
checked here and comes back as None: nothing is skipped.

The native kernel is there once for each instruction set of this CPU, as `native-avx2` and so on: `attend` switches to
it for the call. It may refuse only what `excused` names. Where the library is not built these are left out here, and
the tests that are the kernel's own (`@natives`) skip and say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from draw import slow_except
from torch import Tensor

import headwise
from headwise.ops.native.library import isas

KNOWN = ("amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "neon_bf16", "neon", "baseline")  # best first
ISAS = isas()  # of this CPU and build; none where the library is not built
MUST = ("auto", "reference", "blocks")  # these run everything that is valid
OPTIONAL = ("native", "sdpa", "flex")
BACKENDS = (*MUST, *OPTIONAL)  # and `triton`, which has tests of its own: test_triton*.py
# avx512 is avx512_vnni but for int8: where that is there, the fuzzer and test_native_isa.py run both.
NATIVE = [f"native-{isa}" for isa in ISAS if isa != "avx512" or "avx512_vnni" not in ISAS]
BEST = NATIVE[:1]  # where one instruction set is enough
needs_native = pytest.mark.skipif(not ISAS, reason="the native library is not built: make native")
natives = pytest.mark.parametrize("backend", NATIVE or [pytest.param("native", marks=needs_native)])
best_of_natives = pytest.mark.parametrize(  # where the code in question is that of all; CI runs each
    "backend", slow_except(NATIVE, BEST) or [pytest.param("native", marks=needs_native)]
)
quick = pytest.mark.parametrize("backend", [*MUST, "sdpa", *NATIVE])  # flex traces each call: 0.2 s
# FlexAttention traces what it is given, and cannot trace the shape checker.
every_backend = pytest.mark.parametrize(
    "backend", [*MUST, "sdpa", *NATIVE, pytest.param("flex", marks=pytest.mark.unchecked)]
)


@contextmanager
def instructions(backend: str) -> Iterator[str]:
    """The op's own name of a backend; within the block a native one runs on the instruction set it names."""
    name, _, isa = backend.partition("-")
    if not isa:
        yield name
        return
    before = torch.ops.headwise.isa()
    assert torch.ops.headwise.use_isa(isa), f"{isa} is listed and cannot be used"
    try:
        yield name
    finally:
        torch.ops.headwise.use_isa(before)


def attend(backend: str, *qkv: Any, **options: Any) -> Any:
    """`headwise.attention` by this backend; None where the backend refuses as it should."""
    with instructions(backend) as name:
        if name in MUST:
            return headwise.attention(*qkv, **options, backend=name)
        try:
            return headwise.attention(*qkv, **options, backend=name)
        except ValueError as refusal:
            check_refusal(name, str(refusal), headwise.explain(*qkv, **options))
            if name == "native":
                assert excused(*qkv, **options), f"native serves this: {refusal}"
            return None


def excused(*qkv: Any, **options: Any) -> bool:
    """What the native kernel may leave to others: float64, nothing to compute, torch.func, other devices.

    And a mask of more tensors than its operator takes, or of windows that keep different first keys in sight.
    """
    tensors: list[Tensor] = [*qkv, *(options[name] for name in ("query", "key", "value") if name in options)]
    mask = options.get("mask")
    kinds = [type(part).__name__ for part in mask.parts] if isinstance(mask, headwise.Mask) else []
    dense = kinds.count("Keep") + kinds.count("Bias")
    parts = mask.parts if isinstance(mask, headwise.Mask) else ()
    firsts = {part.first for part in parts if type(part).__name__ == "Band" and part.left is not None}
    return (
        torch._C._are_functorch_transforms_active()
        or any(x.dtype == torch.float64 or x.numel() == 0 or x.device.type != "cpu" for x in tensors)
        or (dense > 8 or kinds.count("Segments") > 4 or kinds.count("Alibi") > 4)
        or len(firsts) > 1
    )


def check_refusal(backend: str, text: str, choice: Any) -> None:
    """The refusal names the backend, says why in `explain`'s own words, and names those that serve the call."""
    assert choice.backend != backend, f"auto chose {backend}, which then refused: {text}"
    why = choice.others[backend]
    assert why and not why.startswith("supports the call"), f"{backend} refuses, and explain says {why!r}"
    said = f"backend {backend!r} does not support this call: {why}; use 'auto' or"
    assert said in text, f"unclear: {text!r} ({why!r})"
    able = {choice.backend, *(other for other, why in choice.others.items() if why.startswith("supports the call"))}
    assert {*text.split("use 'auto' or ")[1].split(" or ")} == able, f"{text!r} names others than {sorted(able)}"
