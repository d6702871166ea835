"""The native append of int8 caches: the bits of `quantize`, written where they belong and nowhere else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from backends import BEST, instructions, natives, needs_native
from native_cases import collected
from test_invariance import threads
from torch import Tensor

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, Quantized, RollingCache, StaticCache, quantize
from headwise.cache.storage import Store
from headwise.ops.native import append as native_append
from headwise.ops.native import library
from headwise.testing import STRIDES, assert_same_bits, strided

B, K, T, D, V = 3, 2, 5, 19, 11
ROWS, PLACES = 4, 23
NUMBERS = {
    "normal": lambda x: x,
    "zeros": lambda x: 0 * x,
    "minus zeros": lambda x: -0.0 * x.abs(),
    "ties": lambda x: ((x * 40).round().clamp(-126, 126) + 0.5).index_fill(-1, torch.tensor([0]), 127.0),
    "denormal": lambda x: x * 1e-40,
    "the smallest": lambda x: (x * 40).round() * 2.0**-149,
    "largest": lambda x: x.sign() * 3e38 * x.abs().clamp(0.1, 1),
    "NaN": lambda x: x.masked_fill(x > 1, math.nan) * 9,
    "Inf": lambda x: x.masked_fill(x > 1, math.inf).masked_fill(x < -1, -math.inf),
    "NaN and Inf": lambda x: (x * 300).masked_fill(x > 1, -math.inf).masked_fill(x < -1, math.nan),
    "beyond float32": lambda x: x * 1e39,
}  # fmt: skip


def stores(rows: int = ROWS, places: int = PLACES, value_dim: int | None = V) -> list[Tensor | None]:
    """Keys, their scales, values and theirs, full of what must stay."""
    made: list[Tensor | None] = []
    for width in (D, value_dim):
        made.append(None if width is None else torch.full((rows, K, places, width), 77, dtype=torch.int8))
        made.append(None if width is None else torch.full((rows, K, places), 0.5))
    return made


def tokens(dtype: torch.dtype = torch.float32, kind: str = "normal") -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(3)
    made = (NUMBERS[kind](torch.randn(B, K, T, n, generator=source).double()).to(dtype) for n in (D, V))
    key, value = made
    return key, value


SPANS = [(0, 0, 1, 4, 5), (2, 3, 3, 0, 2), (1, 1, 1, 9, 3), (0, 2, 0, 22, 1)]


def check(key: Tensor, value: Tensor | None, spans: Any = SPANS) -> None:
    """Against `quantize`, bit for bit; elsewhere nothing has changed."""
    got, wanted = (stores(value_dim=None if value is None else V) for _ in range(2))
    for x, (data, scale) in ((key, wanted[:2]), (value, wanted[2:])):
        if x is None:
            continue
        small = quantize(x)
        for row, place, to, at, count in spans:
            data[to, :, at : at + count] = small.data[row, :, place : place + count]
            scale[to, :, at : at + count] = small.scale[row, :, place : place + count]
    torch.ops.headwise.append_codes(key, value, *got, [n for span in spans for n in span])
    for one, other in zip(got, wanted, strict=True):
        if one is not None:
            assert_same_bits(one, other)


@natives
def test_the_bits_of_quantize(backend: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    with instructions(backend), collected() as attempt:
        for kind in NUMBERS:
            for dtype in dtypes:
                attempt(f"{kind} {dtype}", check, *tokens(dtype, kind))


@natives
def test_every_width(backend: str) -> None:
    with instructions(backend), collected() as attempt:
        for width in (*range(1, 36), 63, 64, 65, 128, 130, 576):
            x = torch.randn(1, 1, 3, width, generator=torch.Generator().manual_seed(width))
            x[0, 0, 1, -1] = 50.0  # the largest is the last
            data, scale = torch.zeros(1, 1, 3, width, dtype=torch.int8), torch.zeros(1, 1, 3)
            torch.ops.headwise.append_codes(x, None, data, scale, None, None, [0, 0, 0, 0, 3])
            small = quantize(x)
            attempt(f"{width}", assert_same_bits, data, small.data)
            attempt(f"{width}, scale", assert_same_bits, scale, small.scale)


@pytest.mark.parametrize("backend", BEST)
def test_any_layout_is_read(backend: str) -> None:
    key, value = tokens()
    with collected() as attempt:
        for name in STRIDES:
            attempt(name, check, strided(key, name, slack=math.nan), strided(value, name, slack=math.nan))
        attempt("expanded", check, key[:1, :1, :1].expand(B, K, T, D), value)
        attempt("negative", check, torch._neg_view(key), value)
        attempt("shared", check, key, None)


@pytest.mark.parametrize("backend", BEST)
def test_many_tokens_on_threads(backend: str) -> None:
    """Enough for threads, and over more tokens than one of them takes at a time."""
    x = torch.randn(2, 2, 500, 64, generator=torch.Generator().manual_seed(1))
    small = quantize(x)
    for count in (1, 3):
        data, scale = torch.zeros(2, 2, 500, 64, dtype=torch.int8), torch.zeros(2, 2, 500)
        with threads(count):
            torch.ops.headwise.append_codes(
                x, x, data, scale, data.clone(), scale.clone(), [0, 0, 1, 0, 500, 1, 0, 0, 0, 500]
            )
        assert_same_bits(data, small.data.flip(0))
        assert_same_bits(scale, small.scale.flip(0))


# -- the caches --------------------------------------------------------------------------------------------------------


def caches(shared: bool) -> Iterator[tuple[str, Callable[[], KVCache]]]:
    sizes: Any = {"dtype": torch.int8, "shared": shared}
    value_dim = 9 if shared else V
    yield "static", lambda: StaticCache(B, K, D, value_dim, capacity=700, **sizes)
    yield "paged", lambda: PagedCache(PagePool(30, K, D, value_dim, **sizes), B)
    yield "rolling", lambda: RollingCache(B, K, D, value_dim, window=130, first=3, chunk=150, **sizes)


@needs_native
@pytest.mark.parametrize("shared", [False, True])
def test_every_cache_appends_in_one_call(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of their own, padding on either side, over the ends of pages: what Python quantises, by one call each."""
    calls: list[int] = []
    operator = library.append_codes
    monkeypatch.setattr(library, "append_codes", lambda *args: calls.append(1) or operator(*args))

    def lives(make: Callable[[], KVCache], native: bool) -> list[Any]:
        if not native:
            monkeypatch.setattr(Store, "quantize", lambda *_: False)
        draw, cache, seen = random.Random(7), make(), []
        source = torch.Generator().manual_seed(7)
        for step in range(9):
            count = (1, 140, 1, 5)[step % 4]
            key, value = (torch.randn(B, K, count, n, generator=source) for n in (D, V))
            lengths = [draw.randint(0, count) for _ in range(B)] if step > 4 else None
            cache.append(key, *([] if shared else [value]), lengths=lengths, side=draw.choice(["left", "right"]))
            q = torch.randn(B, 2 * K, 1, D, generator=source)
            seen.append(headwise.attention(q, cache))
        monkeypatch.setattr(Store, "quantize", STORE_QUANTIZE)
        return seen

    with collected() as attempt:
        for name, make in caches(shared):
            native, python = lives(make, True), lives(make, False)
            assert len(calls) == 9, (name, calls)
            calls.clear()
            for step, (x, y) in enumerate(zip(native, python, strict=True)):
                attempt(f"{name}, step {step}", assert_same_bits, x, y)


STORE_QUANTIZE = Store.quantize


@needs_native
def test_what_python_must_quantise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library, under torch.func, and where the operator refuses: the same numbers."""
    key, value = tokens()
    made = StaticCache(B, K, D, V, capacity=9, dtype=torch.int8).append(key, value).view()

    def same(cache: KVCache) -> None:
        for x, y in zip(cache.view(), made, strict=True):
            assert isinstance(x, Quantized) and isinstance(y, Quantized)
            assert_same_bits(x.data, y.data)
            assert_same_bits(x.scale, y.scale)

    raw = torch.zeros(key.nbytes + 1, dtype=torch.uint8).numpy()
    odd = torch.frombuffer(memoryview(raw)[1:], dtype=torch.float32).view(key.shape).copy_(key)
    same(StaticCache(B, K, D, V, capacity=9, dtype=torch.int8).append(odd, value))
    learned = key.clone().requires_grad_()
    with torch.no_grad():
        cache = StaticCache(B, K, D, V, capacity=9, dtype=torch.int8).append(learned, value)
    same(cache)
    assert not any(x.scale.requires_grad for x in cache.view())
    monkeypatch.setattr(native_append, "error_for", lambda: "none here")
    same(StaticCache(B, K, D, V, capacity=9, dtype=torch.int8).append(key, value))


# -- the operator, as it is --------------------------------------------------------------------------------------------


def call(**change: Any) -> None:
    key, value = tokens()
    names = ("key_data", "key_scale", "value_data", "value_scale")
    arguments = {"key": key, "value": value, **dict(zip(names, stores(), strict=True)), "spans": [0, 0, 0, 0, T]}
    torch.ops.headwise.append_codes(**(arguments | {name: make(arguments[name]) for name, make in change.items()}))


SHARED = torch.zeros(ROWS * K * PLACES * V * 4, dtype=torch.int8)
REFUSED: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "no value": ({"value": lambda _: None}, "value, value_data and value_scale come together, or none of them"),
    "no scale": ({"value_scale": lambda _: None}, "come together"),
    "int8 tokens": ({"key": lambda x: x.to(torch.int8)}, "key: a dtype that headwise does not read"),
    "int64 tokens": ({"key": lambda x: x.long()}, "key must be floating point"),
    "bool tokens": ({"value": lambda x: x > 0}, "value must be floating point"),
    "float data": ({"key_data": lambda x: x.float()}, "key_data: a wrong dtype"),
    "half scales": ({"key_scale": lambda x: x.half()}, "key_scale: a wrong dtype"),
    "other scales": ({"value_scale": lambda x: x[:, :, :-1]}, r"value_scale must be \(rows, K, places\) of"),
    "another width": ({"key": lambda x: x[..., :-1]}, r"key \(B, K, T, n\) and key_data .* fit: \(3, 2, 5, 18\)"),
    "another head": ({"value": lambda x: x[:, :1]}, "do not fit"),
    "no columns": ({"key": lambda x: x[..., :0], "key_data": lambda x: x[..., :0]}, "do not fit"),
    "other tokens": ({"value": lambda x: x[:, :, :-1]}, "key and value have one batch, heads and length"),
    "three axes": ({"key": lambda x: x[0]}, "key must have 4 axes"),
    "every other column": (
        {"key": lambda x: x[..., :10], "key_data": lambda x: x[..., ::2]}, "key_data: its rows must be contiguous"
    ),
    "one row for all": ({"key_data": lambda x: x[:1].expand(ROWS, -1, -1, -1)}, "key_data: elements overlap"),
    "windows": ({"value_scale": lambda _: torch.zeros(99).as_strided((ROWS, K, PLACES), (20, 10, 1))}, "overlap"),
    "one scale": ({"value_scale": lambda x: x[:1, :1, :1].expand(ROWS, K, PLACES)}, "value_scale: elements overlap"),
    "one memory": (
        {"key_data": lambda x: SHARED[: x.numel()].view_as(x), "value_data": lambda x: SHARED[: x.numel()].view_as(x)},
        "value_data and key_data share memory",
    ),
    "one byte in common": (
        {"key_data": lambda x: SHARED[: x.numel()].view_as(x),
         "value_data": lambda x: SHARED[ROWS * K * PLACES * D - 1 :][: x.numel()].view_as(x)},
        "value_data and key_data share memory",
    ),
    "itself": (
        {"value": lambda x: SHARED[: 4 * x.numel()].view(torch.float32).view_as(x),
         "key_data": lambda x: SHARED[: x.numel()].view_as(x)}, "key_data and value share memory",
    ),
    "four numbers": ({"spans": lambda x: x[:4]}, "spans have five numbers each"),
    "a row too many": ({"spans": lambda x: [B, *x[1:]]}, "a span lies outside: row 3, 5 tokens from 0 on of"),
    "a page too many": ({"spans": lambda x: [0, 0, ROWS, 0, 1]}, "to row 4 from 0 on of"),
    "before the first": ({"spans": lambda x: [0, -1, 0, 0, 1]}, "1 tokens from -1 on"),
    "behind the last": ({"spans": lambda x: [0, 1, 0, 0, T]}, "5 tokens from 1 on"),
    "behind the end": ({"spans": lambda x: [0, 0, 0, PLACES - 4, T]}, "from 19 on of"),
    "far away": ({"spans": lambda x: [0, 0, 0, (1 << 63) - 1, T]}, "a span lies outside"),
    "very many": ({"spans": lambda x: [0, 0, 0, 1, (1 << 63) - 1]}, "a span lies outside"),
    "less than none": ({"spans": lambda x: [0, 0, 0, 0, -1]}, "a span lies outside"),
    "a place twice": ({"spans": lambda x: [0, 0, 2, 4, 3, 1, 0, 2, 6, 1]}, "two spans write place 6 of row 2"),
    "on no device": ({"key": lambda x: x.to("meta")}, "append_codes takes tensors of one device, got cpu, meta"),
    "a cache on no device": ({"key_data": lambda x: x.to("meta")}, "of one device, got cpu, meta"),
    "sparse tokens": ({"key": lambda x: x.to_sparse()}, "Could not run 'headwise::append_codes'"),
    "sparse scales": ({"key_scale": lambda x: x.to_sparse()}, "Could not run 'headwise::append_codes'"),
    "zeros without memory": ({"key_scale": lambda x: torch._efficientzerotensor(x.shape)}, "ZeroTensor"),
}  # fmt: skip


@needs_native
def test_refused() -> None:
    def refuses(what: str) -> None:
        change, why = REFUSED[what]
        with pytest.raises((RuntimeError, NotImplementedError), match=why):
            call(**change)

    call()
    with collected() as attempt:
        for what in REFUSED:
            attempt(what, refuses, what)


@needs_native
def test_a_refused_append_writes_nothing() -> None:
    kept = stores()
    with pytest.raises(RuntimeError, match="a span lies outside"):
        torch.ops.headwise.append_codes(*tokens(), *kept, [0, 0, 0, 0, T, 0, 0, 1, PLACES, 1])
    for x, y in zip(kept, stores(), strict=True):
        assert x is not None and y is not None
        assert_same_bits(x, y)


@pytest.mark.parametrize("backend", BEST)
def test_opcheck(backend: str) -> None:
    result = torch.library.opcheck(torch.ops.headwise.append_codes.default, (*tokens(), *stores(), [0, 0, 1, 2, T]))
    assert set(result.values()) == {"SUCCESS"}, result


def test_fakes_of_one_device_are_taken_and_of_two_are_refused() -> None:
    """A real tensor beside a fake one of another device would not be written."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        key = torch.empty(B, K, T, D)
        data, scale = torch.empty(B, K, T, D, dtype=torch.int8), torch.empty(B, K, T)
        span = [0, 0, 0, 0, 3]
        assert torch.ops.headwise.append_codes(key, None, data, scale, None, None, span) is None
        for place in range(3):
            mixed = [x.to("meta") if n == place else x for n, x in enumerate((key, data, scale))]
            with pytest.raises(RuntimeError, match="append_codes takes tensors of one device, got cpu, meta"):
                torch.ops.headwise.append_codes(mixed[0], None, *mixed[1:], None, None, span)
