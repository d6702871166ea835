"""What may not be attended changes no bit; what may be attended is honest: a NaN there shows.

Forward in every mask, layout and place; and drawn calls, forward and backward, with every leaf that a call can have.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from backends import BEST, MUST, NATIVE, attend, quick
from draw import drawn, slow_except
from drawn_cases import POISONS as DRAWN_POISONS
from drawn_cases import Learning, spoil, squeezed
from loops import inside
from mask_cases import LONG, MASKS, SHORT, SIZES, Sizes, dense
from test_meaning import options_of
from torch import Tensor

import headwise
from headwise.testing import POISONS, STRIDES, assert_same_bits, make_qkv, poison, strided

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

each = pytest.mark.parametrize("backend", ["reference", "blocks", "sdpa", *NATIVE])  # auto is one of these
each_poison = pytest.mark.parametrize("what", POISONS, ids=["NaN", "Inf", "-Inf", "1e30"])
# NaN everywhere; the other poisons each at one shape
SIZED_POISONS = [(n, what) for n, other in zip(SIZES, POISONS[1:], strict=True) for what in (math.nan, other)]


def split_rows(sees: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(rows that may attend one of the keys, rows that may attend anything), both (B, H, T); keys is (B, K, S)."""
    group = sees.shape[1] // keys.shape[1]
    return (sees & keys.repeat_interleave(group, 1)[:, :, None]).any(-1), sees.any(-1)


def compare(ours: Any, clean: Any, spoiled: Tensor, what: float) -> None:
    """Rows that do not meet the poison keep every bit; the others show NaN (or, for 1e30, at least are not hidden)."""
    for x, y in zip(ours, clean, strict=True):
        assert_same_bits(x[~spoiled], y[~spoiled])
        if what != 1e30:
            assert bool(x[spoiled].isnan().all()), "a NaN or Inf that is attended does not show"


@pytest.mark.sweep
@pytest.mark.parametrize("mask", MASKS)
@each
def test_poisoned_keys_and_values(backend: str, mask: str) -> None:
    """Poison a third of all keys and values: rows that may attend none of those must not notice."""
    for n, other in drawn([*zip(SIZES, POISONS[1:], strict=True)], mask):
        check_poisoned_keys_and_values(backend, mask, n, (math.nan, other))


def check_poisoned_keys_and_values(backend: str, mask: str, n: Sizes, poisons: tuple[float, ...]) -> None:
    q, k, v = make_qkv(*n)
    made, (sees, _) = MASKS[mask](n).mask, dense(mask, n)
    source = torch.Generator().manual_seed(len(mask))
    third = torch.rand(n.B, n.K, n.S, generator=source) < 0.3
    for options in ({}, {"return_lse": True, **options_of("everything", n)})[: 1 if backend == "sdpa" else 2]:
        outs = lambda *qkv, arguments=options: both(attend(backend, *qkv, mask=made, **arguments))  # noqa: E731
        clean = outs(q, k, v)
        for what, poisoned in itertools.product(poisons, (third, _unseen(sees, n.K))):
            met, _ = split_rows(sees, poisoned)
            compare(outs(q, poison(k, poisoned[..., None], what), v), clean, met, what)
            compare(outs(q, k, poison(v, poisoned[..., None], what)), clean, met, what)


def both(outs: Any) -> tuple[Tensor, ...]:
    """The output, and the lse where it was asked for."""
    return outs if isinstance(outs, tuple) else (outs,)


def _unseen(sees: Tensor, K: int) -> Tensor:
    """The keys that no query of the group may attend: beyond the lengths, in the future of all, masked for all."""
    return ~sees.unflatten(1, (K, -1)).any(2).any(2)


def test_the_masks_leave_keys_unseen() -> None:
    """Else the second half of the test above tests nothing."""
    unseen = {mask for mask in MASKS for n in SIZES if _unseen(dense(mask, n)[0], n.K).any()}
    assert len(unseen) >= 19


@quick
@each_poison
@inside("mask", ["causal", "lengths", "keep BHTS", "bias BHTS", "all kinds"])
def test_poisoned_queries(backend: str, mask: str, what: float) -> None:
    """A bad query row spoils itself alone; one that may attend nothing stays 0."""
    n = LONG
    q, k, v = make_qkv(*n)
    made, (sees, _) = MASKS[mask](n).mask, dense(mask, n)
    rows = torch.rand(n.B, n.H, n.T, generator=torch.Generator().manual_seed(1)) < 0.4
    bad = poison(q, rows[..., None], what)
    spoiled = rows & sees.any(-1)
    compare([attend(backend, bad, k, v, mask=made)], [attend(backend, q, k, v, mask=made)], spoiled, what)
    for x in (attend(backend, bad, k, v, mask=made), headwise.weights(bad, k, mask=made)):
        assert bool((x[~sees.any(-1)] == 0).all())


@each_poison
@quick
def test_poisoned_biases(backend: str, what: float) -> None:
    """A bias that is NaN where another rule forbids is never met; where nothing forbids it, it shows."""
    n = SHORT
    qkv = make_qkv(*n)
    seen = torch.rand(n.T, n.S, generator=torch.Generator().manual_seed(2)) > 0.4
    forbids = headwise.bias(torch.zeros(n.T, n.S).masked_fill(~seen, -math.inf))
    clean = torch.randn(n.T, n.S, generator=torch.Generator().manual_seed(3))
    for rule in (headwise.keep(seen), forbids):
        expected = attend(backend, *qkv, mask=rule & headwise.bias(clean))
        assert_same_bits(attend(backend, *qkv, mask=rule & headwise.bias(poison(clean, ~seen, what))), expected)
        assert_same_bits(attend(backend, *qkv, mask=headwise.bias(poison(clean, ~seen, what)) & rule), expected)
    if math.isnan(what):
        shown = attend(backend, *qkv, mask=headwise.bias(poison(clean, seen, what)))
        assert bool(shown[:, :, seen.any(-1)].isnan().all())


@quick
@inside("what", [math.nan, math.inf])
@inside("case", ["one key", "every key", "every value", "everything", "one of many", "a query"])
def test_nan_that_is_attended_shows(backend: str, case: str, what: float) -> None:
    """Also where a whole row is NaN, which torch's fused kernel takes for an empty row and answers with 0."""
    q, k, v = make_qkv(1, 4, 2, 3, 1 if case == "one key" else 67, 8, 5)
    if case in ("every key", "everything", "one key"):
        k = torch.full_like(k, what)
    if case in ("every value", "everything"):
        v = torch.full_like(v, what)
    if case == "one of many":
        v[:, :, 66, 4] = what
    if case == "a query":
        q[:, :, 1] = what
    for mask in (None, headwise.causal(offset=66), headwise.keep(torch.ones(k.shape[2], dtype=torch.bool))):
        out = attend(backend, q, k, v, mask=mask)
        if case == "a query":
            assert bool(out[:, :, 1].isnan().all()) and bool(out[:, :, [0, 2]].isfinite().all())
        elif case == "one of many":
            assert bool(out[..., 4].isnan().all())
        else:
            assert bool(out.isnan().all())


@pytest.mark.parametrize("backend", [*MUST, *BEST])
@pytest.mark.parametrize("which", ["sinks", "gate"])
def test_nan_in_sinks_and_gates_shows(backend: str, which: str) -> None:
    n = SHORT
    options = options_of(which, n)
    options[which][0] = math.nan  # head 0, or batch row 0
    out = attend(backend, *make_qkv(*n), **options)
    bad, good = (out[:, 0], out[:, 1:]) if which == "sinks" else (out[0], out[1:])
    assert bool(bad.isnan().all()) and bool(good.isfinite().all())


@each
@inside("pattern", STRIDES, sweep=True)
def test_gaps_between_and_around_rows(backend: str, pattern: str) -> None:
    """Thirty-three memory layouts: the answer is that of the contiguous copy, and what lies in the gaps is not read."""
    n = SHORT
    tensors = dict(zip(("query", "key", "value"), make_qkv(*n), strict=True))
    for name, x in tensors.items():
        results = [
            attend(backend, **{**tensors, name: strided(x, pattern, slack=slack)}, mask=headwise.causal())
            for slack in (0.0, math.nan, 1e30)
        ]
        assert_same_bits(results[1], results[0], what=f"{name}, NaN in the gaps")
        assert_same_bits(results[2], results[0], what=f"{name}, 1e30 in the gaps")
        same = attend(backend, **{**tensors, name: strided(x, pattern).contiguous()}, mask=headwise.causal())
        torch.testing.assert_close(results[1], same, rtol=2e-6, atol=1e-6)


@quick
@inside("pattern", STRIDES)
def test_layouts_of_mask_tensors(backend: str, pattern: str) -> None:
    n = SHORT
    qkv = make_qkv(*n)
    seen, added = dense("keep BHTS", n)[0], make_qkv(n.B, n.H, 1, n.T, 1, n.S, 1)[0]
    for make, x in ((headwise.keep, seen), (headwise.bias, added)):
        odd = strided(x, pattern)
        assert_same_bits(
            attend(backend, *qkv, mask=make(odd)), attend(backend, *qkv, mask=make(odd.contiguous())), what=pattern
        )


def test_there_are_thirty_layouts_and_they_differ() -> None:
    x = make_qkv(2, 3, 1, 5, 1, 7, 1)[0]
    laid = {(odd.stride(), odd.storage_offset()) for odd in (strided(x, pattern) for pattern in STRIDES)}
    assert len(laid) == len(STRIDES) >= 30
    for pattern in STRIDES:
        odd = strided(x, pattern)
        assert odd.shape == x.shape and not odd.isnan().any()
        if not pattern.startswith(("expanded", "overlapping")):
            assert_same_bits(odd, x)


@each_poison
def test_dropout_and_poison(what: float) -> None:
    """The same seed drops the same weights, whatever lies where nothing may look."""
    n = SHORT
    q, k, v = make_qkv(*n)
    made = headwise.lengths(torch.tensor([4, 5]))
    beyond = (torch.arange(n.S) >= torch.tensor([[4], [5]]))[:, None, :, None]
    for backend in (*MUST, *NATIVE):
        results = []
        for pair in ((k, v), (poison(k, beyond, what), v), (k, poison(v, beyond, what))):
            torch.manual_seed(4)
            results.append(attend(backend, q, *pair, mask=made, dropout=0.3))
        assert_same_bits(results[1], results[0])
        assert_same_bits(results[2], results[0])


# -- what is huge, not NaN -------------------------------------------------------------------------------------------

holding = pytest.mark.parametrize("backend", ["reference", "blocks", "sdpa", *NATIVE[:1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@holding
def test_huge_numbers_that_nobody_attends_beside_an_empty_row(backend: str, dtype: torch.dtype) -> None:
    """An empty row that is let in anywhere to be zeroed afterwards gives 0 times what it meets there."""
    n = Sizes(1, 7, 1, 9, 260, 11, 11)
    q, k, v = make_qkv(*n, dtype=dtype, scale=2.0)
    grad_out = make_qkv(*n, dtype=dtype, seed=1)[0]
    seen = torch.ones(n.T, n.S, dtype=torch.bool)
    seen[1], seen[:, 130:] = False, False

    def gradients(*qkv: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in qkv]
        return torch.autograd.grad(attend(backend, *leaves, mask=seen), leaves, grad_out)

    clean = gradients(q, k, v)
    row, keys = torch.arange(n.T)[:, None] == 1, torch.arange(n.S)[:, None] >= 130
    bad_q, bad_k, bad_v = poison(q, row, 1e30), poison(k, keys, 1e30), poison(v, keys, 1e30)
    for inputs in ((q, bad_k, bad_v), (bad_q, k, v), (bad_q, bad_k, v)):
        for x, y, name in zip(gradients(*inputs), clean, "qkv", strict=True):
            assert_same_bits(x, y, what=f"gradient of {name}")


@holding
def test_an_empty_row_beside_the_largest_values(backend: str) -> None:
    """Each row attends one key, but the first none: a sum of two such values would overflow, and no row makes it."""
    q, k, v = make_qkv(1, 2, 1, 3, 5, 4, 4)
    v = torch.full_like(v, torch.finfo(v.dtype).max)
    for mask in (headwise.window(1, offset=-1), headwise.window(1, offset=-1) & headwise.alibi(torch.ones(2))):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(backend, *leaves, mask=mask)
        assert bool((out[:, :, 0] == 0).all() and (out[:, :, 1:] == v[0, 0, 0, 0]).all())
        for grad in torch.autograd.grad(out, leaves, torch.full_like(out, 1e-9)):
            assert bool(grad.isfinite().all())


@pytest.mark.parametrize("backend", ["reference", "blocks", *NATIVE[:1]])
def test_a_softcap_and_a_key_whose_products_overflow(backend: str) -> None:
    """Inf minus Inf in a product is NaN, as is its tanh; the gradient of rows that may not attend the key is not."""
    q, k, v = make_qkv(1, 1, 1, 3, 5, 128, 4)
    bad = poison(k, torch.arange(5)[:, None] == 4, 3e38)
    results = []
    for key in (k, bad):
        leaves = [x.detach().requires_grad_() for x in (q, key, v)]
        out = attend(backend, *leaves, mask=headwise.causal(), scale=3.0, softcap=2.0)
        results.append([out, torch.autograd.grad(out[:, :, :2].sum(), leaves)[0]])
    for x, y in zip(*results, strict=True):
        assert_same_bits(x[:, :, :2], y[:, :, :2])


# -- drawn calls, forward and backward ---------------------------------------------------------------------------------

ROUNDS = 120
# Torch's kernels get 0 in place of what nobody may attend, and ours multiplies it: with more than float32 squared.
drawn_poisons = dict.fromkeys(("reference", "blocks", "sdpa"), (*DRAWN_POISONS, 3e38, 3e38))


@pytest.mark.parametrize(
    "backend", slow_except(("reference", "blocks", "sdpa", *NATIVE[:1], *NATIVE[-1:]), ("blocks", "sdpa", *NATIVE[:1]))
)
def test_drawn_calls_and_their_gradients(backend: str) -> None:
    """Poison in some of the places where nothing may look, of any kind: every result and gradient keeps every bit."""
    ran = 0
    for number in range(ROUNDS):
        case = Learning(number)
        bad, what = case.spoiled(number, drawn_poisons.get(backend, DRAWN_POISONS))
        with squeezed(number // 2):
            clean = case.run(backend, case.leaves)
            ours = case.run(backend, bad)
        if clean is None or ours is None:
            continue
        ran += 1
        alive = case.sees.any(-1)
        for name, x in clean.items():
            y = ours[name]
            if name == "out":  # in an empty row a gate shows what it holds
                x, y = x[alive], y[alive]
            assert_same_bits(y, x, what=f"case {number}, {case}: {name} with {', '.join(what)}")
    assert ran >= (ROUNDS // 3 if backend == "sdpa" else ROUNDS - 10)


@pytest.mark.parametrize("backend", slow_except(("reference", "blocks", "sdpa", *NATIVE[:1]), ("blocks", *NATIVE[:1])))
def test_drawn_calls_whose_poison_some_rows_meet(backend: str) -> None:
    """A row that does not keeps every bit of its output and of its query's gradient.

    And where the loss leaves out the rows that do, every gradient keeps every bit.
    """
    for number in range(ROUNDS // 2):
        case, clean = Learning(number), Learning(number).clean()
        what = case.draw.choice(drawn_poisons.get(backend, DRAWN_POISONS))
        what = 1e30 if backend == "sdpa" and what == 3e38 else what  # `fence` says why
        keys, rows = (case.random(*x.shape[:3]) < 0.15 for x in (clean["key"], clean["query"]))
        name = case.draw.choice(["key", "key", "value", "query"])
        met = rows & case.sees.any(-1) if name == "query" else split_rows(case.sees, keys)[0]
        bad = {**clean, name: spoil(clean[name], (rows if name == "query" else keys)[..., None], what)}
        label = f"case {number}, {case}, {what} in {name}"
        with squeezed(number // 2):
            before, after = case.run(backend, clean), case.run(backend, bad)
            if before is None or after is None:
                continue
            for x in {"out", "lse", "dquery"} & before.keys():
                assert_same_bits(after[x][~met], before[x][~met], what=f"{label}: {x}")
            if math.isfinite(what):  # the rows that meet it overflow, or their weights as the lse gives them back do
                continue
            up = {"from out": clean["from out"] * ~met[..., None], "from lse": clean["from lse"] * ~met}
            before, after = (case.run(backend, {**x, **up}) for x in (clean, bad))
            for x in [x for x in before if x[0] == "d" and x != "dgate"]:
                assert_same_bits(after[x], before[x], what=f"{label}: {x}, left out")


def test_the_drawn_calls_are_wide() -> None:
    cases = [Learning(number) for number in range(ROUNDS)]
    spoiled = [" ".join(case.spoiled(number, DRAWN_POISONS)[1]) for number, case in enumerate(cases)]
    for what in ("query", "key", "value", "from out", "from lse", "bias", "gate", "nan", "inf", "1e+30"):
        assert sum(what in x for x in spoiled) >= 8, f"{what}: {sum(what in x for x in spoiled)}"
    assert sum(case.n.T > 8 * case.n.S for case in cases) > 5 and sum(case.n.S > 8 * case.n.T for case in cases) > 5
    assert {case.dtype for case in cases} == {torch.float32, torch.bfloat16, torch.float16}


def test_the_traps_can_fail() -> None:
    """torch's own kernel, unfenced, leaks the NaN of a masked key; the comparison sees it."""
    q, k, v = make_qkv(1, 1, 1, 4, 5, 8, 8)
    seen = torch.arange(5) < 4
    bad = poison(v, ~seen[:, None])
    naive = [
        torch.nn.functional.scaled_dot_product_attention(q, k, x, attn_mask=seen[None, None, None]) for x in (v, bad)
    ]
    with pytest.raises(AssertionError, match="differ in their bits"):
        compare(naive[1:], naive[:1], torch.zeros(1, 1, 4, dtype=torch.bool), math.nan)
    with pytest.raises(AssertionError, match="does not show"):
        compare([torch.zeros(1, 1, 4, 8)], [torch.zeros(1, 1, 4, 8)], torch.ones(1, 1, 4, dtype=torch.bool), math.nan)
