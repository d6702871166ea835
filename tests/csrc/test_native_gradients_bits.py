"""The native backward gives the same bits again and again, on any threads, in any company; its memory is linear."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fresh
import pytest
import torch
from backends import BEST, best_of_natives, instructions
from draw import drawn
from gradient_cases import Case, Leaves, gradients, of_case
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from test_invariance import threads

import headwise
from headwise.testing import assert_same_bits

pytestmark = pytest.mark.unchecked

THREADS = (1, 2, 3, 64)
# Large enough that threads are woken, but for the first.
FORMS = {
    "tiny": Case(Sizes(2, 2, 1, 3, 9, 8, 8), sinks=True),
    "a query": Case(Sizes(2, 8, 2, 1, 2100, 64, 64), sinks=True),
    "many rows": Case(Sizes(2, 6, 2, 211, 307, 40, 24), sinks=True),
    "several chunks": Case(Sizes(1, 4, 1, 1100, 130, 16, 16), sinks=True, slopes=(4,)),
    "long": Case(Sizes(1, 1, 1, 4200, 150, 16, 16), sinks=True),
    "in two passes": Case(Sizes(1, 3, 3, 4200, 150, 16, 16)),  # too few chunks
    "a bias of all": Case(Sizes(2, 4, 2, 97, 131, 24, 24), bias=(97, 131), slopes=(2, 4)),
    "a bias a head": Case(Sizes(2, 4, 2, 97, 131, 24, 24), bias=(4, 97, 131), dropout=0.25),
    "a bias a key": Case(Sizes(3, 4, 2, 97, 131, 24, 24), bias=(131,), softcap=2.0),
    "a bias a row": Case(Sizes(3, 4, 2, 97, 131, 24, 24), bias=(4, 97, 1), lse=True),
    "a bias a batch": Case(Sizes(3, 4, 2, 97, 131, 24, 24), bias=(3, 1, 1, 1), lse=True),
    "MLA": Case(Sizes(1, 16, 1, 5, 300, 576, 512), sinks=True),
}
forms = pytest.mark.parametrize("shape", FORMS)


def same(ours: Leaves, theirs: Leaves) -> None:
    for name, x in ours.items():
        assert_same_bits(x, theirs[name], what=f"gradient of {name}")


@pytest.mark.sweep
@native_dtypes
@forms
def test_any_number_of_threads(backend: str, dtype: torch.dtype, shape: str) -> None:
    with collected() as attempt:
        for mask in drawn((None, "causal") if FORMS[shape].n.S > 1000 else (None, "causal", "window 3 2", "segments")):
            case = replace(FORMS[shape], dtype=dtype, mask=mask)
            with threads(1):
                one = of_case(backend, case)
            for count in THREADS[1:]:
                with threads(count):
                    attempt(f"{mask}, {count} threads", same, of_case(backend, case), one)


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("shape", [name for name, case in FORMS.items() if case.n.B > 1 and not case.dropout])
def test_a_row_of_the_batch_alone(backend: str, dtype: torch.dtype, shape: str) -> None:
    """Also where the rows differ in length. What all rows share, a bias or sinks, is a sum over them: left out."""
    shared = FORMS[shape]
    with collected() as attempt:
        for lengths in (False, True):
            case = replace(shared, dtype=dtype, bias=None, slopes=None)
            leaves, (grad_out, grad_lse) = case.leaves(), case.upstream()
            stop = torch.arange(case.n.S, case.n.S - 2 * case.n.B, -2)
            pick = lambda b: headwise.causal() & headwise.lengths(stop[b])  # noqa: B023, E731
            change = {"mask": pick(slice(None))} if lengths else {}
            its = grad_lse if case.lse else None
            whole = gradients(backend, case, leaves, grad_out, its, **change)
            for b in range(case.n.B):
                row = slice(b, b + 1)
                change = {"mask": pick(row)} if lengths else {}
                part = {name: x if name == "sinks" else x[row] for name, x in leaves.items()}
                alone = replace(case, n=case.n._replace(B=1))
                ours = gradients(backend, alone, part, grad_out[row], None if its is None else its[row], **change)
                for name in ("query", "key", "value"):
                    attempt(f"lengths {lengths}, row {b}", assert_same_bits, ours[name], whole[name][row])


@pytest.mark.sweep
@native_dtypes
@forms
def test_a_group_of_heads_alone(backend: str, dtype: torch.dtype, shape: str) -> None:
    case = replace(FORMS[shape], dtype=dtype, mask="causal", bias=None, slopes=None, dropout=0.0)
    leaves, (grad_out, grad_lse) = case.leaves(), case.upstream()
    whole, G = gradients(backend, case, leaves, grad_out, grad_lse), case.n.H // case.n.K
    alone = replace(case, n=case.n._replace(H=G, K=1))
    with collected() as attempt:
        for g in range(case.n.K):
            heads, key = slice(g * G, (g + 1) * G), slice(g, g + 1)
            part = {"query": leaves["query"][:, heads], "key": leaves["key"][:, key], "value": leaves["value"][:, key]}
            if "sinks" in leaves:
                part["sinks"] = leaves["sinks"][heads]
            ours = gradients(backend, alone, part, grad_out[:, heads], grad_lse[:, heads])
            for name, its in (("query", heads), ("key", key), ("value", key)):
                attempt(f"group {g}, {name}", assert_same_bits, ours[name], whole[name][:, its])
            if "sinks" in leaves:
                attempt(f"group {g}, sinks", assert_same_bits, ours["sinks"], whole["sinks"][heads])


@native_dtypes
def test_a_thousand_times(backend: str, dtype: torch.dtype) -> None:
    small = Case(Sizes(1, 4, 2, 7, 31, 11, 13), dtype, "causal", sinks=True, bias=(7, 31), dropout=0.25)
    chunks = Case(Sizes(1, 4, 1, 700, 67, 16, 16), dtype, "causal", sinks=True, bias=(67,), dropout=0.25)
    with threads(2):
        for case, times in ((small, 1000), (chunks, 30)):
            leaves, (grad_out, _) = case.leaves(), case.upstream()
            first = gradients(backend, case, leaves, grad_out)
            for _ in drawn(range(times)):
                again = gradients(backend, case, leaves, grad_out)
                assert all(torch.equal(again[name], first[name]) for name in first)


@best_of_natives
def test_two_python_threads_at_once(backend: str) -> None:
    """Each with its own shapes, so that shared scratch would be seen."""
    cases = [replace(case, mask="causal", dropout=0.0) for case in FORMS.values()]  # dropout's seed is the process's
    wanted = [of_case(backend, case) for case in cases]

    def work(seed: int) -> int:
        for step in range(12):
            at = (seed + step * (1 + seed % 2)) % len(cases)
            # the instruction set is the process's: it stays as it is while the threads run
            same(of_case("native", cases[at]), wanted[at])
        return 12

    with instructions(backend):
        for count in (1, 2):
            with threads(count), ThreadPoolExecutor(3) as pool:
                assert sum(pool.map(work, range(3), timeout=120)) == 36


@native_dtypes
def test_where_the_data_lie(backend: str, dtype: torch.dtype) -> None:
    """Alignment changes no bit: the same tensors at every offset of a vector."""
    case = Case(Sizes(1, 4, 2, 23, 67, 40, 24), dtype, "causal")
    leaves, (grad_out, _) = case.leaves(), case.upstream()
    plain = gradients(backend, case, leaves, grad_out)
    with collected() as attempt:
        for offset in range(1, 33):
            moved = [
                torch.empty(x.numel() + offset, dtype=dtype)[offset:].view(x.shape).copy_(x)
                for x in (*leaves.values(), grad_out)
            ]
            ours = gradients(backend, case, dict(zip(leaves, moved[:3], strict=True)), moved[3])
            attempt(f"offset {offset}", same, ours, plain)


# -- memory ------------------------------------------------------------------------------------------------------------

MEMORY = """
import pathlib, re, resource, sys
import torch, headwise
from headwise.testing import make_qkv
N, what = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
status = pathlib.Path("/proc/self/status")  # ru_maxrss begins with the peak of the process that started this
def peak():
    if status.exists():
        return int(re.search(r"VmHWM:\\s*(\\d+)", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def train(N):
    q, k, v = make_qkv(1, 2, 1, N, N, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    mask = headwise.causal()
    if what == "biases":
        learned = [torch.zeros(shape, requires_grad=True) for shape in ((N,), (N, 1), (2, 1, 1), (2,))]
        for x in learned[:3]:
            mask = mask & headwise.bias(x)
        mask = mask & headwise.alibi(learned[3])
    dropout = 0.1 if what == "dropout" else 0.0
    headwise.attention(q, k, v, mask=mask, dropout=dropout, backend="native").sum().backward()
train(64)
before = peak()
if what == "a matrix":
    torch.ones(N, N, dtype=torch.bool)
else:
    train(N)
print(peak() - before)
"""
LENGTH = 16_384


def used(what: str) -> int:
    """Bytes by which the peak of a process of its own grows in a training step."""
    ran = fresh.run(MEMORY, str(LENGTH), what, OMP_NUM_THREADS="1")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("backend", BEST)
@pytest.mark.parametrize("what", ["biases", "dropout"])
def test_nothing_is_as_large_as_the_scores(backend: str, what: str) -> None:
    """A mask of one byte a score would be 256 MiB here, one of bits 32 MiB."""
    assert used(what) < LENGTH * LENGTH // 16


def test_the_memory_test_can_fail() -> None:
    if BEST:
        assert used("a matrix") > LENGTH * LENGTH // 16, "what the others may use"


def test_a_change_of_one_bit_is_seen() -> None:
    case = FORMS["tiny"]
    ours, theirs = of_case("blocks", case), of_case("blocks", case)
    theirs["key"] = theirs["key"].clone(memory_format=torch.contiguous_format)
    theirs["key"].view(torch.int32)[0, 0, 0, 0] ^= 1
    with pytest.raises(AssertionError, match="gradient of key: 1 of"):
        same(ours, theirs)
