"""int8 keys and values through the native kernel: attention on the dequantised numbers, read as bytes.

As the other `test_native_*.py` for floats: every mask, size, layout, poison and thread count, by each instruction set,
against float64 on data * scale.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from backends import BEST, ISAS, NATIVE, attend, natives
from draw import drawn
from mask_cases import MASKS, Sizes
from native_cases import Answer, check_lse, check_out, collected, dtypes, exact, weights_of
from test_interference import split_rows
from test_invariance import threads
from test_native_masks import FORMS, LONG, forms
from test_native_poison import made
from torch import Tensor

import headwise
from headwise.cache import Quantized, quantize
from headwise.testing import STRIDES, assert_same_bits, make_qkv, naive, strided

pytestmark = pytest.mark.unchecked
Inputs = tuple[Tensor, Quantized, Quantized]


def make(n: Sizes, dtype: torch.dtype = torch.float32, kind: str = "normal", scale: float = 1.0) -> Inputs:
    q, k, v = make_qkv(*n, kind=kind, scale=scale)
    return q.to(dtype), quantize(k), quantize(v)


def answer_of(inputs: Inputs, **options: Any) -> Answer:
    """The answers for these inputs: on the dequantised numbers, which float32 does not hold but float64 does."""
    q, key, value = inputs[0], *(x.dequantize(torch.float64) for x in inputs[1:])
    out, lse = exact(q, key, value, **options)
    spread = float((weights_of(q, key, **options)[0].square() @ value.square()).amax().sqrt())
    scale = options.get("scale")
    tops = [x.double().norm(dim=-1).max() for x in (q, key)]
    tallest = float(tops[0] * tops[1]) * abs(q.shape[-1] ** -0.5 if scale is None else scale)

    def rough() -> tuple[Tensor, ...]:
        return tuple(x.to(q.dtype) for x in naive(q.float(), key.float(), value.float(), **options))

    return Answer((q, key, value.float()), options, out, lse, rough, tallest, spread)


def check(backend: str, inputs: Inputs, wanted: Answer) -> None:
    out, lse = attend(backend, *inputs, **wanted.options, return_lse=True)
    assert out.dtype == inputs[0].dtype and out.shape == wanted.out.shape
    check_out(out, wanted)
    check_lse(lse, wanted)


@cache
def case(n: Sizes, dtype: torch.dtype, mask: str | None = None, kind: str = "normal") -> tuple[Inputs, Answer]:
    inputs = make(n, dtype, kind)
    build: Any = None if mask is None else LONG.get(mask) or (lambda n: MASKS[mask](n).mask)
    return inputs, answer_of(inputs, **({} if mask is None else {"mask": build(n)}))


@pytest.mark.sweep
@natives
@dtypes
@forms
def test_every_mask(backend: str, dtype: torch.dtype, form: str) -> None:
    with collected() as attempt:
        for name in drawn((*MASKS, *LONG)):
            attempt(name, check, backend, *case(FORMS[form], dtype, name))


@cache
def with_options(n: Sizes, dtype: torch.dtype) -> tuple[Inputs, dict[str, Answer]]:
    inputs, answers, sinks = make(n, dtype), {}, torch.linspace(-2, 2, n.H)
    for name in (None, "causal", "bias BHTS"):
        mask = {} if name is None else {"mask": MASKS[name](n).mask}
        for options in ({"softcap": 1.3}, {"scale": -0.3}, {"sinks": sinks}, {"softcap": 2.0, "sinks": sinks}):
            answers[f"{name}, {list(options)}"] = answer_of(inputs, **options, **mask)
    return inputs, answers


@pytest.mark.sweep
@natives
@dtypes
@forms
def test_options(backend: str, dtype: torch.dtype, form: str) -> None:
    n, (inputs, answers) = FORMS[form], with_options(FORMS[form], dtype)
    with collected() as attempt:
        for what, answer in answers.items():
            attempt(what, check, backend, inputs, answer)
        gate = torch.linspace(0, 1, n.H).to(dtype)
        plain, gated = attend(backend, *inputs), attend(backend, *inputs, gate=gate)
        near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-7}
        attempt("gate", torch.testing.assert_close, gated, plain * gate.view(1, -1, 1, 1), **near)


@natives
@dtypes
def test_every_number_of_keys(backend: str, dtype: torch.dtype) -> None:
    lengths = (*range(1, 131), 255, 256, 257, 1023, 1024, 1025, 2049)
    with collected() as attempt:
        for S in drawn(lengths):
            for n in (Sizes(2, 1, 1, 1, S, 16, 16), Sizes(1, 4, 1, 1, S, 80, 72), Sizes(1, 2, 1, 11, S, 16, 16)):
                attempt(n, check, backend, *case(n, dtype))


@natives
@dtypes
def test_every_number_of_rows(backend: str, dtype: torch.dtype) -> None:
    """Few rows have a kernel of their own, for 1, 2, 4 and 8; more rows another."""
    with collected() as attempt:
        for T, G in drawn([*itertools.product((*range(1, 18), 33, 48, 49, 130), (1, 2, 3))]):
            n = Sizes(1, G, 1, T, 70, 24, 24)
            attempt(n, check, backend, *case(n, dtype, "causal"))


@natives
@dtypes
def test_every_head_dim(backend: str, dtype: torch.dtype) -> None:
    with collected() as attempt:
        for D in drawn((*range(1, 131), *range(131, 321, 7), 255, 256, 257, 320)):
            for n in (Sizes(1, 2, 1, 1, 9, D, 321 - D), Sizes(1, 1, 1, 5, 21, D, D)):
                attempt(n, check, backend, *case(n, dtype))
        for n in (Sizes(1, 16, 1, 1, 300, 576, 512), Sizes(1, 4, 1, 2, 17, 5003, 4999)):
            attempt(n, check, backend, *case(n, dtype))


@pytest.mark.sweep
@pytest.mark.parametrize("backend", sorted({*NATIVE, *(f"native-{isa}" for isa in ISAS)}))
@dtypes
@pytest.mark.parametrize("T", [1, 40])
def test_numbers_of_every_size(backend: str, dtype: torch.dtype, T: int) -> None:
    """Outliers in a channel, tokens of very different scales, scales below 0, sharp softmaxes, a score of zero."""
    n = Sizes(1, 8, 2, T, 300, 64, 64)
    q, k, v = make_qkv(*n)
    wide = torch.logspace(-4, 2, n.S)[torch.randperm(n.S, generator=torch.Generator().manual_seed(1))]
    outlier = torch.ones(n.D).index_fill(0, torch.tensor([5]), 40.0)
    k8, v8 = quantize(k), quantize(v)
    made = {
        "an outlier in the query": (q * outlier, k8, v8),
        "an outlier in the keys": (q, quantize(k * outlier), v8),
        "values of every size": (q, k8, quantize(v * wide[:, None])),
        "keys of every size": (q, quantize(k * wide[:, None] / 30), v8),
        "negative scales": (q, Quantized(k8.data, -k8.scale), Quantized(v8.data, -v8.scale)),
        "sharp": (8 * q, k8, v8),
        "no query": (0 * q, k8, v8),
        "no value": (q, k8, quantize(0 * v)),
        "-128": (q, Quantized(k8.data.clamp(max=-1) - 1, k8.scale), Quantized(v8.data.fill_(-128), v8.scale)),
    }
    with collected() as attempt:
        for what, (query, key, value) in made.items():
            inputs = (query.to(dtype), key, value)
            attempt(what, check, backend, inputs, answer_of(inputs))


@natives
@dtypes
@pytest.mark.parametrize("D", [509, 1021, 1024, 1031, 2053])
def test_no_sum_of_products_overflows(backend: str, dtype: torch.dtype, D: int) -> None:
    """Every number as large as it can be: codes of -128, and queries of 254 / 128, the largest with two digits."""
    data, scales = torch.full((1, 1, 131, D), -128, dtype=torch.int8), torch.linspace(0.5, 1, 131).view(1, 1, -1)
    q, k, v = torch.full((1, 4, 1, D), 254 / 128).to(dtype), Quantized(data, scales / D), Quantized(data, scales)
    check(backend, (q, k, v), answer_of((q, k, v)))


@natives
@pytest.mark.parametrize("T", [1, 40])
def test_powers_of_two_change_no_bit(backend: str, T: int) -> None:
    """Of queries and keys, which cancel, and of values: however small or large the numbers, none is taken for 0."""
    q, key, value = make(Sizes(1, 8, 2, T, 300, 64, 64))
    out, lse = attend(backend, q, key, value, return_lse=True)
    with collected() as attempt:
        for power in (-60, -44, -17, 23, 60):
            up, down = 2.0**power, 2.0**-power
            scaled = (q * up, Quantized(key.data, key.scale * down), Quantized(value.data, value.scale * up))
            again, its = attend(backend, *scaled, return_lse=True)
            attempt(power, assert_same_bits, again * down, out)
            attempt(f"{power}, lse", assert_same_bits, its, lse)


@pytest.mark.sweep
@natives
@dtypes
@forms
def test_strides(backend: str, dtype: torch.dtype, form: str) -> None:
    """Data and scale in every layout, with NaN and 127 in the gaps: the bits of contiguous ones."""
    q, key, value = make(FORMS[form], dtype)

    def same(k: Quantized, v: Quantized) -> None:
        plain = (Quantized(x.data.contiguous(), x.scale.contiguous()) for x in (k, v))
        theirs = attend(backend, q, *plain, return_lse=True)
        for x, y in zip(attend(backend, q, k, v, return_lse=True), theirs, strict=True):
            assert_same_bits(x, y)
            assert not bool(x.isnan().any()), "a gap was read"

    def lay(x: Quantized, i: int) -> Quantized:
        data = strided(x.data, every[i % len(every)], slack=127)
        scale = strided(x.scale[..., None], every[(i + 3) % len(every)], slack=math.nan)[..., 0]
        return Quantized(data, scale)

    every = tuple(STRIDES)
    with collected() as attempt:
        for i in drawn(range(len(every))):
            attempt(f"key {every[i]}", same, lay(key, i), value)
            attempt(f"value {every[i]}", same, key, lay(value, i))
        one = [x.data.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (key, value)]
        attempt("last axis last", same, Quantized(one[0], key.scale), Quantized(one[1], value.scale))


@pytest.mark.sweep
@natives
@dtypes
@forms
def test_poison(backend: str, dtype: torch.dtype, form: str) -> None:
    """NaN, Inf and other numbers in scales and data: unseen they change no bit, attended a NaN or an Inf shows."""
    n = FORMS[form]
    q, key, value = make(n, dtype)
    keys = torch.rand(n.B, n.K, n.S, generator=torch.Generator().manual_seed(4)) < 0.06
    with collected() as attempt:
        for name in drawn(("causal", "window", "lengths start", "segments", "keep", "bias", "all")):
            mask, sees = made(name, n)
            met, _ = split_rows(sees, keys)
            clean = attend(backend, q, key, value, mask=mask, return_lse=True)
            for what in (math.nan, math.inf, 3e38, 1e30, 0.0):
                for part in ("key", "value"):
                    quantized = key if part == "key" else value
                    bad = Quantized(
                        torch.where(keys[..., None], -quantized.data, quantized.data),
                        quantized.scale.masked_fill(keys, what),
                    )
                    out = attend(
                        backend, q, *((bad, value) if part == "key" else (key, bad)), mask=mask, return_lse=True
                    )
                    attempt(f"{name}, {what} in {part}", poisoned, out, clean, met, what)


@natives
@dtypes
@pytest.mark.parametrize("T", [2, 8, 40])
def test_poison_in_a_query(backend: str, dtype: torch.dtype, T: int) -> None:
    """Of one row: NaN shows there, and whatever it is, other rows keep every bit."""
    q, key, value = make(Sizes(2, 4, 4, T, 131, 24, 17), dtype)
    clean = attend(backend, q, key, value, return_lse=True)
    others = torch.arange(T) != 1
    with collected() as attempt:
        for what in (math.nan, -math.inf, 1e4, 3e4):
            bad = q.clone()
            bad[:, :, 1, 3] = what
            ours = attend(backend, bad, key, value, return_lse=True)
            attempt(what, poisoned, ours, clean, ~others.expand(2, 4, T), what)


def poisoned(ours: Any, clean: Any, met: Tensor, what: float) -> None:
    for x, y in zip(ours, clean, strict=True):
        assert_same_bits(x[~met], y[~met])
        assert abs(what) <= 1e30 or bool(x[met].isnan().all()), (
            "attended, and does not show"
        )  # 3e38 times an int8 is Inf


BITS = {
    "decoding": Sizes(3, 8, 2, 1, 700, 64, 64),
    "decoding, split": Sizes(2, 8, 2, 1, 4200, 128, 128),
    "many rows": Sizes(2, 6, 2, 211, 307, 40, 24),
}


@pytest.mark.sweep
@natives
@dtypes
@pytest.mark.parametrize("n", BITS.values(), ids=BITS)
def test_bits(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """The same for any number of threads, again and again, and for a batch row or a head group alone."""
    q, key, value = make(n, dtype)
    mask = headwise.causal()
    with threads(1):
        one = attend(backend, q, key, value, mask=mask, return_lse=True)
    for count in (2, 3, 4, 8):
        with threads(count):
            for x, y in zip(attend(backend, q, key, value, mask=mask, return_lse=True), one, strict=True):
                assert_same_bits(x, y, what=f"{count} threads")
    G = n.H // n.K
    for b in range(n.B):
        for g in range(n.K):
            some, heads = (slice(b, b + 1), slice(g, g + 1)), (slice(b, b + 1), slice(g * G, (g + 1) * G))
            k, v = (Quantized(x.data[some], x.scale[some]) for x in (key, value))
            for x, y in zip(attend(backend, q[heads], k, v, mask=mask, return_lse=True), one, strict=True):
                assert_same_bits(x, y[heads], what=f"row {b}, group {g}")


@pytest.mark.parametrize("backend", BEST)
def test_a_thousand_times(backend: str) -> None:
    inputs = make(Sizes(1, 4, 2, 1, 1100, 64, 64), torch.bfloat16)
    with threads(2):
        first = attend(backend, *inputs)
        for _ in range(1000):
            assert torch.equal(attend(backend, *inputs), first)


@natives
def test_many_heads_and_far_elements(backend: str) -> None:
    """B x H = 70,000; and keys that lie more than 2^31 elements apart."""
    n = Sizes(7000, 10, 5, 1, 3, 4, 4)
    check(backend, *case(n, torch.float32))
    n = Sizes(2, 2, 1, 1, 5, 16, 16)
    q, key, value = make(n)
    far = (1 << 31) + 64
    room = torch.empty(far + 5 * 16, dtype=torch.int8)  # pages that are not touched cost nothing
    apart = room.as_strided((2, 1, 5, 16), (far, 0, 16, 1)).copy_(key.data)
    assert_same_bits(attend(backend, q, Quantized(apart, key.scale), value), attend(backend, q, key, value))


@natives
@forms
def test_dropout(backend: str, form: str) -> None:
    """The weights that floats would keep, by the same seed."""
    q, key, value = make(FORMS[form])
    outs = []
    for k, v in ((key, value), (key.dequantize(), value.dequantize())):
        torch.manual_seed(3)
        outs.append(attend(backend, q, k, v, dropout=0.4))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=2e-6)


@natives
def test_the_error_beside_floats(backend: str) -> None:
    """A long decode in float32, where sums are small: as near to float64 as the kernel is on float32."""
    inputs = make(Sizes(1, 8, 2, 1, 8192, 128, 128))
    wanted = answer_of(inputs)

    def off(out: Tensor) -> float:
        return float((out.double() - wanted.out).square().mean().sqrt() / wanted.out.square().mean().sqrt())

    floats = off(attend(backend, inputs[0], *(x.dequantize() for x in inputs[1:])))
    ours = off(attend(backend, *inputs))
    assert ours < 2 * floats + 2e-7, f"{ours:.1e}, on floats {floats:.1e}"


def test_these_tests_can_fail() -> None:
    """One data bit, or one scale off by a hundredth, is seen."""
    inputs, wanted = case(FORMS["decoding"], torch.float32)
    q, key, value = inputs
    data, scale = value.data.clone(), value.scale.clone()
    data[0, 0, 3, 2] += 1
    scale[0, 0, 3] *= 1.01
    for bad in (Quantized(data, value.scale), Quantized(value.data, scale)):
        with pytest.raises(AssertionError):
            check("auto", (q, key, bad), wanted)
