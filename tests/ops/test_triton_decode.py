"""Decoding by the Triton kernels: dense, in pages, in int8, with values among the keys; and appending to a cache."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from draw import slow_except
from mask_cases import Sizes
from torch import Tensor
from triton_cases import HALVES, ON_CARD, attend, needs_triton, quiet, there

import headwise
from headwise.cache import Quantized, quantize
from headwise.ops.storage.paged import Paged
from headwise.testing import assert_close_like_torch, assert_same_bits, make_qkv, naive, oracle

pytestmark = [needs_triton, pytest.mark.unchecked, quiet]
PAGE = 128
# Lengths of the rows, and more rules; positions are those of the last tokens of each row.
CASES: dict[str, tuple[Sizes, list[int], dict[str, Any]]] = {
    "groups": (Sizes(1, 4, 2, 1, 300, 20, 12), [300], {}),
    "ragged, softcap, sinks": (Sizes(2, 4, 2, 3, 270, 16, 16), [270, 131], {"softcap": 2.0, "sinks": True}),
    "window, two parts": (Sizes(2, 2, 1, 1, 290, 40, 24), [290, 77], {"window": 60}),
    "window and first": (Sizes(2, 2, 1, 2, 290, 16, 16), [290, 130], {"window": 60, "first": 5}),
    "alibi, an empty row": (Sizes(2, 2, 1, 2, 70, 16, 16), [70, 0], {"alibi": True}),
    "sixteen": (Sizes(1, 3, 1, 16, 90, 16, 16), [90], {}),
}
STORES = ("dense", "pages", "int8", "int8 pages")


def mask_of(n: Sizes, lengths: list[int], extra: dict[str, Any]) -> headwise.Mask:
    offset = torch.tensor(lengths) - n.T
    mask = headwise.lengths(torch.tensor(lengths)) & headwise.causal(offset=offset)
    if "window" in extra:
        mask = mask & headwise.window(extra["window"], offset=offset, first=extra.get("first", 0))
    return mask & headwise.alibi(torch.tensor([0.5, 0.1])) if "alibi" in extra else mask


def paged(x: Tensor, table: Tensor) -> Tensor:
    pages = torch.nn.functional.pad(x.movedim(2, -1), (0, table.shape[1] * PAGE - x.shape[2])).movedim(-1, 2)
    made = torch.empty(table.numel(), x.shape[1], PAGE, *x.shape[3:], dtype=x.dtype)
    made[table.flatten()] = pages.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
    return made


def stored(x: Tensor, store: str, table: Tensor) -> tuple[Any, Tensor]:
    """Keys or values as a call takes them, and the numbers that they mean."""
    parts = quantize(x) if store.startswith("int8") else x
    meant = parts.dequantize() if isinstance(parts, Quantized) else parts
    if not store.endswith("pages"):
        return parts, meant
    if isinstance(parts, Quantized):
        parts = Quantized(there(paged(parts.data, table)), there(paged(parts.scale, table)))
    return Paged(there(paged(parts, table)) if isinstance(parts, Tensor) else parts, table, x.shape[2]), meant


@pytest.mark.sweep(4)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", CASES)
def test_stores(name: str, store: str) -> None:
    n, lengths, extra = CASES[name]
    q, k, v = make_qkv(*n)
    perm = torch.randperm(n.B * -(-n.S // PAGE), generator=torch.Generator().manual_seed(3)).view(n.B, -1)
    table = there(perm)
    options = {key: x for key, x in extra.items() if key == "softcap"}
    if "sinks" in extra:
        options["sinks"] = torch.linspace(-1, 2, n.H)
    mask = mask_of(n, lengths, extra)
    (key, k), (value, v) = stored(k, store, table.cpu()), stored(v, store, table.cpu())
    if store.endswith("pages"):
        key, value = Paged(key.pages, table, n.S), Paged(value.pages, table, n.S)
    with torch.no_grad():
        out, lse = headwise.attention(
            there(q), there(key), there(value), mask=there(mask), return_lse=True, backend="triton", **there(options)
        )
    tensor = mask.dense(n.T, n.S)
    exact, exact_lse = oracle(q, k, v, mask=tensor, **options)
    assert_close_like_torch(out.cpu(), exact, naive(q, k, v, mask=tensor, **options), values=v)
    assert_close_like_torch(lse.cpu(), exact_lse, exact_lse.float(), values=torch.tensor([16.0]))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(1, 4, 1, 1, 100, 16, 16, dtype=dtype)
    exact, _ = oracle(q, k, v)
    assert_close_like_torch(attend(q, k, v), exact, naive(q, k, v), values=v)


def test_values_among_the_keys_are_read_once() -> None:
    """MLA: 576 = 512 + 64 columns of keys, of which the first 512 are the values."""
    q, k, _ = make_qkv(1, 4, 1, 1, 40, 576, 1, scale=0.3)
    v = k[..., :512]
    exact, _ = oracle(q, k, v)
    ours = attend(q, k, v)
    assert_close_like_torch(ours, exact, naive(q, k, v), values=v)
    assert_same_bits(ours, attend(q, k, v.clone()))


def test_bits_do_not_depend_on_the_batch() -> None:
    q, k, v = make_qkv(3, 2, 1, 2, 330, 16, 16)
    lengths = [330, 260, 30]

    def mask(rows: list[int]) -> headwise.Mask:
        ends = torch.tensor([lengths[r] for r in rows])
        return headwise.lengths(ends) & headwise.causal(offset=ends - 2)

    together, lse = attend(q, k, v, mask=mask([0, 1, 2]), return_lse=True)
    for row, n in enumerate(lengths):
        part = slice(row, row + 1)
        alone, lse_too = attend(q[part], k[part, :, :n], v[part, :, :n], mask=mask([row]), return_lse=True)
        assert_same_bits(together[part], alone)
        assert_same_bits(lse[part], lse_too)


@pytest.mark.parametrize("what", slow_except((math.nan, math.inf, -math.inf), (math.nan,)))
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_may_not_be_attended_changes_no_bit(where: str, what: float) -> None:
    """Three queries, of which the last alone sees the last key; keys beyond the row's length belong to nobody."""
    q, k, v = make_qkv(1, 2, 1, 3, 80, 16, 16)
    mask = headwise.lengths(torch.tensor([70])) & headwise.causal(offset=67)
    clean, lse = attend(q, k, v, mask=mask, return_lse=True)
    for place, rows in ((69, [0, 1]), (75, [0, 1, 2])):
        x, y = k.clone(), v.clone()
        (x if where == "key" else y)[0, 0, place, 3] = what
        out, lse_too = attend(q, x, y, mask=mask, return_lse=True)
        assert_same_bits(out[:, :, rows], clean[:, :, rows])
        assert_same_bits(lse_too[:, :, rows], lse[:, :, rows])
        gone = [r for r in range(3) if r not in rows]
        assert out[:, :, gone].isnan().all() and lse_too[:, :, gone].isnan().all()


def test_a_bad_scale_is_a_bad_token() -> None:
    q, k, v = make_qkv(1, 2, 1, 2, 20, 16, 16)
    k8, v8 = quantize(k), quantize(v)
    v8.scale[0, 0, 19] = math.nan
    out = attend(q, k8, v8, mask=headwise.causal())
    assert out[:, :, 1].isnan().all() and out[:, :, 0].isfinite().all()


def test_lengths_are_read_on_the_device() -> None:
    """The same tensors, changed in place, give the next step: a CUDA graph can hold it."""
    q, k, v = make_qkv(2, 2, 1, 1, 60, 16, 16)
    stop = there(torch.tensor([10, 20]))
    mask = headwise.lengths(stop)
    for _ in range(2):
        with torch.no_grad():
            out = headwise.attention(*there((q, k, v)), mask=mask, backend="triton").cpu()
        seen = headwise.lengths(stop.cpu())
        torch.testing.assert_close(out, headwise.attention(q, k, v, mask=seen), rtol=1e-5, atol=1e-6)
        stop += 7


def test_append_rounds_as_quantize_does() -> None:
    key, value, _ = make_qkv(2, 3, 3, 5, 5, 20, 12)
    value = make_qkv(2, 3, 3, 5, 5, 20, 12)[2]
    key[1, 0, 0] = 0.0
    key[0, 2, 1] = torch.linspace(-127, 127, 20) + 0.5  # ties
    columns, table = torch.tensor([1, 130]), torch.tensor([[2, 0], [1, 3]])
    for pages in (False, True):
        shape = (4, 3, PAGE) if pages else (2, 3, 140)
        to = [torch.zeros(*shape, 20), torch.zeros(*shape, 12), torch.zeros(shape), torch.zeros(shape)]
        to[:2] = [x.to(torch.int8) for x in to[:2]]
        to = there(to)
        where = there((table if pages else None, columns))
        torch.ops.headwise.triton_append(*there((key, value)), *to, *where, 0, 0)
        to = [x.cpu() for x in to]
        for x, data, scales in ((key, to[0], to[2]), (value, to[1], to[3])):
            small = quantize(x)
            for b in range(2):
                for t in range(5):
                    n = int(columns[b]) + t
                    row, place = (int(table[b, n // PAGE]), n % PAGE) if pages else (b, n)
                    assert torch.equal(data[row, :, place], small.data[b, :, t])
                    assert torch.equal(scales[row, :, place], small.scale[b, :, t])
            assert int((data != 0).any(-1).sum()) <= 2 * 3 * 5, "nothing else is written"


def test_append_of_a_token_that_is_not_finite() -> None:
    key = make_qkv(1, 1, 1, 2, 2, 8, 8)[0]
    key[0, 0, 1, 3] = math.inf
    to, scale = there((torch.zeros(1, 1, 4, 8, dtype=torch.int8), torch.zeros(1, 1, 4)))
    torch.ops.headwise.triton_append(there(key), None, to, None, scale, None, None, None, 1, 0)
    assert scale.cpu().isnan().tolist() == [[[False, False, True, False]]]


@pytest.mark.skipif(not ON_CARD, reason="needs a CUDA device")
def test_a_graph_of_a_step() -> None:
    q, k, v = there(make_qkv(2, 8, 2, 1, 300, 64, 64))
    stop = torch.tensor([10, 20], device=q.device)
    mask, graph = headwise.lengths(stop), torch.cuda.CUDAGraph()
    with torch.no_grad():
        headwise.attention(q, k, v, mask=mask)
        with torch.cuda.graph(graph):
            out = headwise.attention(q, k, v, mask=mask)
        stop += 100
        graph.replay()
        assert_same_bits(out.cpu(), headwise.attention(q, k, v, mask=mask).cpu())
