"""The op, the modules and the statistics on CUDA give the CPU's numbers, on pretend CUDA and on a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import attend
from cuda_places import assert_close, everywhere, on_cuda
from draw import slow_except
from mask_cases import FEW, MASKS, Sizes
from pretend_cuda import Pretend, pretend_cuda
from torch.utils import _pytree as pytree

import headwise
from headwise.nn import Rotary
from headwise.testing import make_qkv

pytestmark = pytest.mark.unchecked
SMALL = Sizes(2, 6, 3, 37, 71, 16, 24)
TILES = Sizes(2, 2, 1, 130, 258, 16, 16)  # more than a tile of FlexAttention each way


@everywhere
@pytest.mark.parametrize("mask", slow_except((None, *MASKS), (None, *FEW)))
def test_masks(mask: str | None, cuda: Any) -> None:
    n = SMALL
    q, k, v = make_qkv(*n)
    made = None if mask is None else MASKS[mask](n).mask
    options = {"softcap": 3.0, "sinks": torch.randn(n.H), "return_lse": True}
    plain = headwise.attention(q, k, v, mask=made)
    expected = headwise.attention(q, k, v, mask=made, **options)
    with cuda():
        moved = None if made is None else made.to("cuda")
        for backend in ("auto", "sdpa"):
            out = attend(backend, *on_cuda((q, k, v)), mask=moved)
            if out is not None:
                assert_close(out, plain)
        for x, y in zip(headwise.attention(*on_cuda((q, k, v)), mask=moved, **on_cuda(options)), expected, strict=True):
            assert_close(x, y)


@pytest.mark.parametrize("mask", slow_except([name for name in MASKS if name != "everything"], FEW))
def test_flex_gets_the_tiles_of_the_mask(mask: str) -> None:
    """A pair whose tile is listed wrongly is attended or left out wrongly."""
    n = TILES
    q, k, v = make_qkv(*n)
    made = MASKS[mask](n).mask
    expected, lse = headwise.attention(q, k, v, mask=made, softcap=9.0, return_lse=True)
    with pretend_cuda() as counts:
        out = attend("flex", *on_cuda((q, k, v)), mask=made.to("cuda"), softcap=9.0, return_lse=True)
        if out is not None:
            assert counts.launches["flex_attention"] == 1
            assert_close(out[0], expected)
            assert_close(out[1], lse)


@everywhere
def test_statistics_and_weights(cuda: Any) -> None:
    q, k, v = make_qkv(*Sizes(2, 6, 3, 71, 71, 16, 16))
    mask = headwise.causal() & headwise.lengths(torch.tensor([71, 40]))
    options: dict[str, Any] = {
        "offsets": (-1, 0),
        "features": {"first": torch.eye(71)[0].expand(2, 71)},
        "targets": {"some": torch.randint(-1, 71, (2, 71, 2))},
    }
    expected = headwise.attention_statistics(q, k, v, mask=mask, **options)
    top = headwise.top_keys(q, k, 3, mask=mask)
    rows = headwise.weights(q, k, rows=[3, -1], mask=mask)
    with cuda():
        q, k, v = on_cuda((q, k, v))
        ours = headwise.attention_statistics(q, k, v, mask=mask.to("cuda"), **on_cuda(options))
        for x, y in zip(pytree.tree_leaves(_plain(ours)), pytree.tree_leaves(_plain(expected)), strict=True):
            assert_close(x, y, atol=1e-4)
        assert torch.equal(headwise.top_keys(q, k, 3, mask=mask.to("cuda")).keys.cpu(), top.keys)
        assert_close(headwise.weights(q, k, rows=[3, -1], mask=mask.to("cuda")), rows)


def _plain(statistics: Any) -> Any:
    out, rows = statistics
    return out, {name: x for name, x in vars(rows).items() if isinstance(x, torch.Tensor | dict)}


@everywhere
def test_a_module(cuda: Any) -> None:
    torch.manual_seed(0)
    mha = headwise.MultiHeadAttention(28, 6, num_kv_heads=2, head_dim=8, rotary=Rotary(8), bias=True).eval()
    x = torch.randn(2, 11, 28)
    with torch.no_grad():
        expected = mha(x, mask=headwise.causal())
    with cuda():
        assert_close(mha.to("cuda")(on_cuda(x), mask=headwise.causal()), expected)


def test_pretend_cuda_refuses_what_cuda_refuses() -> None:
    with pretend_cuda() as counts:
        x = torch.ones(3, device="cuda")
        assert isinstance(x, Pretend) and isinstance(x * torch.tensor(2.0), Pretend)
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert not counts.waits()
        bool(x.any()), x[x > 0], x.tolist(), x.cpu()
        assert counts.waits() == 4
        counts.clear()
        x.add_(1), torch.tensor([1.0], device="cuda"), torch.ones(2).cuda()
        assert (counts.launches["add_"], counts.to_device.total(), x.tolist()) == (1, 2, [2.0] * 3)
    assert not torch.cuda.is_available() or torch.version.cuda
