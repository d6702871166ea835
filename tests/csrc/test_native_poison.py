"""What may not be attended changes no bit of the native kernel's answer, and what may be attended shows.

Poison is NaN, the infinities, 1e4 and 1e30: in keys and values that some rows or all rows may not attend, in query
rows, in biases where another rule forbids, in the memory around and between. Forms: decoding, a chunk, many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from backends import attend
from draw import drawn
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from test_interference import split_rows
from torch import Tensor

import headwise
from headwise import Mask
from headwise.testing import assert_same_bits, make_qkv, poison, strided

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

POISONS = (math.nan, math.inf, -math.inf, 1e4, 1e30)
FORMS = {
    "decoding": Sizes(2, 4, 2, 1, 131, 24, 17),
    "decoding, split": Sizes(2, 2, 1, 1, 1100, 16, 16),
    "a few rows": Sizes(2, 2, 2, 3, 131, 13, 11),
    "a chunk": Sizes(2, 4, 2, 9, 131, 24, 17),
    "many rows": Sizes(2, 4, 2, 67, 131, 24, 17),
}
forms = pytest.mark.parametrize("n", FORMS.values(), ids=FORMS)
Made = tuple[Mask, Tensor]


def source(n: Sizes) -> torch.Generator:
    return torch.Generator().manual_seed(sum(n))


def dense(n: Sizes) -> Tensor:
    """Random, and the keys from 90 to 99 are seen by nobody, nor is anything by row 0 of batch row 0."""
    kept = torch.rand(n.B, n.H, n.T, n.S, generator=source(n)) > 0.4
    kept[..., 90:100] = False
    kept[0, :, 0] = False
    return kept


MASKS: dict[str, Callable[[Sizes], Mask]] = {
    "causal": lambda n: headwise.causal(offset=n.S - n.T - 20),
    "window": lambda n: headwise.window(17, 2, offset=n.S // 2),
    "window (B,)": lambda n: headwise.window(17, 2, offset=torch.tensor([n.S // 2, -20])[: n.B]),
    "lengths": lambda n: headwise.lengths(torch.tensor([n.S - 30, 0])[: n.B]),
    "lengths start": lambda n: headwise.lengths(torch.tensor([n.S - 30, n.S]), torch.tensor([3, 65])),
    "segments": lambda n: headwise.segments(torch.arange(n.T) // 40, torch.arange(n.S) // 40),
    "keep": lambda n: headwise.keep(dense(n)),
    "keep row": lambda n: headwise.keep(dense(n)[:, :1, -1:]),
    "bias": lambda n: headwise.bias(torch.zeros(dense(n).shape).masked_fill(~dense(n), -math.inf)),
    "all": lambda n: MASKS["keep"](n) & MASKS["bias"](n) & MASKS["segments"](n) & MASKS["causal"](n),
}


@cache
def made(name: str, n: Sizes) -> Made:
    """The mask and what it lets each row attend, (B, H, T, S)."""
    mask = MASKS[name](n)
    allowed = mask.allowed(n.T, n.S)
    assert allowed is not None
    return mask, allowed.expand(n.B, n.H, n.T, n.S)


def with_poison(backend: str, n: Sizes, name: str, dtype: torch.dtype, keys: Tensor, *, unseen: bool) -> None:
    """Poison these keys (B, K, S) in key, value or both: rows that see none keep every bit, others show NaN."""
    mask, sees = made(name, n)
    q, k, v = make_qkv(*n, dtype=dtype)
    where, zero = keys[..., None], torch.zeros((), dtype=dtype)
    met, _ = split_rows(sees, keys)
    assert not unseen or not met.any()

    def call(key: Tensor, value: Tensor) -> Any:
        return attend(backend, q, key, value, mask=mask, return_lse=True)

    clean = call(k.where(~where, zero), v.where(~where, zero)) if unseen else call(k, v)
    for what in POISONS:
        bad_k, bad_v = poison(k, where, what), poison(v, where, what)
        for part, pair in (("key", (bad_k, v)), ("value", (k, bad_v)), ("both", (bad_k, bad_v))):
            out, lse = call(*pair)
            for x, y in ((out, clean[0]), (lse, clean[1])):
                assert_same_bits(x[~met], y[~met], what=f"{what} in {part}")
                if not math.isfinite(what):
                    assert bool(x[met].isnan().all()), f"{what} in {part} is attended and does not show"


@pytest.mark.sweep
@native_dtypes
@forms
def test_keys_and_values_that_no_row_attends(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Beyond all lengths, in everyone's future, in other documents: the bits of the run with zeros there."""
    with collected() as attempt:
        for name in drawn([*MASKS]):
            sees = made(name, n)[1]
            unseen = ~sees.unflatten(1, (n.K, -1)).any(2).any(2)
            if unseen.any():
                attempt(name, with_poison, backend, n, name, dtype, unseen, unseen=True)


def test_the_masks_leave_keys_unseen() -> None:
    for n in FORMS.values():
        unseen = [name for name in MASKS if (~made(name, n)[1].unflatten(1, (n.K, -1)).any(2).any(2)).any()]
        assert len(unseen) >= 7, unseen
        assert sum(not bool(made(name, n)[1].any(-1).all()) for name in MASKS) >= 3, "rows that see nothing"


@pytest.mark.sweep
@native_dtypes
@forms
def test_keys_and_values_that_some_rows_attend(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    keys = torch.rand(n.B, n.K, n.S, generator=source(n)) < 0.03
    one = torch.zeros_like(keys)
    one[:, :, 70] = True
    with collected() as attempt:
        for name in drawn([*MASKS]):
            attempt(f"{name}, some keys", with_poison, backend, n, name, dtype, keys, unseen=False)
            attempt(f"{name}, key 70", with_poison, backend, n, name, dtype, one, unseen=False)


@pytest.mark.sweep
@native_dtypes
@forms
def test_one_entry_is_enough(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """NaN in a single entry of a key, a value or a query: the whole row shows it, with its lse; no other row does."""
    mask, sees = made("causal", n)
    clean = attend(backend, *make_qkv(*n, dtype=dtype), mask=mask, return_lse=True)
    with collected() as attempt:
        for what in POISONS[:3]:
            for index, entry in ((0, n.D - 1), (1, 0), (1, n.D - 1), (2, 0), (2, n.V - 1)):
                qkv = make_qkv(*n, dtype=dtype)
                place = n.T - 1 if index == 0 else 70
                qkv[index][0, 0, place, entry] = what
                bad = torch.zeros(n.B, n.H, n.T, dtype=torch.bool)
                if index == 0:
                    bad[0, 0, place] = True
                else:
                    bad[0, : n.H // n.K] = sees[0, : n.H // n.K, :, place]
                ours = attend(backend, *qkv, mask=mask, return_lse=True)
                for x, y in zip(ours, clean, strict=True):
                    attempt(f"{what} in tensor {index}", assert_same_bits, x[~bad], y[~bad])
                    attempt(f"{what} in tensor {index} shows", _is_nan, x[bad])


def _is_nan(x: Tensor) -> None:
    assert bool(x.isnan().all()), f"{int((~x.isnan()).sum())} of {x.numel()} entries are no NaN"


@pytest.mark.sweep
@native_dtypes
@pytest.mark.parametrize("where", ["key", "value"])
def test_each_key_on_the_diagonal(backend: str, dtype: torch.dtype, where: str) -> None:
    """A vector of rows leaves out the keys that none of them attends; the rows that attend one must see it."""
    n = Sizes(1, 1, 1, 59, 59, 16, 16)
    q, k, v = make_qkv(*n, dtype=dtype)
    clean = attend(backend, q, k, v, mask=headwise.causal(), return_lse=True)
    with collected() as attempt:
        for place in range(n.S):
            for what in POISONS[:2]:
                bad_k, bad_v = k.clone(), v.clone()
                (bad_k if where == "key" else bad_v)[0, 0, place, 3] = what
                ours = attend(backend, q, bad_k, bad_v, mask=headwise.causal(), return_lse=True)
                for x, y in zip(ours, clean, strict=True):
                    attempt(f"{what} at key {place}", assert_same_bits, x[:, :, :place], y[:, :, :place])
                    attempt(f"{what} at key {place} shows", _is_nan, x[:, :, place:])


@native_dtypes
def test_scores_of_minus_infinity_show(backend: str, dtype: torch.dtype) -> None:
    """All rows have the score -inf for one key: with the weight 0 it would leave no trace in the sums."""
    n = Sizes(1, 2, 2, 48, 131, 13, 11)
    q, k, v = make_qkv(*n, dtype=dtype)
    k[0, 0, 70, 3] = -math.inf
    out = attend(backend, q.abs(), k, v)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


@pytest.mark.sweep
@native_dtypes
@forms
def test_query_rows(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """A bad query row spoils itself alone; one that may attend nothing stays 0, its lse -inf."""
    rows = torch.rand(n.B, n.H, n.T, generator=source(n)) < 0.4
    rows[0, 0, 0] = True
    q, k, v = make_qkv(*n, dtype=dtype)
    with collected() as attempt:
        for name in drawn([*MASKS]):
            mask, sees = made(name, n)
            alive = sees.any(-1)
            clean = attend(backend, q, k, v, mask=mask, return_lse=True)
            for what in POISONS:
                ours = attend(backend, poison(q, rows[..., None], what), k, v, mask=mask, return_lse=True)
                for x, y in zip(ours, clean, strict=True):
                    attempt(f"{name}, {what}", assert_same_bits, x[~(rows & alive)], y[~(rows & alive)])
                    if not math.isfinite(what):
                        attempt(f"{name}, {what} shows", _is_nan, x[rows & alive])
                attempt(f"{name}, empty", _is_zero, ours, ~alive)


def _is_zero(ours: Any, empty: Tensor) -> None:
    assert bool((ours[0][empty] == 0).all()) and bool((ours[1][empty] == -math.inf).all()), "a row attends nothing"


@pytest.mark.sweep
@native_dtypes
@forms
def test_biases_where_another_rule_forbids(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """A bias there is never met, whatever the order of the rules; where nothing forbids, NaN shows."""
    qkv = make_qkv(*n, dtype=dtype)
    added = torch.randn(n.B, n.H, n.T, n.S, generator=source(n))
    with collected() as attempt:
        for name in drawn([*MASKS]):
            mask, sees = made(name, n)
            clean = attend(backend, *qkv, mask=mask & headwise.bias(added), return_lse=True)
            for what in POISONS:
                bad = headwise.bias(poison(added, ~sees, what))
                for joined in (mask & bad, bad & mask):
                    for x, y in zip(attend(backend, *qkv, mask=joined, return_lse=True), clean, strict=True):
                        attempt(f"{name}, {what}", assert_same_bits, x, y)
            rows = torch.rand(sees.shape, generator=source(n)) < 0.02
            shown = attend(backend, *qkv, mask=mask & headwise.bias(poison(added, rows)), return_lse=True)
            met = (rows & sees).any(-1)
            for x, y in zip(shown, clean, strict=True):
                attempt(f"{name}, others", assert_same_bits, x[~met], y[~met])
                attempt(f"{name} shows", _is_nan, x[met])


@pytest.mark.sweep
@native_dtypes
@forms
def test_around_and_between(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Before, after and in the gaps of every buffer: the bits of the run with zeros there."""
    tensors = dict(zip(("query", "key", "value"), make_qkv(*n, dtype=dtype), strict=True))
    bias, gate = torch.randn(n.B, n.H, n.T, n.S, generator=source(n)), torch.ones(n.B, n.H, n.T, n.V)
    sinks = torch.linspace(-1, 1, n.H).view(1, 1, 1, n.H)

    def call(slack: float, pattern: str) -> Any:
        odd = {name: strided(x, pattern, slack=slack) for name, x in tensors.items()}
        options = {"gate": strided(gate, pattern, slack=slack), "sinks": strided(sinks, pattern, slack=slack)[0, 0, 0]}
        mask = made("causal", n)[0] & headwise.bias(strided(bias, pattern, slack=slack))
        return attend(backend, **odd, **options, mask=mask, return_lse=True)

    with collected() as attempt:
        for pattern in ("order 0132", "order 0213", "step 3 in 3", "step 2 in 2", "rows padded by 3", "odd offset"):
            zeros = call(0.0, pattern)
            for slack in (math.nan, math.inf, -math.inf, 1e4):
                for x, y in zip(call(slack, pattern), zeros, strict=True):
                    attempt(f"{pattern}, {slack}", assert_same_bits, x, y)


def test_these_tests_can_fail() -> None:
    """torch's own kernel leaks a masked value's NaN; a NaN that is hidden is seen too."""
    n = FORMS["many rows"]
    mask, sees = made("keep", n)
    q, k, v = make_qkv(*n)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    unseen = ~sees.any(1, keepdim=True).any(2)
    run = torch.nn.functional.scaled_dot_product_attention
    dense = mask.dense(n.T, n.S)
    bad = run(q, k, poison(v, unseen[..., None]), attn_mask=dense)
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bits(bad, run(q, k, v, attn_mask=dense))
    with pytest.raises(AssertionError, match="are no NaN"):
        _is_nan(torch.tensor([math.nan, 0.0]))


@native_dtypes
@forms
def test_an_infinite_query_shows_under_a_softcap(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """The softcap makes its infinite scores finite, so no sum of the row would tell."""
    q, k, v = make_qkv(*n, dtype=dtype)
    clean = attend(backend, q, k, v, softcap=2.0, return_lse=True)
    bad = torch.zeros(n.B, n.H, n.T, dtype=torch.bool)
    bad[0, 0, -1] = True
    q[0, 0, -1, 3] = math.inf
    for x, y in zip(attend(backend, q, k, v, softcap=2.0, return_lse=True), clean, strict=True):
        assert_same_bits(x[~bad], y[~bad])
        _is_nan(x[bad])
