"""`headwise.top_keys`: the keys that chosen rows attend most, against the whole matrix sorted."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from mask_cases import MASKS, SIZES, TILED, Sizes
from torch import Tensor

import headwise
from headwise.ops.statistics import top_keys as module
from headwise.ops.statistics.top_keys import TopKeys, top_keys
from headwise.testing import make_qkv

CHOICES: list[tuple[Any, Any]] = [(None, None), ([0, -1], None), (slice(1, 3), [1]), (2, 0), ([], None)]


def sorted_whole(weights: Tensor, allowed: Tensor, k: int) -> TopKeys:
    """From the weights (B, h, r, S) of the rows and heads chosen; of equal ones the first come first."""
    ranked = weights.masked_fill(~allowed, -1.0)
    order = ranked.argsort(stable=True, dim=-1, descending=True)[..., :k]
    values = ranked.gather(-1, order)
    return TopKeys(order.masked_fill(values < 0, -1), values.clamp(min=0))


def chosen(x: Tensor, rows: Any, heads: Any) -> Tensor:
    heads, rows = ([pick] if isinstance(pick, int) else slice(None) if pick is None else pick for pick in (heads, rows))
    return x[:, heads][:, :, rows]


@pytest.mark.sweep
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    for n in SIZES:
        query, key, _ = make_qkv(*n, dtype=torch.float64)
        mask, sinks = MASKS[name](n).mask, torch.linspace(-1, 1, n.H).double()
        options: dict[str, Any] = {"mask": mask, "softcap": 3.0, "sinks": sinks, "scale": 0.7}
        whole = headwise.weights(query, key, **options)
        allowed = mask.allowed(n.T, n.S)
        allowed = torch.ones_like(whole, dtype=torch.bool) if allowed is None else allowed.expand(whole.shape)
        for k in (1, 3, n.S, n.S + 2):
            for rows, heads in CHOICES:
                result = top_keys(query, key, k, rows=rows, heads=heads, **options)
                want = sorted_whole(chosen(whole, rows, heads), chosen(allowed, rows, heads), k)
                assert torch.equal(result.keys, want.keys), (n, k, rows, heads)
                assert torch.allclose(result.weights, want.weights, atol=1e-12), (n, k, rows, heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    query, key, _ = make_qkv(*TILED, dtype=dtype)
    result = top_keys(query, key, 5, mask=headwise.causal())
    assert result.weights.dtype == torch.float32 and result.keys.dtype == torch.long
    exact = headwise.weights(query.double(), key.double(), mask=headwise.causal())
    assert torch.allclose(result.weights.double(), exact.gather(-1, result.keys.clamp(min=0)), atol=1e-5)
    assert torch.allclose(result.weights.double(), exact.topk(5).values, atol=1e-5)


def test_of_equal_keys_the_first_come_first() -> None:
    for S in (9, 4099):  # a sort that is not stable may be for a few
        query, key = torch.zeros(1, 1, 4, 3), torch.zeros(1, 1, S, 3)
        assert top_keys(query, key, 4).keys.eq(torch.arange(4)).all()


def test_the_first_is_the_largest_key_of_the_statistics() -> None:
    query, key, _ = make_qkv(*TILED)
    top, stats = (
        top_keys(query, key, 1, mask=headwise.causal()),
        headwise.statistics(query, key, mask=headwise.causal()),
    )
    assert torch.equal(top.keys[..., 0], stats.largest_key)
    assert torch.allclose(top.weights[..., 0], stats.largest, atol=1e-6)


def test_rows_come_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, _ = make_qkv(*Sizes(2, 4, 2, 23, 41, 8, 8))
    keep = headwise.keep(torch.rand(2, 4, 23, 41, generator=torch.Generator().manual_seed(0)) > 0.4)
    whole = top_keys(query, key, 6, rows=torch.arange(22, -1, -1), mask=keep)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5 * 41)
    scored: list[int] = []
    score = module.score_rows
    monkeypatch.setattr(module, "score_rows", lambda q, *rest: scored.append(q.shape[2]) or score(q, *rest))
    parts = top_keys(query, key, 6, rows=torch.arange(22, -1, -1), mask=keep)
    assert scored == [5, 5, 5, 5, 3]
    assert torch.equal(parts.keys, whole.keys) and torch.allclose(parts.weights, whole.weights, atol=1e-6)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 40)  # less than a row: one at a time
    scored.clear()
    assert torch.equal(top_keys(query, key, 6, rows=torch.arange(22, -1, -1), mask=keep).keys, whole.keys)
    assert scored == [1] * 23


def test_no_gradient_is_kept() -> None:
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    assert not top_keys(query, torch.randn(1, 1, 5, 4), 2).weights.requires_grad


def test_a_row_that_attends_nothing_has_no_keys() -> None:
    result = top_keys(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 4, 3), 3, mask=headwise.window(2, offset=9))
    assert result.keys.eq(-1).all() and result.weights.eq(0).all()
    none = top_keys(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 0, 3), 3)
    assert none.keys.shape == none.weights.shape == (1, 1, 2, 0)


def test_weights_that_vanish_are_ranked_by_their_scores() -> None:
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -500.0, -400.0, 10.0]).view(1, 1, 4, 1)
    result = top_keys(query, key, 4, mask=headwise.lengths(torch.tensor([4])))
    assert result.keys.flatten().tolist() == [3, 0, 2, 1]
    assert result.weights.flatten().tolist() == pytest.approx([1, math.exp(-10), 0, 0], rel=1e-4)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("k", "options", "error", "text"),
    [
        (0, {}, ValueError, "k is at least 1; got 0"),
        (True, {}, TypeError, "k is an int; got True"),
        (1.5, {}, TypeError, "k is an int; got 1.5"),
        (1, {"rows": [3]}, ValueError, "rows lie in -3 <= index < 3 here; got [3]"),
        (1, {"heads": torch.ones(2) > 0}, TypeError, "heads are integer positions"),
        (1, {"softcap": 0.0}, ValueError, "softcap > 0, and from 2**-100 to 2**100"),
    ],
)
def test_errors(k: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        top_keys(torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 5, 4), k, **options)
