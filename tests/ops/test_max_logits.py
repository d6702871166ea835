"""The largest logit of each head: that of the score matrix, beside an output and gradients of the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from backends import MUST, NATIVE, instructions, needs_native
from draw import slow_except
from torch import Tensor

import headwise
from headwise import attention_max_logits

B, H, K, D, V = 2, 6, 2, 16, 11
LENGTHS = ((1, 1), (1, 7), (1, 2500), (3, 31), (16, 17), (33, 97), (64, 65), (129, 129), (7, 300))


def tensors(T: int, S: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, D).to(dtype), torch.randn(B, K, S, D).to(dtype), torch.randn(B, K, S, V).to(dtype)


def options() -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "negative scale": {"scale": -0.7},
        "no scale": {"scale": 0.0},
        "softcap": {"softcap": 2.0},
        "causal": {"mask": headwise.causal()},
        "window": {"mask": headwise.window(3)},
        "bias": {"mask": headwise.causal() & headwise.alibi(torch.rand(H))},
        "relative": {"mask": headwise.relative(torch.randn(H, 9))},
        "ragged": {"mask": headwise.lengths(torch.tensor([1, 5]))},
        "rule": {"mask": headwise.dilated(2)},
        "nothing": {"mask": headwise.lengths(torch.tensor([0, 0]))},
        "sinks": {"sinks": torch.randn(H) + 20},
        "gate": {"gate": torch.rand(H)},
        "all": {"mask": headwise.window(5), "softcap": 3.0, "sinks": torch.randn(H), "scale": 0.9},
    }


@cache
def cases(dtype: torch.dtype) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any], Tensor]]:
    """(name, inputs, options, largest scores): of every length and option, for all backends."""
    made = []
    for T, S in LENGTHS:
        given = tensors(T, S, dtype)
        made += [(f"{name} {T} {S}", given, how, truth(*given[:2], **how)) for name, how in options().items()]
    return made


def truth(query: Tensor, key: Tensor, gate: Any = None, **how: Any) -> Tensor:
    how = {name: x.double() if isinstance(x, Tensor) else x for name, x in how.items()}
    return headwise.weights(query.double(), key.double(), stage="biased", **how).amax((0, 2, 3))


@pytest.mark.parametrize("backend", [*MUST, *NATIVE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_largest_score(backend: str, dtype: torch.dtype) -> None:
    for name, given, how, true in cases(dtype):
        with instructions(backend) as run:
            out, logits = attention_max_logits(*given, backend=run, **how)
            plain = headwise.attention(*given, backend=run, **how)
        # A sum of D = 16 products in float32, of numbers up to 5.
        torch.testing.assert_close(logits.double(), true, rtol=1e-5, atol=1e-5, msg=name)
        assert logits.shape == (H,) and logits.dtype == torch.float32 and not logits.requires_grad
        if "gate" in how:  # in half precision the gate rounds once more, as in training
            torch.testing.assert_close(out, plain, rtol=2**-6 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        else:
            assert torch.equal(out, plain), f"{name}: the output has other bits"


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_has_the_same_bits(dtype: torch.dtype) -> None:
    for T, S in ((1, 7), (33, 97), (65, 65)):
        for name, how in options().items():
            learning = [x.requires_grad_() for x in tensors(T, S, dtype)]
            grads = []
            for ours in (True, False):
                out = attention_max_logits(*learning, **how)[0] if ours else headwise.attention(*learning, **how)
                grads.append((out, *torch.autograd.grad(out.float().square().sum(), learning)))
            for one, other in zip(*grads, strict=True):
                assert torch.equal(one, other), name


@needs_native
def test_the_gradient_of_a_gradient() -> None:
    learning = [x.requires_grad_() for x in tensors(5, 7)]
    seconds = []
    for ours in (True, False):
        out = attention_max_logits(*learning)[0] if ours else headwise.attention(*learning)
        first = torch.autograd.grad(out.square().sum(), learning, create_graph=True)
        seconds.append(torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), learning))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["auto", "blocks"])
def test_what_is_masked_does_not_count(backend: str) -> None:
    query, key, value = tensors(9, 13)
    mask = headwise.lengths(torch.tensor([4, 0]))
    true = attention_max_logits(query, key, value, mask=mask, backend=backend)[1]
    for poison in (torch.nan, torch.inf, 1e30):
        bad_key, bad_value, bad_query = key.clone(), value.clone(), query.clone()
        bad_key[0, :, 4:], bad_value[0, :, 4:], bad_key[1], bad_query[1] = poison, poison, poison, poison
        logits = attention_max_logits(bad_query, bad_key, bad_value, mask=mask, backend=backend)[1]
        assert torch.equal(logits, true), poison
    assert torch.equal(true, attention_max_logits(query[:1], key[:1], value[:1], mask=mask.part(batch=(0, 1)))[1])


@pytest.mark.parametrize("backend", ["auto", "blocks"])
def test_a_nan_that_is_met_shows_in_its_head(backend: str) -> None:
    query, key, value = tensors(9, 13)
    for place, heads in (("query", [2]), ("key", [3, 4, 5]), ("value", [0, 1, 2])):
        q, k, v = query.clone(), key.clone(), value.clone()
        if place == "query":
            q[1, 2, 8] = torch.nan
        elif place == "key":
            k[0, 1, 5] = torch.inf
        else:
            v[0, 0, 5] = torch.nan
        logits = attention_max_logits(q, k, v, mask=headwise.causal(), backend=backend)[1]
        assert logits.isnan().nonzero().flatten().tolist() == heads, place


def test_empty_calls() -> None:
    query, key, value = tensors(0, 3)
    assert attention_max_logits(query, key, value)[1].tolist() == [-torch.inf] * H
    query, key, value = tensors(3, 0)
    assert attention_max_logits(query, key, value)[1].tolist() == [-torch.inf] * H
    assert attention_max_logits(query[:0], key[:0], value[:0])[1].tolist() == [-torch.inf] * H


@pytest.mark.slow
@needs_native
@pytest.mark.unchecked
@pytest.mark.parametrize("learns", [False, True])
def test_one_graph(learns: bool) -> None:
    query, key, value = (x.requires_grad_(learns) for x in tensors(33, 33))

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attention_max_logits(query, key, value, mask=headwise.causal(), softcap=5.0)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(query, key, value), run(query, key, value), strict=True):
        assert torch.equal(one, other)
    if learns:
        ours, true = (torch.autograd.grad(f(query, key, value)[0].sum(), (query, key, value)) for f in (compiled, run))
        assert all(torch.equal(one, other) for one, other in zip(ours, true, strict=True))


@pytest.mark.unchecked
def test_what_is_refused() -> None:
    from headwise.cache import StaticCache

    query, key, value = tensors(3, 5)
    cache = StaticCache(B, K, D, V, capacity=9).append(key, value)
    for arguments, how, text in (
        ((query, cache, value), {}, "key"),
        ((query, key, None), {}, "value"),
        ((query, key, value), {"is_causal": True}, "mask=headwise.causal"),
        ((query, key, value), {"backend": "sdpa", "softcap": 2.0}, "softcap"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            attention_max_logits(*arguments, **how)


@pytest.mark.parametrize("compiled", slow_except((False, True), (False,)))
@pytest.mark.unchecked
def test_a_module_has_it(compiled: bool) -> None:
    torch.manual_seed(0)
    mha = headwise.MultiHeadAttention(24, 4, num_kv_heads=2, inner=headwise.nn.MaxLogitAttention(softcap=9.0))
    plain = headwise.MultiHeadAttention(24, 4, num_kv_heads=2, inner=headwise.nn.InnerAttention(softcap=9.0))
    assert mha.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(mha.state_dict())
    x = torch.randn(3, 7, 24)
    run = torch.compile(lambda x, mask: mha(x, mask=mask), fullgraph=True, backend="aot_eager") if compiled else mha
    with headwise.nn.probe(plain) as seen:
        out = plain(x, mask=headwise.causal())
    [call] = seen.calls
    out.sum().backward()
    ours = run(x, mask=headwise.causal())
    ours.sum().backward()
    assert torch.equal(ours, out)
    for one, other in zip(mha.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    true = headwise.weights(call.query, call.key, stage="biased", **call.scoring).amax((0, 2, 3))
    torch.testing.assert_close(mha.inner.max_logits, true, rtol=1e-5, atol=1e-6)  # a float32 sum in another order


def test_a_gated_module_has_it() -> None:
    """The gate of the module and that of the call multiply the heads, and the logits do not depend on them."""
    sizes = {"num_kv_heads": 2, "head_dim": 5, "value_dim": 3}
    gated = headwise.nn.GatedMultiHeadAttention(23, 4, inner=headwise.nn.MaxLogitAttention(), **sizes)
    plain = headwise.nn.GatedMultiHeadAttention(23, 4, **sizes)
    plain.load_state_dict(gated.state_dict())
    x, gate = torch.randn(3, 7, 23), torch.rand(3, 4, 7, 3)
    for how in ({}, {"gate": gate}):
        assert torch.equal(gated(x, mask=headwise.causal(), **how), plain(x, mask=headwise.causal(), **how))
    q, k = gated.q_proj(x).unflatten(-1, (4, 5)), gated.k_proj(x).unflatten(-1, (2, 5)).repeat_interleave(2, 2)
    true = (torch.einsum("bihd,bjhd->bhij", q, k) * 5**-0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(gated.inner.max_logits, true.amax((0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_latent_attention_has_it() -> None:
    mla = headwise.LatentAttention(24, 3, kv_lora_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
    mla.inner = headwise.nn.MaxLogitAttention(scale=mla.scale)
    x = torch.randn(2, 9, 24)
    with headwise.nn.probe(mla) as seen:
        mla(x, mask=headwise.causal(), form="expanded")
    [call] = seen.calls
    true = headwise.weights(call.query, call.key, stage="biased", **call.scoring).amax((0, 2, 3))
    mla(x, mask=headwise.causal(), form="expanded").sum().backward()
    torch.testing.assert_close(mla.inner.max_logits, true, rtol=1e-5, atol=1e-6)  # a float32 sum in another order
