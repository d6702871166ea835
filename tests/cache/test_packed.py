"""Keys and values in codes of 4 and 3 bits: how they are stored, what attention on them means, their error, caches."""

from __future__ import annotations

import io
import math
from functools import cache
from typing import Any

import pytest
import torch
from backends import NATIVE, instructions, natives
from torch import Tensor

import headwise
from headwise.cache import (
    PagedCache,
    PagePool,
    Quantized,
    RollingCache,
    StaticCache,
    quantization_error,
    quantize,
)
from headwise.ops.storage.packed import encoded, pack, rotated, rotation, unpack
from headwise.testing import assert_same_bits

BITS = pytest.mark.parametrize("bits", [4, 3])
DTYPE = {4: torch.int4, 3: torch.int3}
LOSS = {4: 0.01154, 3: 0.03744}  # mean square error of the best uniform steps for a Gaussian (Max 1960, table II)


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


# -- the stored form ---------------------------------------------------------------------------------------------------


@BITS
@pytest.mark.parametrize("width", [8, 40, 64, 80, 136])
def test_packed_codes_come_back(bits: int, width: int) -> None:
    codes = torch.randint(2**bits, (5, 3, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
    packed = pack(codes, bits)
    assert packed.shape == (5, 3, width * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits), codes)


def test_the_places_of_the_bits_are_fixed() -> None:
    """Saved caches are read again, so the form may not change."""
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [1 | 5 << 4, 2 | 6 << 4, 3 | 7 << 4, 4]
    low = [
        1 | 3 << 2 | 1 << 4 | 3 << 6,
        2 | 0 << 2 | 2 << 4 | 0 << 6,
    ]  # codes 0, 2, 4, 6 and 1, 3, 5, 7, their low bits
    assert pack(codes, 3).tolist() == [*low, sum(1 << i for i in (3, 4, 5, 6))]
    first = [round(float(x), 6) for x in rotation(8, torch.float64, torch.device("cpu"))[:, 0]]
    assert [abs(x) for x in first] == [round(8**-0.5, 6)] * 8
    assert [x > 0 for x in first] == [False, False, True, False, True, False, True, False]


@pytest.mark.parametrize("width", [8, 24, 80, 128])
def test_a_rotation_keeps_inner_products(width: int) -> None:
    R = rotation(width, torch.float64, torch.device("cpu"))
    assert (R @ R.T - torch.eye(width, dtype=torch.float64)).abs().max() < 1e-13
    assert R.abs().max() <= (2 / width) ** 0.5 + 1e-12, "no channel stays a channel"
    x = drawn(3, width)
    torch.testing.assert_close(rotated(rotated(x), back=True), x)


@BITS
def test_an_element_is_the_level_nearest_to_it(bits: int) -> None:
    x = drawn(2, 3, 50, 40) * torch.logspace(-6, 3, 50)[:, None]
    made, y = quantize(x, bits), rotated(x.double())
    levels = (2 * unpack(made.data, bits).double() + 1 - 2**bits) * made.scale.double()[..., None]
    most = made.scale.double()[..., None] * (2**bits - 1)
    off = (levels - y.clamp(-most, most)).abs()
    assert bool((off <= made.scale.double()[..., None] * 1.001).all())
    assert made.shape == x.shape and (made.data.dtype, made.scale.dtype) == (torch.uint8, torch.float32)
    torch.testing.assert_close(made.dequantize(torch.float64), rotated(levels, back=True))


@BITS
@pytest.mark.parametrize("large", [1.0, 40.0])
def test_the_error_is_that_of_a_gaussian_whatever_the_channels(bits: int, large: float) -> None:
    x = drawn(1, 2, 400, 128)
    x[..., 7] *= large
    off = quantize(x, bits).dequantize() - x
    assert (off.square().sum(-1) / x.square().sum(-1)).mean() < 1.05 * LOSS[bits]


@BITS
def test_tokens_without_a_scale(bits: int) -> None:
    x = torch.ones(1, 1, 5, 8)
    x[0, 0, 1] = 0
    x[0, 0, 2, 3], x[0, 0, 3, 1] = math.nan, -math.inf
    x[0, 0, 4] = 3e38  # its squares overflow, it does not
    made = quantize(x, bits)
    assert made.scale[0, 0, 1] == 0 and not bool(made.dequantize()[0, 0, 1].any())
    assert made.scale.isnan()[0, 0].tolist() == [False, False, True, True, not made.scale[0, 0, 4].isfinite()]
    assert bool(made.dequantize()[0, 0, 2:4].isnan().all())


# -- attention ---------------------------------------------------------------------------------------------------------

# batch, query heads, key heads, queries, keys, head dim, value dim
CALLS = [
    (2, 6, 2, 1, 301, 64, 64),
    (1, 3, 3, 1, 1031, 80, 40),
    (1, 8, 1, 2, 129, 128, 24),
    (1, 4, 2, 3, 37, 8, 8),
    (2, 4, 2, 57, 203, 40, 128),
    (1, 2, 1, 131, 131, 8, 16),
]


@cache
def calls(bits: int, dtype: torch.dtype) -> list[tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]]:
    """(inputs, options, the exact output, its lse)."""
    made = []
    for n, (B, H, K, T, S, D, V) in enumerate(CALLS):
        q, k, v = drawn(B, H, T, D, seed=n).to(dtype), drawn(B, K, S, D, seed=n + 9), drawn(B, K, S, V, seed=n + 18)
        key, value, gate = quantize(k, bits), quantize(v, bits), drawn(B, H, T, V, seed=5).to(dtype)
        mask = headwise.causal() & headwise.window(97)
        options: dict[str, Any] = {"mask": mask, "softcap": 9.0, "sinks": drawn(H, seed=3), "gate": gate}
        exact = (x.dequantize(torch.float64) for x in (key, value))
        doubles = options | {"sinks": options["sinks"].double(), "gate": gate.double()}
        made.append(((q, key, value), options, *headwise.attention(q.double(), *exact, **doubles, return_lse=True)))
    return made


@BITS
@pytest.mark.parametrize("backend", [*NATIVE, "blocks", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_that_on_the_dequantised_numbers(bits: int, backend: str, dtype: torch.dtype) -> None:
    for given, options, true, true_lse in calls(bits, dtype):
        with instructions(backend) as name:
            ours, lse = headwise.attention(*given, **options, return_lse=True, backend=name)
            again = headwise.attention(*given, **options, backend=name)
        eps = torch.finfo(dtype).eps
        assert_same_bits(ours, again)
        # Two roundings to the dtype (the rotated query and the output before it is rotated back), and one at the end.
        assert (ours.double() - true).abs().max() <= (6 * eps + 2e-6) * true.abs().max()
        assert (lse.double() - true_lse).abs().max() <= (6 * eps + 2e-6) * true_lse.abs().max()


@BITS
@pytest.mark.parametrize("backend", [*NATIVE, "blocks"])
def test_what_is_masked_cannot_influence_and_a_bad_token_stays_in_its_rows(bits: int, backend: str) -> None:
    q, key, value = drawn(1, 4, 40, 64), quantize(drawn(1, 2, 40, 64), bits), quantize(drawn(1, 2, 40, 64), bits)
    with instructions(backend) as name:
        clean = headwise.attention(q, key, value, mask=headwise.causal(), backend=name)
        for bad in (math.nan, math.inf, 3e38):
            poisoned = [Quantized(x.data.clone(), x.scale.clone(), bits) for x in (key, value)]
            poisoned[1].data[:, :, 31], poisoned[1].scale[:, :, 31] = 255, bad
            out = headwise.attention(q, *poisoned, mask=headwise.causal(), backend=name)
            assert_same_bits(out[:, :, :31], clean[:, :, :31])
            if bad != 3e38:  # times a small weight it is a number
                assert bool(out[:, :, 31:].isnan().all())


@pytest.mark.parametrize("backend", NATIVE)
def test_a_row_does_not_depend_on_its_batch(backend: str) -> None:
    q, k, v = drawn(3, 4, 1, 64), drawn(3, 2, 700, 64, seed=1), drawn(3, 2, 700, 64, seed=2)
    with instructions(backend) as name:
        whole = headwise.attention(q, quantize(k, 4), quantize(v, 4), backend=name)
        one = headwise.attention(q[1:2], quantize(k[1:2], 4), quantize(v[1:2], 4), backend=name)
    assert_same_bits(whole[1:2], one)


def test_picked_keys_and_gradients_of_the_query() -> None:
    q, key, value = drawn(1, 4, 6, 64), quantize(drawn(1, 2, 50, 64), 4), quantize(drawn(1, 2, 50, 64), 4)
    places = torch.tensor([[3, 17, 49]]).expand(1, 1, 6, 3)
    plain = key.dequantize(), value.dequantize()
    mask = headwise.picked(places)
    torch.testing.assert_close(headwise.attention(q, key, value, mask=mask), headwise.attention(q, *plain, mask=mask))
    q.requires_grad_()
    (ours,) = torch.autograd.grad(headwise.attention(q, key, value).square().sum(), q)
    (true,) = torch.autograd.grad(headwise.attention(q.double(), *(x.double() for x in plain)).square().sum(), q)
    assert (ours - true).abs().max() < 2e-5 * true.abs().max()


# -- caches ------------------------------------------------------------------------------------------------------------


def caches(bits: int) -> list[Any]:
    dtype = DTYPE[bits]
    pool = PagePool(9, 2, 64, 40, dtype=dtype)
    return [
        StaticCache(2, 2, 64, 40, capacity=300, dtype=dtype),
        PagedCache(pool, 2),
        RollingCache(2, 2, 64, 40, window=150, chunk=130, dtype=dtype),
    ]


@BITS
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_cache_holds_what_quantize_makes(bits: int, kind: int) -> None:
    cache, plan = caches(bits)[kind], (130, 1, 1, 60, 1)
    k, v, q = drawn(2, 2, 193, 64), drawn(2, 2, 193, 40, seed=1), drawn(2, 6, 193, 64, seed=2)
    key, value = (quantize(x, bits).dequantize() for x in (k, v))
    mask, end = headwise.causal() & headwise.window(150 if kind == 2 else 999), 0
    for tokens in plan:
        part, end = slice(end, end + tokens), end + tokens
        out = headwise.attention(q[:, :, part], cache.append(k[:, :, part], v[:, :, part]))
        true = headwise.attention(q[:, :, part], key[:, :, :end], value[:, :, :end], mask=mask)
        torch.testing.assert_close(out, true, rtol=1e-4, atol=1e-5)


@BITS
@natives
def test_the_kernel_writes_the_codes_of_the_definition(bits: int, backend: str) -> None:
    """But for codes next to the middle of two levels, which the order of the sums of a rotation decides."""
    for width in (8, 24, 64, 80, 136):
        x = drawn(2, 3, 37, width) * torch.logspace(-20, 15, 37)[:, None]
        x[0, 1, 5, 3], x[1, 2, 7, 1], x[1, 0, 9] = math.nan, math.inf, 0.0
        with instructions(backend):
            made = quantize(x, bits)
        data, scale = encoded(x, bits)
        torch.testing.assert_close(made.scale, scale, rtol=1e-5, atol=0.0, equal_nan=True)
        finite = ~scale.isnan()
        far = (unpack(made.data, bits).int() - unpack(data, bits).int())[finite].abs()
        assert far.max() <= 1 and far.float().mean() < 1e-3, (width, int(far.max()))


@BITS
@natives
def test_a_token_has_the_same_codes_alone_and_among_others(bits: int, backend: str) -> None:
    x = drawn(2, 2, 67, 80).bfloat16()
    with instructions(backend):
        whole = quantize(x, bits)
        for place in (0, 3, 66):
            alone = quantize(x[:, :, place : place + 1], bits)
            assert_same_bits(alone.data, whole.data[:, :, place : place + 1])
            assert_same_bits(alone.scale, whole.scale[:, :, place : place + 1])


@BITS
@natives
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_step_in_one_call_is_append_and_attend(bits: int, backend: str, kind: int) -> None:
    step, whole = caches(bits)[kind], caches(bits)[kind]
    prompt = drawn(2, 2, 129, 64), drawn(2, 2, 129, 40, seed=1)
    query, *token = drawn(2, 6, 1, 64, seed=2), drawn(2, 2, 1, 64, seed=3), drawn(2, 2, 1, 40, seed=4)
    with instructions(backend), torch.no_grad():
        for cache in (step, whole):
            cache.append(*prompt)
        for gate in (None, torch.rand(2, 6), torch.rand(2, 6, 1, 40)):
            out = step.step(query, *token, gate=gate)
            whole.append(*token)
            assert out is not None, "the kernel takes the step"
            true = whole.attend(query, gate=gate)
            assert_same_bits(step.attend(query, gate=gate), true)  # what both caches hold
            torch.testing.assert_close(out, true, rtol=1e-5, atol=1e-6)


@BITS
def test_a_cache_takes_a_fraction_of_the_bytes_and_is_copied_cut_and_saved(bits: int) -> None:
    cache = StaticCache(2, 2, 64, 40, capacity=100, dtype=DTYPE[bits])
    assert cache.nbytes == 2 * 2 * 100 * ((64 + 40) * bits // 8 + 2 * 4)
    k, v, q = drawn(2, 2, 20, 64), drawn(2, 2, 20, 40, seed=1), drawn(2, 2, 1, 64, seed=2)
    cache.append(k, v)
    out = headwise.attention(q, cache)
    assert_same_bits(headwise.attention(q.flip(0), cache.fork().reorder([1, 0])), out.flip(0))
    assert not torch.equal(headwise.attention(q, cache.fork().truncate(9)), out)
    assert cache.keys.shape == (2, 2, 20, 64)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    assert_same_bits(headwise.attention(q, torch.load(file, weights_only=True)), out)


def test_what_cannot_be_is_refused() -> None:
    k = torch.randn(1, 2, 5, 20)
    with pytest.raises(ValueError, match="8, 4 or 3 bits; got 5"):
        quantize(k, 5)
    with pytest.raises(ValueError, match="D is a multiple of 8; got D = 20"):
        quantize(k, 4)
    with pytest.raises(ValueError, match="head_dim is a multiple of 8; got head_dim = 20"):
        StaticCache(1, 2, 20, capacity=9, dtype=torch.int3)
    with pytest.raises(ValueError, match=r"rotates keys as a whole; use torch\.int8"):
        StaticCache(1, 1, 64, 40, capacity=9, dtype=torch.int4, shared=True)
    with pytest.raises(ValueError, match="one number of bits; got 4 and 3"):
        headwise.attention(torch.randn(1, 2, 1, 64), quantize(drawn(1, 2, 5, 64), 4), quantize(drawn(1, 2, 5, 64), 3))
    with pytest.raises(ValueError, match="carry no gradient"):
        quantize(drawn(1, 2, 5, 64).requires_grad_(), 4)
    wrong = Quantized(torch.zeros(1, 2, 5, 32, dtype=torch.int8), torch.ones(1, 2, 5), 4)
    with pytest.raises(ValueError, match="uint8"):
        headwise.attention(torch.randn(1, 2, 1, 64), wrong, wrong)


def test_fewer_bits_have_a_larger_error() -> None:
    q, k, v = drawn(1, 8, 64, 64), drawn(1, 2, 64, 64, seed=1), drawn(1, 2, 64, 64, seed=2)
    errors = [float(quantization_error(q, k, v, bits=bits).out_relative.mean()) for bits in (8, 4, 3)]
    assert errors[0] < 0.02 < errors[1] < 0.2 < errors[2] < 0.4
