"""Statistics by the Triton kernels, against their definitions on the float64 matrix."""

from __future__ import annotations

from typing import Any

import pytest
import statistics_cases as cases
import torch
from draw import slow_except
from mask_cases import FEW, MASKS, Sizes
from torch.utils._pytree import tree_map
from triton_cases import ON_CARD, needs_triton, quiet, there

import headwise
from headwise.ops.statistics import native, row_statistics, triton
from headwise.testing import make_qkv

pytestmark = [needs_triton, pytest.mark.unchecked, quiet]
SHORT, LONG, TILED = Sizes(2, 2, 1, 5, 17, 11, 13), Sizes(2, 2, 2, 19, 5, 13, 7), Sizes(1, 1, 1, 67, 131, 16, 16)


@pytest.fixture(autouse=True)
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too, the kernels serve the statistics; on a card the tests' tensors go there."""
    monkeypatch.setattr(native, "serves", lambda *_: False)
    monkeypatch.setattr(triton, "DEVICES", ("cpu", "cuda"))
    if ON_CARD:
        for name in ("statistics", "row_statistics"):
            monkeypatch.setattr(cases, name, on_card(getattr(cases, name)))


def on_card(measure: Any) -> Any:
    def there_and_back(*tensors: Any, **options: Any) -> Any:
        result = measure(*there(tensors), **there(options))
        return type(result)(**tree_map(lambda x: x.cpu(), vars(result)))

    return there_and_back


@pytest.mark.sweep
@pytest.mark.parametrize("mask", [None, *FEW, "alibi", "window 2 first 1", "causal | not window", "nothing"])
@pytest.mark.parametrize("n", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("dtype", slow_except((torch.float32, torch.float16), (torch.float32,)), ids=str)
def test_definitions(mask: str | None, n: Sizes, dtype: torch.dtype) -> None:
    query, key = cases.inputs(n, dtype)
    made = None if mask is None else MASKS[mask](n).mask
    options: dict[str, Any] = {} if n is SHORT else {"softcap": 0.7, "sinks": torch.randn(n.H)}
    cases.check(n, query, key, cases.seen(made, n), mask=made, **options)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mask", ["causal", "segments (B,)", "all kinds"])
def test_across_tiles(mask: str) -> None:
    query, key = cases.inputs(TILED)
    made = MASKS[mask](TILED).mask
    cases.check(TILED, query, key, cases.seen(made, TILED), mask=made)


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_output_with_its_statistics(dim: int, dtype: torch.dtype) -> None:
    """Up to a head dim of 64 in one pass, beyond in two; a feature of ones and zeros in the pass of the output.

    Values in half precision do not round the sums of bins and features: a weight is the sum of two such numbers there.
    """
    q, k, v = there(tuple(x.to(dtype) for x in make_qkv(1, 2, 1, 9, 20, dim, 8)))
    first = torch.arange(20, device=q.device) == 0
    options: dict[str, Any] = {"mask": headwise.causal(), "features": {"first": first}, "pool": 4}
    out, rows = headwise.attention_statistics(q, k, v, **options)
    expected = row_statistics(q.double(), k.double(), **options)
    for name in ("entropy", "distance", "pooled", "largest"):
        torch.testing.assert_close(getattr(rows, name).double(), getattr(expected, name), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.features["first"].double(), expected.features["first"], rtol=1e-5, atol=1e-5)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(out, headwise.attention(q, k, v, mask=headwise.causal()), **near)


def test_small_weights_count_in_halves() -> None:
    """One key with nearly all the mass, and many whose weights are below the least float16."""
    n = Sizes(1, 1, 1, 1, 300, 16, 16)
    query, key = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 300, 16)
    query[..., 0], key[0, 0, 0, 0] = 16.0, 4.0  # e^-16 = 1e-7 each
    cases.check(n, query.half(), key.half(), cases.seen(None, n))


def test_a_bad_key_spoils_the_rows_that_see_it() -> None:
    q, k, _ = make_qkv(1, 1, 1, 6, 6, 8, 8)
    clean = headwise.statistics(*there((q, k)), mask=headwise.causal())
    k[0, 0, 3, 2] = torch.nan
    spoiled = headwise.statistics(*there((q, k)), mask=headwise.causal())
    for name in ("entropy", "distance", "largest"):
        x, y = getattr(spoiled, name)[0, 0].cpu(), getattr(clean, name)[0, 0].cpu()
        assert torch.equal(x[:3], y[:3]) and x[3:].isnan().all(), name
    assert torch.equal(spoiled.keys.cpu(), clean.keys.cpu())


def test_more_bins_than_a_program_holds_are_left_to_blocks() -> None:
    q, k, _ = there(make_qkv(1, 1, 1, 4, 70, 8, 8))
    assert row_statistics(q, k, pool=65).pooled.shape == (1, 1, 4, 65)
