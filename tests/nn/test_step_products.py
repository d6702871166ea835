"""The projections of a decode step in the native product of few rows: as near to float64 as those of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from backends import needs_native
from step_watch import taken_steps
from torch import Tensor

from headwise.cache import StaticCache
from headwise.nn import GatedMultiHeadAttention, LatentAttention, MultiHeadAttention, Rotary
from headwise.nn.decode import fast_linear, fused_step
from headwise.nn.decode.fast_linear import FastLinear
from headwise.testing import assert_same_bits

pytestmark = needs_native


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "CACHED", 0)


def layer_of(kind: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A module, and the sizes of a cache for it."""
    if kind == "gated":
        return GatedMultiHeadAttention(62, 6, num_kv_heads=2, head_dim=14, rotary=Rotary(14)), (2, 14, 14), {}
    if kind == "multihead":
        return MultiHeadAttention(62, 6, num_kv_heads=2, head_dim=14, rotary=Rotary(14)), (2, 14, 14), {}
    sizes = {"kv_lora_rank": 24, "nope_dim": 14, "rope_dim": 6, "value_dim": 10}
    return LatentAttention(62, 6, **sizes, rotary=Rotary(6)), (1, 30, 24), {"shared": True}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kind", ("multihead", "gated", "latent"))
def test_products_are_as_near_to_float64_as_torchs(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(17)
    layer, sizes, options = layer_of(kind)
    layer = layer.to(dtype).eval()
    exact = copy.deepcopy(layer).double()
    products: list[torch.Size] = []
    inner = fused_step.few_rows

    def counted(x: Tensor, *rest: Any) -> Tensor | None:
        if x.shape[1] == 1:  # a gate asks in longer calls, too
            products.append(x.shape)
        return inner(x, *rest)

    def step(module: Any, tokens: Tensor, token: Tensor) -> Tensor:
        cache = StaticCache(3, *sizes, capacity=29, dtype=token.dtype, **options)
        module(tokens, cache=cache)
        out, _ = module(token, cache=cache)
        return out.double()

    errors: dict[str, list[Tensor]] = {"native": [], "torch": []}
    with torch.no_grad():
        for _ in range(17):
            tokens, token = torch.randn(3, 11, 62).to(dtype), torch.randn(3, 1, 62).to(dtype)
            truth = step(exact, tokens.double(), token.double())
            for way in errors:
                monkeypatch.setattr(fused_step, "few_rows", counted if way == "native" else lambda *inputs: None)
                errors[way].append((step(layer, tokens, token) - truth).abs().mean())
    assert products == [torch.Size(s) for s in _shapes(kind)] * 17
    native, torchs = (torch.stack(of_way).mean() for of_way in errors.values())
    assert 0 < native <= 1.1 * torchs


def _shapes(kind: str) -> list[tuple[int, int, int]]:
    widths = {"multihead": (62, 62, 62, 84), "gated": (62, 62, 62, 62, 84), "latent": (62, 62, 60)}[kind]
    return [(3, 1, width) for width in widths]


def test_small_weights_in_float32_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "CACHED", 6 * 7)
    for rows, taken in ((6, False), (8, True)):
        for dtype in (torch.float32, torch.bfloat16):
            out = fast_linear.few_rows(torch.ones(1, 7, dtype=dtype), torch.ones(rows, 7, dtype=dtype), None)
            assert (out is not None) == (taken or dtype == torch.bfloat16)


def test_layers_of_fast_decode_take_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(19)
    layer = MultiHeadAttention(62, 6, head_dim=14).eval()
    taken = taken_steps(monkeypatch)
    x = torch.randn(2, 1, 62)
    with torch.no_grad():
        want, _ = layer(x, cache=StaticCache(2, 6, 14, capacity=3))
        for part in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            part.__class__ = FastLinear
        got, _ = layer(x, cache=StaticCache(2, 6, 14, capacity=3))
    assert taken == [True, True]
    assert_same_bits(got, want)
