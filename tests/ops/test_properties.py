"""Laws that hold for every input, on a few hundred drawn cases: no oracle needed, and backends against each other.

A case is drawn from its number alone, so a failure names the number and repeats.
"""

from __future__ import annotations

import math

import pytest
import torch
from backends import BEST, MUST, NATIVE, attend
from draw import slow_except
from drawn_cases import Drawn, Learning, squeezed
from torch import Tensor

import headwise
from headwise.cache import Quantized, quantize
from headwise.ops.native import library as native_library
from headwise.ops.storage.paged import PAGE, Paged
from headwise.testing import assert_close_like_torch, assert_same_bits, make_qkv, naive, oracle

BACKENDS = ("reference", "blocks", "sdpa")
numbers = pytest.mark.parametrize("number", range(60))
few = pytest.mark.parametrize("number", range(12))
backends = pytest.mark.parametrize("backend", [*BACKENDS, *BEST])


@pytest.mark.sweep
@numbers
def test_every_backend_is_the_definition(number: int) -> None:
    case = Drawn(number)
    exact, exact_lse = oracle(*case.qkv, mask=case.dense(), **case.options)
    rough = naive(*case.qkv, mask=case.dense(), **case.options)
    for backend in (*BACKENDS, *NATIVE):
        with squeezed(number):
            out = attend(backend, *case.qkv, mask=case.mask, **case.options)
        if out is not None:
            assert_close_like_torch(out, exact, rough, values=case.qkv[2], what=f"{backend}, {case}")
    _, lse = headwise.attention(*case.qkv, mask=case.mask, **case.options, return_lse=True)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_the_draw_is_wide() -> None:
    cases = [Drawn(number) for number in range(60)]
    assert len({name for case in cases for name in case.names}) > 25
    assert {case.n.T > case.n.S for case in cases} == {True, False}
    assert {case.n.T > 8 * case.n.S for case in cases} == {case.n.S > 8 * case.n.T for case in cases} == {True, False}
    refused = sum(attend("sdpa", *case.qkv, mask=case.mask, **case.options) is None for case in cases)
    assert 10 < refused < 45


@few
@backends
def test_out_lies_among_the_values(backend: str, number: int) -> None:
    """Weights are not negative and sum to 1: no output leaves the span of the values it may attend (and 0)."""
    case = Drawn(number)
    out = attend(backend, *case.qkv, mask=case.mask, **case.options)
    if out is None:
        return
    v = case.qkv[2].repeat_interleave(case.n.H // case.n.K, 1)
    low, high = v.amin(2, keepdim=True).clamp(max=0), v.amax(2, keepdim=True).clamp(min=0)
    slack = 1e-5 * v.abs().max()
    assert bool((out >= low - slack).all() and (out <= high + slack).all())


@few
@backends
def test_out_is_linear_in_the_values(backend: str, number: int) -> None:
    case = Drawn(number)
    q, k, v = case.qkv
    w = make_qkv(*case.n, seed=number + 1000)[2]
    f = lambda x: attend(backend, q, k, x, mask=case.mask, **case.options)  # noqa: E731
    if f(v) is not None:
        torch.testing.assert_close(f(2 * v - w), 2 * f(v) - f(w), rtol=1e-4, atol=1e-5)


@few
@backends
def test_the_order_of_keys_does_not_matter(backend: str, number: int) -> None:
    """With their mask columns permuted alike."""
    case = Drawn(number)
    q, k, v = case.qkv
    order = torch.randperm(case.n.S, generator=torch.Generator().manual_seed(number))
    dense = None if case.mask is None else case.mask.dense(case.n.T, case.n.S)
    moved = None if dense is None else dense.expand(-1, -1, case.n.T, case.n.S)[..., order]
    out = attend(backend, q, k, v, mask=case.mask, **case.options)
    if out is not None:
        again = attend(backend, q, k[:, :, order], v[:, :, order], mask=moved, **case.options)
        torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-5)


@few
@backends
def test_rows_and_groups_are_independent(backend: str, number: int) -> None:
    """Queries alone, groups of heads alone: each gives what it gave among the others."""
    case = Drawn(number)
    (q, k, v), n = case.qkv, case.n
    dense = None if case.mask is None else case.mask.dense(n.T, n.S).expand(n.B, n.H, n.T, n.S)
    out = attend(backend, q, k, v, mask=case.mask, **case.options)
    if out is None:
        return
    i, g = case.random.randrange(n.T), case.random.randrange(n.K)
    row = attend(
        backend, q[:, :, i : i + 1], k, v, mask=None if dense is None else dense[:, :, i : i + 1], **case.options
    )
    torch.testing.assert_close(row, out[:, :, i : i + 1], rtol=1e-5, atol=1e-5)
    heads = slice(g * n.H // n.K, (g + 1) * n.H // n.K)
    options = {name: x[heads] if name == "sinks" else x for name, x in case.options.items()}
    group = attend(
        backend,
        q[:, heads],
        k[:, g : g + 1],
        v[:, g : g + 1],
        mask=None if dense is None else dense[:, heads],
        **options,
    )
    torch.testing.assert_close(group, out[:, heads], rtol=1e-5, atol=1e-5)


@few
@backends
def test_grouped_heads_are_repeated_heads(backend: str, number: int) -> None:
    case = Drawn(number)
    q, k, v = case.qkv
    G = case.n.H // case.n.K
    out = attend(backend, q, k, v, mask=case.mask, **case.options)
    if out is not None:
        repeated = (x.repeat_interleave(G, 1) for x in (k, v))
        torch.testing.assert_close(
            attend(backend, q, *repeated, mask=case.mask, **case.options), out, rtol=1e-5, atol=1e-5
        )


@few
def test_two_halves_of_the_keys_merge_by_their_lse(number: int) -> None:
    """out = sum of exp(lse_part - lse) * out_part: how split and cached attention is put together."""
    case = Drawn(number)
    case.options.pop("sinks", None)
    (q, k, v), n = case.qkv, case.n
    dense = torch.ones(n.T, n.S, dtype=torch.bool) if case.mask is None else case.mask.dense(n.T, n.S)
    out, lse = headwise.attention(q, k, v, mask=case.mask, return_lse=True, **case.options)
    cut = case.random.randrange(1, n.S)
    merged = torch.zeros_like(out)
    total = torch.full_like(lse, -math.inf)
    for part in (slice(0, cut), slice(cut, n.S)):
        one, its = headwise.attention(
            q, k[:, :, part], v[:, :, part], mask=dense[..., part], return_lse=True, **case.options
        )
        merged = merged + one * torch.exp(its - lse).nan_to_num(0.0)[..., None]
        total = torch.logaddexp(total, its)
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, lse, rtol=1e-5, atol=1e-5)


@few
def test_a_sink_is_a_key_without_a_value(number: int) -> None:
    """Score given, value 0: the same out and the same lse, in every row that may attend something."""
    case = Drawn(number)
    case.options = {}
    (q, k, v), n = case.qkv, case.n
    sinks = torch.randn(n.H, generator=torch.Generator().manual_seed(number))
    dense = None if case.mask is None else case.mask.dense(n.T, n.S).expand(n.B, n.H, n.T, n.S)
    added = (
        torch.zeros(n.B, n.H, n.T, n.S)
        if dense is None
        else dense.float().log()
        if dense.dtype == torch.bool
        else dense
    )
    alive = (added != -math.inf).any(-1)
    out, lse = headwise.attention(q, k, v, mask=case.mask, sinks=sinks, return_lse=True)
    longer = torch.cat([added, sinks.view(1, -1, 1, 1).expand(n.B, n.H, n.T, 1)], -1)
    empty = lambda x: torch.cat([x, torch.zeros_like(x[:, :, :1])], 2)  # noqa: E731
    again, its = headwise.attention(q, empty(k), empty(v), mask=longer, return_lse=True)
    torch.testing.assert_close(again[alive], out[alive], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(its[alive], lse[alive], rtol=1e-5, atol=1e-5)
    gone = headwise.attention(q, k, v, mask=case.mask, sinks=torch.full((n.H,), -math.inf))
    torch.testing.assert_close(gone, headwise.attention(q, k, v, mask=case.mask), rtol=1e-5, atol=1e-5)


@few
@backends
def test_a_constant_added_to_a_row_changes_nothing(backend: str, number: int) -> None:
    case = Drawn(number)
    case.options.pop("sinks", None)
    n = case.n
    constant = headwise.bias(10 * torch.randn(n.B, n.H, n.T, 1, generator=torch.Generator().manual_seed(number)))
    out = attend(backend, *case.qkv, mask=case.mask, **case.options)
    if out is not None:
        moved = constant if case.mask is None else case.mask & constant
        torch.testing.assert_close(attend(backend, *case.qkv, mask=moved, **case.options), out, rtol=1e-4, atol=1e-5)


@few
@backends
def test_a_gate_multiplies(backend: str, number: int) -> None:
    """In each of its four forms; zero gates a head away, gradient and all."""
    case = Drawn(number)
    n = case.n
    source = torch.Generator().manual_seed(number)
    out = attend(backend, *case.qkv, mask=case.mask, **case.options)
    if out is None:
        return
    for shape in ((n.H,), (n.B, n.H), (n.B, n.H, n.T), (n.B, n.H, n.T, n.V)):
        gate = torch.randn(shape, generator=source)
        full = gate.view(1, n.H, 1, 1) if len(shape) == 1 else gate.view(shape + (1,) * (4 - len(shape)))
        ours = attend(backend, *case.qkv, mask=case.mask, gate=gate, **case.options)
        torch.testing.assert_close(ours, out * full, rtol=1e-6, atol=1e-7)


@few
@backends
def test_structure_and_its_dense_matrix_mean_the_same(backend: str, number: int) -> None:
    case = Drawn(number)
    if case.mask is None:
        return
    out = attend(backend, *case.qkv, mask=case.mask, **case.options)
    if out is not None:
        dense = case.mask.dense(case.n.T, case.n.S)
        again = attend(backend, *case.qkv, mask=dense, **case.options)
        torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-6)


# -- what learns, and in which precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", slow_except((*MUST, "sdpa", *BEST), ("auto", "blocks")))
def test_what_learns_alone_gets_the_gradient_that_it_gets_among_all(backend: str) -> None:
    """Any of the leaves, one or some of them: the same bits, and nothing for the others."""
    alone = set()
    for number in range(60):
        case = Learning(number)
        names = sorted(case.leaves)
        picks = [[case.draw.choice(names)], case.draw.sample(names, case.draw.randint(1, len(names)))]
        with squeezed(number // 2):
            every = case.run(backend, case.leaves)
            for pick in picks if every else ():
                alone |= set(pick) if len(pick) == 1 else set()
                for name, x in (case.run(backend, case.leaves, tuple(pick)) or {}).items():
                    assert_same_bits(x, every[name], what=f"case {number}, {case}: {name} where {pick} learn")  # type: ignore[index]
    assert alone == {"query", "key", "value", "gate"} | (set() if backend == "sdpa" else {"sinks", "bias", "slopes"})


@pytest.mark.parametrize("backend", slow_except((*MUST, "sdpa", *BEST), ("auto", "blocks")))
def test_autocast_lowers_the_inputs_and_nothing_within(backend: str) -> None:
    """The bits of the call outside of autocast on inputs of its precision: output, lse in float32, gradients."""
    for number in range(60):
        case = Learning(number)
        wide = {name: x.float() for name, x in case.leaves.items()}
        low = {name: x.bfloat16() if name in ("query", "key", "value") else x for name, x in wide.items()}
        case.upstream["out"] = case.upstream["out"].bfloat16()
        with squeezed(number // 2):
            outside, inside = case.run(backend, low), case.run(backend, wide, autocast=True)
        for name, x in (inside or {}).items():
            y = outside[name]  # type: ignore[index]
            assert x.dtype == (torch.bfloat16 if name == "out" else torch.float32)
            assert_same_bits(x, y.to(x.dtype), what=f"case {number}, {case}: {name}")


@few
def test_autocast_leaves_scores_and_statistics_alone(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are float32 by promise, and compute in it."""
    case = Drawn(number)
    (q, k, v), options = case.qkv, {"mask": case.mask, **case.options}

    def numbers() -> list[Tensor]:
        result, rows = headwise.statistics(q, k, **options), headwise.attention_statistics(q, k, v, **options)[1]
        fields = [x for one in (result, rows) for x in vars(one).values() if isinstance(x, Tensor)]
        return [headwise.weights(q, k, **options), *headwise.top_keys(q, k, 3, **options), *fields]

    for trouble in (native_library.error_for(), "the library is not there"):
        monkeypatch.setattr(native_library, "_trouble", trouble)
        outside = numbers()
        with torch.autocast("cpu", torch.bfloat16):
            inside = numbers()
        for x, y in zip(inside, outside, strict=True):
            assert_same_bits(x, y)


# -- keys and values that lie otherwise --------------------------------------------------------------------------------


def in_pages(x: Tensor, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """(pages, table) of (B, K, S, ...): pages in no order, NaN in the one that no row has and behind the last key."""
    B, S = x.shape[0], x.shape[2]
    count = -(-S // PAGE)
    table = torch.randperm(B * count + 1, generator=source)[: B * count].view(B, count)
    pages = x.new_full((B * count + 1, x.shape[1], PAGE, *x.shape[3:]), math.nan if x.is_floating_point() else 99)
    for b in range(B):
        for n in range(count):
            part = x[b, :, n * PAGE : (n + 1) * PAGE]
            pages[table[b, n], :, : part.shape[1]] = part
    return pages, table


def in_int8_pages(x: Quantized, source: torch.Generator) -> tuple[Quantized, Tensor]:
    """The same of data and scales."""
    state = source.get_state()
    data, table = in_pages(x.data, source)
    return Quantized(data, in_pages(x.scale, source.set_state(state))[0]), table


@few
@pytest.mark.parametrize("backend", [*MUST, "sdpa", *BEST])
def test_where_keys_and_values_lie_does_not_matter(backend: str, number: int) -> None:
    """In int8, in pages, in both: what the same numbers in one piece give, to the bit where a backend gathers them."""
    case = Drawn(number)
    q, k, v = case.qkv
    bytes_of = quantize(k), quantize(v)
    numbers = [x.dequantize() for x in bytes_of]
    source = torch.Generator()
    laid = {"int8": (bytes_of, numbers)}
    for name, make, pair, plain in (
        ("pages", in_pages, (k, v), (k, v)),
        ("int8 pages", in_int8_pages, bytes_of, numbers),
    ):
        stores, tables = zip(*(make(x, source.manual_seed(number)) for x in pair), strict=True)
        laid[name] = [Paged(x, tables[0], case.n.S) for x in stores], plain
    for name, (pair, plain) in laid.items():
        exact = attend(backend, q, *plain, mask=case.mask, **case.options)
        if exact is None:
            continue
        ours = attend(backend, q, *pair, mask=case.mask, **case.options)
        if backend not in ("auto", *BEST):
            assert_same_bits(ours, exact, what=f"{name}, {case}")
        else:
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
