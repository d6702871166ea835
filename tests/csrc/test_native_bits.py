"""The native kernel gives the same bits for the same input: again and again, on any threads, in any company.

Also that it comes back at all: in two Python threads at once, in a forked child, with the threads changed between.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import BEST, NATIVE, attend, best_of_natives, instructions
from draw import drawn
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from test_invariance import threads
from torch import Tensor

import headwise
from headwise import Mask
from headwise.ops.statistics import statistics
from headwise.testing import assert_same_bits, make_qkv

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

THREADS = (1, 2, 3, 64)
# Large enough that threads are woken, where the name does not say otherwise.
FORMS = {
    "tiny": Sizes(2, 2, 1, 3, 9, 8, 8),
    "decoding": Sizes(3, 4, 4, 1, 700, 64, 64),
    "decoding, split": Sizes(2, 8, 2, 1, 4200, 64, 64),
    "MQA, split": Sizes(1, 8, 1, 1, 5000, 64, 64),
    "a chunk, split": Sizes(1, 4, 1, 13, 3100, 32, 32),
    "many rows": Sizes(2, 6, 2, 211, 307, 40, 24),
    "more rows than an item has": Sizes(1, 4, 1, 263, 269, 64, 32),
    "MLA": Sizes(1, 16, 1, 1, 1100, 576, 512),
    "MLA, many rows": Sizes(1, 16, 1, 3, 1100, 576, 512),
}
# Many rows, of up to 48 a block: head dims in one piece and in two, values of whole vectors and others.
BLOCKS = {
    "head dim 16": Sizes(2, 2, 2, 59, 59, 16, 16),
    "odd head dim": Sizes(1, 3, 3, 131, 137, 17, 33),
    "two pieces": Sizes(1, 4, 2, 97, 149, 144, 48),
    "five rows a key": Sizes(1, 10, 2, 61, 61, 24, 17),
}
TWINS = [f"native-{isa}" for isa in ("avx512_vnni", "amx_bf16") if f"native-{isa}" in NATIVE]
HEAVY = ("none", "lengths")  # masks enough where a call lasts
forms = pytest.mark.parametrize("n", FORMS.values(), ids=FORMS)
MASKS: dict[str, Callable[[Sizes], Mask | None]] = {
    "none": lambda n: None,
    "causal": lambda n: headwise.causal(),
    "window": lambda n: headwise.window(50, 3),
    "lengths": lambda n: headwise.causal() & headwise.lengths(torch.arange(n.S, n.S - 7 * n.B, -7)),
    "segments": lambda n: headwise.segments(torch.arange(n.T) // 60, torch.arange(n.S) // 60),
    "keep": lambda n: headwise.keep(torch.rand(n.B, 1, n.T, n.S, generator=torch.Generator().manual_seed(3)) > 0.3),
    "bias": lambda n: headwise.bias(torch.randn(1, n.H, n.T, n.S, generator=torch.Generator().manual_seed(4))),
}


def run(backend: str, n: Sizes, mask: Mask | None, *qkv: Tensor) -> list[Tensor]:
    """out without lse, out, lse, and out of a call with everything on."""
    torch.manual_seed(0)
    sinks, gate = torch.linspace(-1, 1, n.H), torch.linspace(0, 1, n.H)
    return [
        attend(backend, *qkv, mask=mask),
        *attend(backend, *qkv, mask=mask, return_lse=True),
        attend(backend, *qkv, mask=mask, sinks=sinks, gate=gate, softcap=3.0, dropout=0.2),
    ]


def compare(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for x, y, what in zip(ours, theirs, ("out", "out beside lse", "lse", "out with everything"), strict=True):
        assert_same_bits(x, y, what=what)


@pytest.mark.sweep
@native_dtypes
@forms
def test_any_number_of_threads(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    qkv = make_qkv(*n, dtype=dtype)
    with collected() as attempt:
        for name in drawn(HEAVY if n.D > 64 or n.T > 100 else [*MASKS]):
            mask = MASKS[name](n)
            with threads(1):
                one = run(backend, n, mask, *qkv)
            for count in THREADS[1:]:
                with threads(count):
                    attempt(f"{name}, {count} threads", compare, run(backend, n, mask, *qkv), one)


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("n", [n for n in FORMS.values() if n.B > 1], ids=[k for k, n in FORMS.items() if n.B > 1])
def test_a_row_of_the_batch_alone(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Dropout draws by the place in the batch, so it is left out here."""
    qkv = make_qkv(*n, dtype=dtype)

    def call(rows: slice, mask: Mask | None) -> list[Tensor]:
        return list(attend(backend, *(x[rows] for x in qkv), mask=mask, return_lse=True))

    def same(rows: slice, mask: Mask | None, whole: list[Tensor]) -> None:
        for x, y in zip(call(rows, mask), whole, strict=True):
            assert_same_bits(x, y[rows])

    with collected() as attempt:
        for count in (1, 2):
            with threads(count):
                for name in ("none", "window", "segments"):
                    mask = MASKS[name](n)
                    whole = call(slice(None), mask)
                    for b in range(n.B):
                        attempt(f"{name}, row {b}", same, slice(b, b + 1), mask, whole)
                lengths = torch.arange(n.S, n.S - 7 * n.B, -7)
                whole = call(slice(None), headwise.lengths(lengths))
                for b in range(n.B):
                    attempt(f"lengths, row {b}", same, slice(b, b + 1), headwise.lengths(lengths[b : b + 1]), whole)


@pytest.mark.sweep
@native_dtypes
@forms
def test_a_group_of_heads_alone(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    q, k, v = make_qkv(*n, dtype=dtype)
    whole, lse = attend(backend, q, k, v, mask=headwise.causal(), return_lse=True)
    G = n.H // n.K
    for g in range(n.K):
        heads = slice(g * G, (g + 1) * G)
        out, its = attend(
            backend, q[:, heads], k[:, g : g + 1], v[:, g : g + 1], mask=headwise.causal(), return_lse=True
        )
        assert_same_bits(out, whole[:, heads])
        assert_same_bits(its, lse[:, heads])


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("n", BLOCKS.values(), ids=BLOCKS)
def test_bounds_and_the_same_pairs_one_by_one(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Of bounds a kernel knows which vectors of rows a key is left out for; of a boolean tensor it does not."""
    q, k, v = make_qkv(*n, dtype=dtype)
    masks = {
        "causal": headwise.causal(),
        "top left": headwise.causal(offset=0),
        "behind": headwise.causal(offset=n.S - n.T - 20),
        "ahead": headwise.causal(offset=9),  # ends lie one key behind groups of eight
        "window": headwise.window(17, 2, offset=n.S - n.T),
        "lengths": headwise.causal() & headwise.lengths(torch.tensor([n.S, n.S - 33])[: n.B]),
        "segments": headwise.causal() & headwise.segments(torch.arange(n.T) // 40, torch.arange(n.S) // 40),
    }
    slopes = headwise.alibi(headwise.alibi_slopes(n.H))
    with collected() as attempt:
        for name, mask in masks.items():
            allowed = mask.allowed(n.T, n.S)
            assert allowed is not None
            for bounds, pairs in ((mask, headwise.keep(allowed)), (mask & slopes, headwise.keep(allowed) & slopes)):
                ours = attend(backend, q, k, v, mask=bounds, return_lse=True)
                other = attend(backend, q, k, v, mask=pairs, return_lse=True)
                for what, x, y in zip(("output", "lse"), ours, other, strict=True):
                    attempt(f"{name}, {what}", assert_same_bits, x, y)


@native_dtypes
def test_a_thousand_times(backend: str, dtype: torch.dtype) -> None:
    small, split = Sizes(1, 4, 2, 7, 31, 11, 13), Sizes(1, 4, 2, 1, 2100, 64, 64)
    with threads(2):
        for n, times in ((small, 1000), (split, 100)):
            qkv = make_qkv(*n, dtype=dtype)
            first = attend(backend, *qkv, mask=headwise.causal(), return_lse=True)
            for _ in drawn(range(times)):
                again = attend(backend, *qkv, mask=headwise.causal(), return_lse=True)
                assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@best_of_natives
def test_two_python_threads_at_once(backend: str) -> None:
    """Each with its own shapes, so that shared scratch would be seen; the number of threads changed meanwhile."""
    cases = []
    for n in FORMS.values():
        qkv = make_qkv(*n)
        cases.append((qkv, attend(backend, *qkv, mask=headwise.causal(), return_lse=True)))

    def work(seed: int) -> int:
        for step in range(16):
            qkv, wanted = cases[(seed + step * (1 + seed % 2)) % len(cases)]
            # the instruction set is the process's: it stays as it is while the threads run
            ours = headwise.attention(*qkv, mask=headwise.causal(), return_lse=True, backend="native")
            for x, y in zip(ours, wanted, strict=True):
                assert_same_bits(x, y)
        return 16

    before = torch.ops.headwise.isa()
    assert torch.ops.headwise.use_isa(backend.removeprefix("native-"))
    try:
        for count in (1, 2):
            with threads(count), ThreadPoolExecutor(4) as pool:
                assert sum(pool.map(work, range(4), timeout=120)) == 64
    finally:
        torch.ops.headwise.use_isa(before)


@native_dtypes
def test_the_company_in_the_buffer(backend: str, dtype: torch.dtype) -> None:
    """Alignment of the data changes no bit: the same tensors at every offset of a vector."""
    for n in (Sizes(1, 4, 2, 1, 131, 40, 24), Sizes(1, 4, 2, 23, 67, 40, 24)):
        qkv = make_qkv(*n, dtype=dtype)
        plain = attend(backend, *qkv, mask=headwise.causal(), return_lse=True)
        for offset in range(1, 33):
            moved = [torch.empty(x.numel() + offset, dtype=dtype)[offset:].view(x.shape).copy_(x) for x in qkv]
            for x, y in zip(attend(backend, *moved, mask=headwise.causal(), return_lse=True), plain, strict=True):
                assert_same_bits(x, y, what=f"offset {offset}")


@native_dtypes
def test_keys_that_lie_far_apart(backend: str, dtype: torch.dtype) -> None:
    """In the order (B, T, H, D) keys are copied side by side where thousands of rows read them, with their NaN."""
    n = Sizes(1, 2, 2, 4099, 19, 13, 11)
    q, *packed = make_qkv(*n, dtype=dtype)

    def apart(x: Tensor, step: int = 1) -> Tensor:
        """Key after key at the distance of 101 heads, with NaN between them, and `step` from column to column."""
        room = torch.full((n.B, n.S, 101, step * x.shape[3]), torch.nan, dtype=dtype)
        return room[:, :, 3 : 3 + n.K, ::step].copy_(x.transpose(1, 2)).transpose(1, 2)

    def call(mask: Mask | None, k: Tensor, v: Tensor) -> list[Tensor]:
        with instructions(backend):
            out, result = headwise.attention_statistics(q, k, v, mask=mask)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            grads = torch.autograd.grad(headwise.attention(*leaves, mask=mask, backend="native").sum(), leaves)
        return [*attend(backend, q, k, v, mask=mask, return_lse=True), out, result.entropy, result.pooled, *grads]

    def compare_bits(name: str, mask: Mask | None) -> None:
        for x, y in zip(call(mask, *map(apart, packed)), call(mask, *packed), strict=True):
            assert_same_bits(x, y, what=name)

    with collected() as attempt:
        attempt("all", compare_bits, "all", None)
        one, other = (attend(backend, q, *(apart(x, step) for x in packed)) for step in (1, 2))
        attempt("every other column", assert_same_bits, one, other)
        packed[1][0, 0, 11, 2], packed[0][0, 1, 17, 3] = torch.nan, torch.inf
        attempt("bad keys", compare_bits, "bad keys", headwise.causal(offset=-4000))


@pytest.mark.skipif(len(TWINS) < 2, reason="needs a CPU with AMX")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_sets_that_differ_in_bfloat16_alone_are_the_same_code(dtype: torch.dtype) -> None:
    """All options and masks, gradients, statistics: why other tests of these dtypes run on the first of them alone."""

    def calls(backend: str, n: Sizes, mask: Mask | None) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in make_qkv(*n, dtype=dtype)]
        outs = run(backend, n, mask, *leaves)
        with instructions(backend):
            ends = [outs[1], outs[3]]
            grads = torch.autograd.grad(ends, leaves, [torch.ones_like(x) for x in ends])
            result = statistics(*(x.detach() for x in leaves[:2]), mask=mask, sinks=torch.linspace(-1, 1, n.H))
        numbers = [result.entropy, result.largest, result.distance, result.sink, result.pooled, result.received]
        return [*outs, *grads, *numbers]

    with collected() as attempt:
        cases = [(form, name) for form, n in FORMS.items() for name in (MASKS if n.D <= 64 else HEAVY)]
        for form, name in drawn(cases):
            ours, *others = (calls(backend, FORMS[form], MASKS[name](FORMS[form])) for backend in TWINS)
            for backend, theirs in zip(TWINS[1:], others, strict=True):
                for number, (x, y) in enumerate(zip(ours, theirs, strict=True)):
                    attempt(f"{backend}, {form}, {name}, {number}", assert_same_bits, x, y)


@pytest.mark.skipif(len(TWINS) < 2, reason="needs a CPU with AMX")
@pytest.mark.parametrize("D", [40, 64, 96, 128])
def test_a_single_row_of_bfloat16_is_the_same_code(D: int) -> None:
    """Matrix instructions compute two rows and more. Of the last keys some fill no vector."""
    with collected() as attempt:
        for S in (1, 13, 47, 331, 1237):
            qkv = make_qkv(2, 3, 3, 1, S, D, 72, dtype=torch.bfloat16)
            attempt(f"{S} keys", assert_same_bits, *(attend(backend, *qkv) for backend in TWINS))


# -- forks, in a process of their own ----------------------------------------------------------------------------------

FIRST = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, headwise
from headwise.testing import make_qkv
torch.set_num_threads(2)
sizes = [(2, 8, 2, 1, 4200, 64, 64), (2, 6, 2, 211, 307, 40, 24)]
given = [make_qkv(*n) for n in sizes]
call = lambda: [headwise.attention(*qkv, mask=headwise.causal(), backend="native") for qkv in given]
bits = lambda outs: [x.numpy().tobytes() for x in outs]     # torch.equal, parallel, would hang in the child
"""
EARLY = """
from headwise.ops.native.library import error_for
assert error_for() is None                      # loads the library, and calls nothing of it
torch.randn(1 << 20).exp()                    # starts torch's threads
child = os.fork()
if child == 0:
    signal.alarm(30)
    call()
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, f"a child of a parent that had not called ended with {status}"
"""
FORK = """
wanted = bits(call())                         # in the parent, on its threads
same = lambda ours: bits(ours) == wanted
torch.randn(600, 600) @ torch.randn(600, 600)
"""
CHILD = """
child = os.fork()
if child == 0:
    signal.alarm(30)                          # a hang ends in a signal, which the parent sees
    good = same(call())
    os._exit(0 if good else 3)
status = os.waitpid(child, 0)[1]
assert status == 0, f"the child ended with {status}"
assert same(call()), "and the parent goes on"
"""
GRANDCHILD = """
def nested():
    child = os.fork()
    if child == 0:
        os._exit(0 if same(call()) else 3)
    return os.waitpid(child, 0)[1]
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if same(call()) and nested() == 0 and same(call()) else 3)
assert os.waitpid(child, 0)[1] == 0
"""
POOL = """
import multiprocessing
signal.alarm(60)
def work(n):
    torch.set_num_threads(n)
    return same(call())
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(work, [1, 2, 4, 1]) == [True] * 4
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", BEST)
def test_a_forked_child_does_not_hang(backend: str, tmp_path: Path) -> None:
    """Nor one whose parent has not called yet, a child's child, those of a pool: one parent has them all in turn."""
    # Errors go to a file: a child that hangs would hold a pipe open. Its session of its own lets all of it be killed.
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        script = FIRST + EARLY + FORK + CHILD + GRANDCHILD + POOL
        parent = subprocess.Popen([sys.executable, "-c", script], stderr=file, start_new_session=True)
        try:
            code = parent.wait(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
    assert code == 0, errors.read_text()[-2000:]


def test_these_tests_can_fail() -> None:
    """One bit in one entry is seen."""
    n = FORMS["tiny"]
    ours: list[Any] = list(headwise.attention(*make_qkv(*n), return_lse=True))
    theirs = [x.clone() for x in ours]
    theirs[1].view(torch.int32)[0, 0, 0] ^= 1
    with pytest.raises(AssertionError, match="1 of 12 entries"), collected() as attempt:
        for x, y in zip(ours, theirs, strict=True):
            attempt("planted", assert_same_bits, x, y)
