"""Modules where numbers that are often equal are not: rows with fewer tokens than were passed, some of the heads,
positions of queries and of keys that differ at equal length.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.cache import PagedCache, PagePool, StaticCache
from headwise.nn import LatentAttention, Rotary
from headwise.nn.latent_costs import FormCosts

pytestmark = pytest.mark.unchecked


def latent() -> LatentAttention:
    torch.manual_seed(0)
    return LatentAttention(13, 3, kv_lora_rank=6, nope_dim=5, rope_dim=2, value_dim=7).eval()


@torch.no_grad()
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_every_padding_of_latent_attention_after_a_prompt(kind: str, form: Any) -> None:
    """Each row equals the row alone, without a cache, whatever numbers of real tokens the two appends have."""
    mla = latent()
    for before, now in itertools.product(itertools.product((1, 3), repeat=2), itertools.product(range(3), repeat=2)):
        x, new = torch.randn(2, 3, 13), torch.randn(2, 3, 13)
        cache = StaticCache(2, 1, 8, 6, capacity=9, shared=True)
        cache = PagedCache(PagePool(4, 1, 8, 6, shared=True), 2) if kind == "paged" else cache
        mla(x, cache=cache, lengths=list(before), form=form)
        out, _ = mla(new, cache=cache, lengths=list(now), form=form)
        for b, (n, m) in enumerate(zip(before, now, strict=True)):
            whole = torch.cat([x[b, :n], new[b, :m]])[None]
            mask = torch.ones(n + m, n + m, dtype=torch.bool).tril()
            want = mla(whole, mask=mask)[0, n:]
            torch.testing.assert_close(out[b, :m], want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_some_heads_are_expanded_as_all_are() -> None:
    """Also where kv_b_proj is called, because a hook may change what it gives."""
    mla, key = latent(), torch.randn(2, 1, 4, 8)

    def doubled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return 2 * out

    for hooked in (False, True):
        if hooked:
            mla.kv_b_proj.register_forward_hook(doubled)
        whole = mla.expand(key)
        for first, last in itertools.combinations(range(4), 2):
            for part, of_all in zip(mla.expand(key, (first, last)), whole, strict=True):
                torch.testing.assert_close(part, of_all[:, first:last])


def test_the_form_is_the_one_with_fewer_multiply_adds_over_all_rows() -> None:
    for numbers in itertools.product((1, 4, 9), repeat=4):
        costs = FormCosts(*numbers)
        for held in itertools.chain.from_iterable(itertools.product(range(4), repeat=rows) for rows in (1, 2, 3)):
            for queries in (1, 2, 3):
                rows = [costs.macs(queries, n + queries) for n in held]
                less = sum(row["absorbed"] for row in rows) < sum(row["expanded"] for row in rows)
                assert (costs.cheaper(queries, held) == "absorbed") == less, (numbers, held, queries)


def test_multiply_adds_are_those_of_each_pair() -> None:
    costs = FormCosts(5, 7, 11, 13)
    for keys in range(1, 6):
        for queries in range(1, keys + 1):
            pairs = sum(j <= i for i in range(keys - queries, keys) for j in range(keys))
            want = {"expanded": 5 * keys + 7 * pairs, "absorbed": 11 * queries + 13 * pairs}
            assert costs.macs(queries, keys) == want


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [False, True], ids=["one for all", "by row"])
def test_queries_and_keys_have_positions_of_their_own(interleaved: bool, rows: bool) -> None:
    """Of equal length, too: each pair of numbers is one complex number, times that of the angle."""
    D, T = 6, 4
    of_queries, of_keys = torch.tensor([[3, 0, 7, 2], [1, 5, 5, 9]]), torch.tensor([[8, 1, 0, 6], [2, 2, 4, 0]])
    if not rows:
        of_queries, of_keys = of_queries[0], of_keys[0]
    query, key = torch.randn(2, 4, T, D, dtype=torch.float64), torch.randn(2, 2, T, D, dtype=torch.float64)
    turned = Rotary(D, base=50.0, interleaved=interleaved)(query, key, (of_queries, of_keys))
    for x, got, places in ((query, turned[0], of_queries), (key, turned[1], of_keys)):
        angle = places.double()[..., None] * 50.0 ** (-2 * torch.arange(D // 2, dtype=torch.float64) / D)
        angle = angle[:, None] if rows else angle
        split = (lambda x: (x[..., 0::2], x[..., 1::2])) if interleaved else (lambda x: x.chunk(2, -1))
        want = torch.complex(*split(x)) * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(torch.complex(*split(got)), want)
