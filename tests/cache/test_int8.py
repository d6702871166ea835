"""int8 keys and values: what `headwise.cache.quantize` makes, what it means in `headwise.attention`, what it costs.

The native kernel's own tests are in `test_native_int8.py`; here the other backends, the errors and the error's measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from mask_cases import LONG, MASKS, SHORT, Sizes
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise
from headwise.cache import Quantized, quantization_error, quantize
from headwise.cache.quantize import rounded
from headwise.testing import assert_same_bits, make_qkv, strided

PLAIN = ("blocks", "reference", "sdpa")  # backends that are given the dequantised numbers
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def inputs(n: Sizes = SHORT, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Quantized, Quantized]:
    q, k, v = make_qkv(*n)
    return q.to(dtype), quantize(k), quantize(v)


# -- quantize ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_is_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 50, 21) * torch.logspace(-6, 3, 50)[:, None]).to(dtype)
    for made in (quantize(x), Quantized(*rounded(x))):  # by the kernel if there is one, and by PyTorch
        assert made.data.dtype == torch.int8 and made.scale.dtype == torch.float32
        assert made.shape == x.shape and made.scale.shape == x.shape[:3]
        assert int(made.data.min()) >= -127
        off = (made.dequantize(torch.float64) - x.double()).abs()
        rounding = 2 * torch.finfo(torch.float32).eps * x.double().abs().amax(-1, keepdim=True)
        assert bool((off <= 0.5 * made.scale.double()[..., None] + rounding).all())
        assert bool((made.data.abs().amax(-1) == 127).all()), "the greatest element of a token is 127 scales"


def test_ties_go_to_the_even_number() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]).view(1, 1, 1, -1)
    assert quantize(x).data.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_tokens_without_a_scale() -> None:
    """Zeros, numbers too small for one, and numbers that are none."""
    x = torch.ones(1, 1, 6, 3)
    x[0, 0, 1] = 0
    x[0, 0, 2] = 1e-45
    x[0, 0, 3, 1], x[0, 0, 4, 0], x[0, 0, 5, 2] = math.nan, math.inf, -math.inf
    made = quantize(x)
    assert_same_bits(made.dequantize()[:, :, 0], torch.ones(1, 1, 3))
    assert bool((made.dequantize()[:, :, 1:3] == 0).all())
    assert made.scale.isnan().tolist() == [[[False, False, False, True, True, True]]]
    assert quantize(x.double().masked_fill(~x.isfinite(), 1e300)).scale.isnan().tolist() == made.scale.isnan().tolist()


def test_a_gradient_is_not_lost_without_a_word() -> None:
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"carry no gradient; got x that requires grad; .*no_grad\(\).*x\.detach\(\)"):
        quantize(x)
    with torch.inference_mode():
        inferred = quantize(x).dequantize()
    assert_same_bits(quantize(x.detach()).dequantize(), inferred)


def test_any_strides_and_no_gradient() -> None:
    x = torch.randn(2, 3, 5, 8)
    plain = quantize(x)
    with torch.no_grad():
        odd = quantize(strided(x, "order 3120").requires_grad_())
    for a, b in ((odd.data, plain.data), (odd.scale, plain.scale)):
        assert torch.equal(a, b) and a.is_contiguous() and not a.requires_grad
    assert quantize(x[:, :, :0]).data.shape == (2, 3, 0, 8)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("x", "error", "why"),
    [
        ([1.0], TypeError, r"keys or values \(B, K, S, D\) as a float tensor; got list"),
        (torch.ones(2, 3, 4), ValueError, r"got float32 \(2, 3, 4\) on cpu; split heads with"),
        (torch.ones(1, 2, 3, 4, dtype=torch.int8), ValueError, r"as a float tensor; got int8"),
    ],
)
def test_what_quantize_refuses(x: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        quantize(x)


def test_a_pytree_of_two() -> None:
    made = quantize(torch.randn(1, 2, 3, 4))
    leaves, spec = pytree.tree_flatten(made)
    assert leaves[0] is made.data and leaves[1] is made.scale
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, Quantized) and again.data is made.data


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", PLAIN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_backends_attend_the_dequantised_numbers(backend: str, dtype: torch.dtype) -> None:
    for n in (SHORT, LONG):
        q, k, v = inputs(n, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for name in ("causal", "lengths start", "keep BHTS", "bias BHTS"):
            mask = MASKS[name](n).mask
            ours = headwise.attention(q, k, v, mask=mask, backend=backend)
            theirs = headwise.attention(q.to(wide), k.dequantize(wide), v.dequantize(wide), mask=mask, backend=backend)
            assert_same_bits(ours, theirs.to(dtype), what=name)


def test_all_that_attention_takes() -> None:
    q, k, v = inputs()
    options: dict[str, Any] = {"mask": headwise.causal(), "scale": 0.3, "softcap": 2.0, "sinks": torch.zeros(SHORT.H)}
    options |= {"gate": torch.rand(SHORT.H), "return_lse": True}
    for ours, theirs in zip(
        headwise.attention(q, k, v, **options),
        headwise.attention(q, k.dequantize(), v.dequantize(), **options),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_query_and_of_the_scales() -> None:
    """By the dequantised numbers; explain says so."""
    q, k, v = inputs()
    leaves = [x.clone().requires_grad_() for x in (q, k.scale, v.scale)]
    key, value = Quantized(k.data, leaves[1]), Quantized(v.data, leaves[2])
    ours = torch.autograd.grad(headwise.attention(leaves[0], key, value).square().sum(), leaves)
    floats = [(x.data.double() * s.double()[..., None]) for x, s in ((k, leaves[1]), (v, leaves[2]))]
    out = headwise.attention(leaves[0].double(), *floats, backend="reference")
    for x, y in zip(ours, torch.autograd.grad(out.square().sum(), leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    choice = headwise.explain(leaves[0], k, v)
    assert "dequantised as a whole" in choice.why and choice.backend != "native"
    assert choice.others["native"]


def test_a_token_that_is_no_number_shows_where_it_may_be_attended() -> None:
    q, k, v = make_qkv(*SHORT)
    k[0, 0, 3, 1] = math.nan
    for backend in ("auto", *PLAIN):
        out = headwise.attention(q, quantize(k), quantize(v), mask=headwise.causal(offset=0), backend=backend)
        assert bool(out[0, :2, 3:].isnan().all()), backend
        assert not bool(out[0, :2, :3].isnan().any() or out[0, 2:].isnan().any() or out[1].isnan().any()), backend


def test_nothing_to_attend() -> None:
    q, k, v = inputs()
    assert bool((headwise.attention(q, k, v, mask=headwise.lengths(torch.zeros(2).long())) == 0).all())
    none = [Quantized(x.data[:, :, :0], x.scale[:, :, :0]) for x in (k, v)]
    assert bool((headwise.attention(q, *none) == 0).all())


BAD: dict[str, tuple[Callable[[Tensor, Quantized, Quantized], Any], type[Exception], str]] = {
    "the key alone": (
        lambda q, k, v: (q, k, v.dequantize()),
        TypeError,
        r"key is Quantized, value is not: use headwise.cache.quantize\(value\), or key.dequantize\(\)",
    ),
    "the value alone": (lambda q, k, v: (q, k.dequantize(), v), TypeError, "value is Quantized, key is not"),
    "float data": (
        lambda q, k, v: (q, Quantized(k.data.float(), k.scale), v),
        ValueError,
        r"a quantised key is data, int8 \(B, K, S, D\), and scale, float32 \(B, K, S\); got data float32",
    ),
    "half scales": (
        lambda q, k, v: (q, k, Quantized(v.data, v.scale.half())),
        ValueError,
        "a quantised value is .* scale float16 .* headwise.cache.quantize makes both",
    ),
    "a scale too few": (
        lambda q, k, v: (q, Quantized(k.data, k.scale[..., 1:]), v),
        ValueError,
        r"one scale for every token and head; got data int8 \(2, 3, 7, 11\) on cpu, scale float32 \(2, 3, 6\)",
    ),
    "no tensor": (lambda q, k, v: (q, Quantized(k.data, 0.1), v), TypeError, "scale is float"),
    "two devices": (
        lambda q, k, v: (q, Quantized(k.data, k.scale.to("meta")), v), ValueError, "on one device; got data int8"
    ),
    "raw int8": (lambda q, k, v: (q, k.data, v.data), ValueError, "query, key and value share one dtype"),
    "an int8 query": (lambda q, k, v: (k.data, k, v), ValueError, "attention runs in float32"),
    "other heads": (
        lambda q, k, v: (q, *(Quantized(torch.cat([x.data] * 3, 1), torch.cat([x.scale] * 3, 1)) for x in (k, v))),
        ValueError,
        "num_heads must be a multiple of num_kv_heads",
    ),
    "other lengths": (
        lambda q, k, v: (q, k, Quantized(v.data[:, :, 1:], v.scale[:, :, 1:])), ValueError, "key and value share batch"
    ),
}  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("call", [headwise.attention, headwise.explain])
def test_what_attention_refuses(what: str, call: Callable[..., Any]) -> None:
    spoil, error, why = BAD[what]
    with pytest.raises(error, match=why):
        call(*spoil(*inputs()))


def test_without_the_native_library() -> None:
    """The same answers, by the other backends, and explain says what happens."""
    code = """
import torch, headwise
from headwise.cache import quantize
torch.manual_seed(0)
q, k, v = torch.randn(2, 4, 3, 8), quantize(torch.randn(2, 2, 7, 8)), quantize(torch.randn(2, 2, 7, 8))
told = headwise.explain(q, k, v)
assert told.backend != "native" and "dequantised as a whole" in told.why, told
assert "HEADWISE_NATIVE=0" in told.others["native"], told
out = headwise.attention(q, k, v)
assert torch.equal(out, headwise.attention(q, k.dequantize(), v.dequantize()))
"""
    done = fresh.run(code, HEADWISE_NATIVE="0")
    assert done.returncode == 0, done.stderr[-2000:]


# -- the error of quantisation -----------------------------------------------------------------------------------------


def test_the_error_is_what_it_says() -> None:
    q, k, v = make_qkv(2, 6, 3, 5, 40, 16, 12)
    errors = quantization_error(q, k, v, mask=headwise.causal(), softcap=3.0)
    for x, rms, largest in ((k, errors.key_rms, errors.key_largest), (v, errors.value_rms, errors.value_largest)):
        off = (quantize(x).dequantize(torch.float64) - x.double()).transpose(0, 1).flatten(1)
        torch.testing.assert_close(rms, off.square().mean(-1).sqrt().float(), rtol=1e-4, atol=0)
        torch.testing.assert_close(largest, off.abs().amax(-1).float(), rtol=1e-4, atol=0)
    wide = [x.double() for x in (q, k, v)]
    round_trip = [quantize(x).dequantize(torch.float64) for x in (k, v)]
    exact, ours = (
        headwise.attention(wide[0], *kv, mask=headwise.causal(), softcap=3.0) for kv in (wide[1:], round_trip)
    )
    off = (ours - exact).transpose(0, 1).flatten(1)
    size = exact.transpose(0, 1).flatten(1).square().mean(-1).sqrt()
    torch.testing.assert_close(errors.out_rms, off.square().mean(-1).sqrt().float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(errors.out_largest, off.abs().amax(-1).float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(errors.out_relative, (errors.out_rms / size.float()), rtol=1e-3, atol=0)
    assert errors.key_rms.shape == (3,) and errors.out_rms.shape == (6,)
    assert str(errors).count("\n") == 3 and "worst head" in str(errors)


@pytest.mark.parametrize("name", ["mask", "scale", "softcap", "sinks"])
def test_the_error_is_that_of_the_call_with_each_option(name: str) -> None:
    """Both outputs have every option: what one of them left out would count as an error of the codes."""
    q, k, v = make_qkv(2, 6, 3, 5, 41, 16, 11)
    options = {"mask": headwise.causal(), "scale": 0.7, "softcap": 0.5, "sinks": torch.linspace(1, 4, 6)}
    errors = quantization_error(q, k, v, **{name: options[name]})
    scores = 0.7 if name == "scale" else 16**-0.5
    outs = []
    for keys, values in ((k.double(), v.double()), (quantize(k).dequantize(torch.float64), quantize(v).dequantize())):
        x = q.double() @ keys.repeat_interleave(2, 1).mT * scores
        x = 0.5 * torch.tanh(x / 0.5) if name == "softcap" else x
        x = x.masked_fill(torch.ones(5, 41).triu(41 - 5 + 1).bool(), -math.inf) if name == "mask" else x
        sinks = options["sinks"] if name == "sinks" else torch.full((6,), -math.inf)
        x = torch.cat([x, sinks.double().view(1, 6, 1, 1).expand(2, -1, 5, 1)], -1).softmax(-1)[..., :-1]
        outs.append((x @ values.double().repeat_interleave(2, 1)).transpose(0, 1).flatten(1))
    off = outs[1] - outs[0]
    torch.testing.assert_close(errors.out_rms.double(), off.square().mean(-1).sqrt(), rtol=1e-3, atol=0)
    torch.testing.assert_close(errors.out_largest.double(), off.abs().amax(-1), rtol=1e-3, atol=0)


def test_no_error_where_int8_holds_all() -> None:
    x = torch.randint(-127, 128, (1, 2, 9, 8)).float()
    x[..., 0] = 127
    errors = quantization_error(torch.randn(1, 2, 3, 8), x, x)
    assert not any(bool(part.any()) for part in vars(errors).values())


@pytest.mark.unchecked
def test_the_error_of_what_does_not_fit() -> None:
    q, k, v = make_qkv(*SHORT)
    with pytest.raises(ValueError, match="key and value share batch"):
        quantization_error(q, k, v[:, :, 1:])
    with pytest.raises(ValueError, match="float32, bfloat16, float16 or float64"):
        quantization_error(q.long(), k, v)
