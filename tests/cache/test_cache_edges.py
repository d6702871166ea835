"""Caches at the ends of what they take: options of every call, numbers near overflow, and the first and last page."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fresh
import pytest
import torch
from backends import needs_native
from torch import Tensor

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache, quantize
from headwise.ops.storage.layout import in_one_piece
from headwise.testing import assert_same_bits

B, H, K, D, V, S = 2, 6, 3, 8, 5, 11


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


MAKERS: dict[str, Callable[[], Any]] = {
    "static": lambda: StaticCache(B, K, D, V, capacity=19),
    "rolling": lambda: RollingCache(B, K, D, V, window=23),
    "paged": lambda: PagedCache(PagePool(5, K, D, V), B),
}
OPTIONS: dict[str, Any] = {
    "mask": headwise.window(4),
    "scale": 0.7,
    "softcap": 0.5,
    "sinks": drawn(H, seed=1),
    "dropout": 0.5,
    "gate": drawn(B, H, 3, V, seed=2),
    "return_lse": True,
    "backend": "reference",
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_option_of_attention_reaches_a_cache(name: str) -> None:
    """`attention(query, cache, ...)` has the bits of `cache.attend`, and nearly the numbers of a call with tensors."""
    key, value, query = drawn(B, K, S, D, seed=3), drawn(B, K, S, V, seed=4), drawn(B, H, 3, D, seed=5)
    cache = MAKERS[name]().append(key, value)
    plain = headwise.attention(query, key, value, mask=headwise.causal(), backend="reference")

    def seeded(call: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        made = call(*args, **options)
        return made if isinstance(made, tuple) else (made,)

    for option, given in OPTIONS.items():
        through = seeded(headwise.attention, query, cache, **{option: given})
        for one, other in zip(through, seeded(cache.attend, query, **{option: given}), strict=True):
            assert_same_bits(one, other)
        assert len(through) == 1 + (option == "return_lse"), option
        rest = {option: given, "mask": headwise.causal()}
        if option == "mask":
            rest["mask"] = headwise.causal() & given
        if option != "dropout":  # which keys are dropped depends on the backend
            expected = seeded(headwise.attention, query, key, value, **{"backend": "reference", **rest})
            for one, other in zip(through, expected, strict=True):
                torch.testing.assert_close(one, other)
        if option not in ("return_lse", "backend"):
            assert (through[0] - plain).abs().max() > 0.01, option


@needs_native
@pytest.mark.parametrize("name", ["static", "paged"])
@torch.no_grad()
def test_a_query_after_a_step_is_no_padding_of_the_append_before_it(name: str) -> None:
    """Row 1 got no token in an append of one token; its query after the next step sees all tokens that it has."""
    key, value, query = drawn(B, K, S, D, seed=3), drawn(B, K, S, V, seed=4), drawn(B, H, 1, D, seed=5)
    cache = MAKERS[name]().append(key[:, :, :5], value[:, :, :5])
    cache.append(key[:, :, 5:6], value[:, :, 5:6], lengths=[1, 0])
    assert cache.takes_steps() and cache.step(query, key[:, :, 6:7], value[:, :, 6:7]) is not None
    for b, tokens in enumerate(([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 6])):
        scores = query[b].double() @ key[b, :, tokens].double().repeat_interleave(H // K, 0).mT * D**-0.5
        expected = scores.softmax(-1) @ value[b, :, tokens].double().repeat_interleave(H // K, 0)
        torch.testing.assert_close(headwise.attention(query, cache)[b].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("first", [0, 3, 129])
def test_positions_of_the_columns_of_a_window_are_those_of_its_tokens(first: int) -> None:
    """Each key holds its own position, so the stored keys say which token lies in a column."""
    T, real = 601, [601, 353]
    places = torch.arange(T).float()[None, None, :, None].expand(2, K, T, D)
    cache = RollingCache(2, K, D, window=5, first=first, chunk=64)
    for start in range(0, T, 64):
        piece = places[:, :, start : start + 64]
        counts = [min(max(n - start, 0), piece.shape[2]) for n in real]
        cache.append(piece, piece, lengths=counts)
    assert cache.dropped[0] >= 128 and cache.dropped[0] != cache.dropped[1]
    stored, positions = in_one_piece(cache.view()[0], torch.float32), cache.column_positions()
    for b, n in enumerate(cache.columns):
        assert positions[b, 0, :n].tolist() == stored[b, 0, :n, 0].long().tolist()
        assert (positions[b, 0, n:] == -1).all()


@pytest.mark.parametrize("T", [1, 3, 7])
@pytest.mark.parametrize("name", ["static", "paged"])
def test_queries_of_a_group_see_the_tokens_that_their_own_keys_kept(name: str, T: int) -> None:
    """Each key-value head keeps other tokens, and a mask has its place among all: query head h reads head h // 2."""
    key, value, query = drawn(B, K, S, D, seed=3), drawn(B, K, S, V, seed=4), drawn(B, H, T, D, seed=5)
    cache = MAKERS[name]().append(key, value)
    left = torch.stack([torch.randperm(S, generator=torch.Generator().manual_seed(n))[:5] for n in range(B * K)])
    cache.keep(left.view(B, K, 5))
    masks = {
        "window": headwise.window(6),
        "dilated": headwise.dilated(2),
        "bias": headwise.alibi(torch.arange(6) / 3.0),
    }
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    rules = {"window": j > i - 6, "dilated": (i - j) % 2 == 0, "bias": j == j}
    for rule, mask in masks.items():
        out = headwise.attention(query, cache, mask=mask)
        for b, h in itertools.product(range(B), range(H)):
            kept = torch.zeros(S).bool().index_fill(0, left.view(B, K, 5)[b, h // 2], True)
            scores = query[b, h].double() @ key[b, h // 2].double().T * D**-0.5
            scores = scores - (h / 3.0 * (i - j).abs() if rule == "bias" else 0.0)
            seen = kept & (j <= i) & rules[rule]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
            torch.testing.assert_close(out[b, h].double(), weights @ value[b, h // 2].double(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e18, 1e25, 1e37])
def test_the_error_of_a_packed_token_is_that_of_its_steps_at_any_size(bits: int, size: float) -> None:
    """At 3e18 the squares of some tokens overflow float32, from 1e25 on those of all."""
    x = drawn(2, 3, 7, 32) * size
    packed = quantize(x, bits)
    error = (packed.dequantize(torch.float64) - x.double()).norm(dim=-1)
    # No element is farther from its level than half a step, or the rest of the largest one above the highest level;
    # a rotation keeps the norm, and steps up to the largest element are never finer than those chosen.
    step = x.double().norm(dim=-1) / (2**bits - 1)
    assert bool((packed.scale > 0).all())
    assert bool((error <= step * 32**0.5).all()), float((error / step).max())


def test_a_table_names_the_first_and_the_last_page_and_none_beside_them() -> None:
    key, query, P = drawn(1, K, 7, D, seed=8), drawn(1, H, 1, D, seed=9), 3
    pages, _ = PagedCache(PagePool(P, K, D), 1).append(key, key).view()
    pages = replace(pages, pages=drawn(*pages.pages.shape, seed=10))
    for number in (0, P - 1):
        there = replace(pages, table=torch.tensor([[number]]), length=30)
        whole = pages.pages[number : number + 1, :, :30]
        torch.testing.assert_close(headwise.attention(query, there, there), headwise.attention(query, whole, whole))
    for number in (-1, P):
        beside = replace(pages, table=torch.tensor([[number]]), length=30)
        with pytest.raises(ValueError, match=f"pages 0 to P - 1 = {P - 1}; got {number} to {number}"):
            headwise.attention(query, beside, beside)


@pytest.mark.slow
def test_the_numbers_of_a_mask_reach_a_compiled_call() -> None:
    """In a process without the shape checker."""
    ran = fresh.run_unchecked("compiled_masks.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]


@pytest.mark.unchecked
def test_keys_and_values_in_different_pages_are_refused() -> None:
    key, query = drawn(1, K, 7, D, seed=8), drawn(1, H, 1, D, seed=9)
    keys, values = (PagedCache(PagePool(pages, K, D), 1).append(key, key).view()[0] for pages in (3, 5))
    values = replace(values, table=keys.table)
    with pytest.raises(ValueError, match=r"the same pages .*: key \(3, 3, \d+, 8\), value \(5, 3, \d+, 8\)"):
        headwise.attention(query, keys, values)
