"""Options and parts of modules in every way of calling them: without a cache, with a prompt or steps, in training."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.cache import StaticCache
from headwise.nn import GatedMultiHeadAttention, InnerAttention, LatentAttention, MultiHeadAttention, Rotary

B, T, M, H, K, D, V, C, R = 2, 7, 13, 6, 3, 8, 5, 11, 4
COUNT = 60  # calls with dropout whose mean is taken
SINKS = torch.randn(H, generator=torch.Generator().manual_seed(1))
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 0.4},
    "sinks": {"sinks": SINKS},
    "backend": {"backend": "reference"},
    "all": {"scale": 0.9, "softcap": 0.4, "sinks": SINKS},
}


def module(kind: str, **options: Any) -> tuple[nn.Module, Callable[[], StaticCache]]:
    """A module of this kind with the options in its inner part, and its cache."""
    torch.manual_seed(5)
    made: nn.Module
    if kind == "latent":
        sizes: dict[str, Any] = {"nope_dim": D, "rope_dim": R, "value_dim": V}
        made = LatentAttention(M, H, kv_lora_rank=C, rotary=Rotary(R, interleaved=True), **sizes)
        made.inner = InnerAttention(**{"scale": made.scale, **options})
        return made, lambda: StaticCache(B, 1, C + R, C, capacity=T, shared=True)
    cls = GatedMultiHeadAttention if kind == "gated" else MultiHeadAttention
    made = cls(M, H, num_kv_heads=K, head_dim=D, value_dim=V, inner=InnerAttention(**options))
    return made, lambda: StaticCache(B, K, D, V, capacity=T)


KINDS = pytest.mark.parametrize("kind", ["plain", "gated", "latent"])


@KINDS
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_inner_part_act_alike_with_and_without_a_cache(kind: str, option: str) -> None:
    one, cache_of = module(kind, **OPTIONS[option])
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(2)) * 3
    with torch.no_grad():
        whole = one.eval()(x, mask=headwise.causal())
        other = module(kind)[0].eval()(x, mask=headwise.causal())
        assert option == "backend" or (whole - other).abs().max() > 1e-3, "the option changes nothing here"
        for cuts in ((0, 4, 5, 6, T), (0, 1, 2, T)):
            cache = cache_of()
            parts = [one(x[:, a:b], cache=cache)[0] for a, b in pairwise(cuts)]
            torch.testing.assert_close(torch.cat(parts, 1), whole)


@KINDS
def test_dropout_acts_in_training_in_every_way_of_calling(kind: str) -> None:
    """Outputs differ from call to call, their mean is that of evaluation, and a seed repeats them."""
    one, cache_of = module(kind, dropout=0.5)
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(3))

    def prompt() -> Tensor:
        return one(x, cache=cache_of())[0]

    def step() -> Tensor:
        cache = cache_of()
        one.eval()(x[:, :-1], cache=cache)
        return one.train(training)(x[:, -1:], cache=cache)[0]

    with torch.no_grad():
        for way in (lambda: one(x, mask=headwise.causal()), prompt, step):
            training = False
            expected = one.eval() and way()
            assert torch.equal(way(), expected), "in evaluation nothing is drawn"
            training = True
            outs = []
            for seed in [*range(COUNT), 0]:
                torch.manual_seed(seed)
                one.train()
                outs.append(way())
            assert torch.equal(outs[0], outs[-1]) and not torch.equal(outs[0], outs[1])
            drawn = torch.stack(outs[:-1]).double()
            off = (drawn.mean(0) - expected).abs() / (drawn.std(0) / COUNT**0.5).clamp_min(1e-3)
            assert off.max() < 6, "six standard errors"


def test_a_gate_leaves_the_dtype_of_what_it_multiplies() -> None:
    """Of a plain function, of attention, and of a module whose gate is float32."""
    q, k, v = (torch.randn(B, heads, T, n).bfloat16() for heads, n in ((H, D), (K, D), (K, V)))
    gate = torch.rand(B, H, T, V)
    sizes: dict[str, Any] = {"num_kv_heads": K, "head_dim": D}
    mha = MultiHeadAttention(M, H, inner=lambda *x, mask: headwise.attention(*x), **sizes).bfloat16()
    for inner in (InnerAttention(), mha.inner):
        out = inner(q, k, v, gate=gate)
        assert out.dtype == torch.bfloat16, type(inner)
        plain = inner(q, k, v).double() * gate
        torch.testing.assert_close(out.double(), plain, rtol=0.01, atol=1e-3)  # two roundings to 8 bits
    assert mha(torch.randn(B, T, M).bfloat16(), gate=torch.rand(B, H, T)).dtype == torch.bfloat16


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "integers": lambda out: out.long(),
    "bools": lambda out: out > 0,
    "three axes": lambda out: out[0],
    "five axes": lambda out: out[None],
}


@pytest.mark.unchecked
@pytest.mark.parametrize("name", WRONG)
def test_what_an_inner_part_gives_is_checked(name: str) -> None:
    mha = MultiHeadAttention(M, H, head_dim=D, inner=lambda q, k, v, *, mask: WRONG[name](q))
    with pytest.raises((TypeError, ValueError), match=r"what the inner part gives is a float tensor \(B, H, T, n\)"):
        mha(torch.randn(B, T, M))


@pytest.mark.unchecked
def test_keys_to_expand_are_checked() -> None:
    mla = module("latent")[0]
    key = torch.randn(B, 1, T, C + R)
    made, values = mla.expand(key)
    assert made.shape == (B, H, T, D + R) and values.shape == (B, H, T, V)
    for wrong in (key.long(), key[0], key.repeat(1, 2, 1, 1), key[..., 1:], torch.randn(B, 1, T, C + R + 1)):
        with pytest.raises(ValueError, match=rf"key is a float tensor \(B, 1, T, {C + R}\)"):
            mla.expand(wrong)
