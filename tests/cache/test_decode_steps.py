"""Decode steps and caches against definitions that share no code with them: every mask's predicate cell by cell, and
lists of tokens (`list_cache.py`)."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from backends import instructions, natives, needs_native
from list_cache import ListCache
from mask_cases import GATHERED, MASKS, Sizes, dense
from native_cases import collected
from test_native_step import call, copied, refused_untouched, step
from torch import Tensor

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache
from headwise.testing import assert_same_bits, naive, strided

pytestmark = pytest.mark.unchecked
FEW_KEYS, PAGES = Sizes(2, 6, 3, 1, 7, 11, 13), Sizes(3, 4, 2, 1, 131, 5, 3)
WINDOW, FIRST = 5, 3


def cache_of(kind: str, n: Sizes) -> Any:
    if kind == "static":
        return StaticCache(n.B, n.K, n.D, n.V, capacity=n.S + 9)
    if kind == "paged":
        return PagedCache(PagePool(3 * n.B, n.K, n.D, n.V), n.B)
    window, first = (n.S + 1, 0) if kind == "rolling" else (WINDOW, FIRST)
    return RollingCache(n.B, n.K, n.D, n.V, window=window, first=first, chunk=n.S + 1)


def definition(
    n: Sizes, allowed: Tensor, added: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """softmax(Q K^T) V in float64 over all keys, from the matrix of what is seen."""
    products = options.get("scale", n.D**-0.5) * (query.double() @ key.double().repeat_interleave(n.H // n.K, 1).mT)
    if "softcap" in options:
        products = options["softcap"] * torch.tanh(products / options["softcap"])
    logits = (products + added).masked_fill(~allowed, -math.inf)
    sinks = options.get("sinks", torch.full((n.H,), -math.inf))
    logits = torch.cat([logits, sinks.double().view(1, -1, 1, 1).expand(n.B, -1, n.T, 1)], -1)
    weights = torch.softmax(logits, -1)[..., :-1].masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return weights @ value.double().repeat_interleave(n.H // n.K, 1)


@needs_native
@pytest.mark.parametrize("kind", ["static", "paged", "rolling", "rolling first"])
@pytest.mark.parametrize("n", [FEW_KEYS, PAGES], ids=["few keys", "over pages"])
def test_a_step_under_every_mask_is_the_definition(kind: str, n: Sizes) -> None:
    """All heads and rows of it: a mask may say something else of each."""
    make, taken = torch.Generator().manual_seed(3), 0
    query, key, value = (
        torch.randn(n.B, heads, length, width, generator=make)
        for heads, length, width in ((n.H, 1, n.D), (n.K, n.S, n.D), (n.K, n.S, n.V))
    )
    every: tuple[dict[str, Any], ...] = ({}, {"scale": 0.7, "softcap": 1.3, "sinks": torch.linspace(-1, 2, n.H)})
    with collected() as attempt, torch.no_grad():
        for turn, name in enumerate(MASKS):
            allowed, added = dense(name, n)
            if kind == "rolling first":
                j = torch.arange(n.S)
                allowed = allowed & ((j >= n.S - WINDOW) | (j < FIRST))
            options = every[turn % 2]
            cache = cache_of(kind, n).append(key[:, :, :-1], value[:, :, :-1])
            mask = MASKS[name](n).mask
            taking = cache.takes_steps(mask)
            out = cache.step(query, key[:, :, -1:], value[:, :, -1:], mask=mask, **options) if taking else None
            taken += out is not None
            if out is None:
                cache.append(key[:, :, -1:], value[:, :, -1:])
                out = headwise.attention(query, cache, mask=mask, **options)
            want = definition(n, allowed, torch.where(allowed, added, 0.0), query, key, value, **options)
            near = {"rtol": 2e-6, "atol": 4e-6}
            attempt(name, torch.testing.assert_close, out.double(), want, **near)
    could = len(MASKS) - len(GATHERED)
    assert taken >= could * 3 // 4, f"only {taken} steps of {could} were taken by the kernel"


def _of_heads_and_rows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + j + b + 2 * h) % 5 != 0


def _of_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j + h) % 3 != 1


RULES = {
    "of heads and rows": lambda: headwise.rule(_of_heads_and_rows),
    "of heads": lambda: headwise.rule(_of_heads),
    "the other keys": lambda: ~headwise.rule(_of_heads_and_rows),
    "two": lambda: headwise.rule(_of_heads_and_rows) & headwise.rule(_of_heads),
    "either": lambda: headwise.rule(_of_heads) | headwise.window(2),
    "beside a bias": lambda: headwise.rule(_of_heads_and_rows) & headwise.alibi(torch.tensor([0.5, 0.25, 1.0, 2.0])),
}


@needs_native
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", ["static", "paged", "rolling"])
def test_a_step_asks_a_function_about_every_head_and_row(kind: str, name: str) -> None:
    """A function that no size has been told yet: the call has them."""
    n, masks = PAGES, RULES[name]
    make = torch.Generator().manual_seed(5)
    key, value = (torch.randn(n.B, n.K, n.S + 2, width, generator=make) for width in (n.D, n.V))
    b, h, j = torch.meshgrid(torch.arange(n.B), torch.arange(n.H), torch.arange(n.S + 2), indexing="ij")
    with torch.no_grad():
        cache = cache_of(kind, n).append(key[:, :, : n.S - 1], value[:, :, : n.S - 1])
        for length in (n.S, n.S + 1):
            query, new = torch.randn(n.B, n.H, 1, n.D, generator=make), slice(length - 1, length)
            assert cache.takes_steps(masks())
            out = cache.step(query, key[:, :, new], value[:, :, new], mask=masks())
            assert out is not None, "the kernel takes every rule"
            both, heads = _of_heads_and_rows(b, h, 0 * j, j), _of_heads(b, h, 0 * j, j)
            allowed = {
                "of heads and rows": both,
                "of heads": heads,
                "the other keys": ~both,
                "two": both & heads,
                "either": heads | (j > length - 3),
                "beside a bias": both,
            }[name][:, :, None, :length]
            added = torch.zeros(n.B, n.H, 1, length)
            if name == "beside a bias":
                slopes = torch.tensor([0.5, 0.25, 1.0, 2.0]).view(1, -1, 1, 1)
                added = added - slopes * (length - 1 - torch.arange(length))
            pair = key[:, :, :length], value[:, :, :length]
            want = definition(n._replace(S=length), allowed, added, query, *pair)
            torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("kind", ["static", "paged", "rolling"])
def test_drawn_schedules_of_one_process_give_what_lists_of_tokens_give(kind: str) -> None:
    """Ragged rows, of which some cross the edge of a page and others do not, padding on both sides, rows that come in
    another order; steps of the kernel, and appends that are attended."""
    H, K, D, V = 4, 2, 5, 3
    wrong = []
    with torch.no_grad():
        for seed in range(8):
            make, draw = random.Random(seed), torch.Generator().manual_seed(seed)
            B, window, first = make.choice([1, 2, 3]), make.choice([3, 40]), make.choice([0, 2, 7])
            cache: Any
            if kind == "static":
                cache = StaticCache(B, K, D, V, capacity=600)
            elif kind == "paged":
                cache = PagedCache(PagePool(30, K, D, V), B)
            else:
                cache = RollingCache(B, K, D, V, window=window, first=first)
            lists = ListCache(B, window if kind == "rolling" else None, first if kind == "rolling" else 0)

            def tensor(heads: int, T: int, width: int, draw: torch.Generator = draw, B: int = B) -> Tensor:
                return torch.randn(B, heads, T, width, generator=draw)

            for turn in range(7):
                T = make.choice([1, 1, 1, 2, 9]) if turn else make.choice([60, 125, 128])
                ragged = make.random() < (0.4 if T > 1 else 0.2)
                lengths = [make.randint(0, T) for _ in range(B)] if ragged else None
                side: Any = make.choice(["left", "right"])
                query, key, value = tensor(H, T, D), tensor(K, T, D), tensor(K, T, V)
                if make.random() < 0.2:
                    rows = [make.randrange(B) for _ in range(B)]
                    cache = cache.fork().reorder(rows)
                    lists.reorder(rows)
                sinks = torch.randn(H, generator=draw) if make.random() < 0.3 else None
                out = None
                if T == 1 and lengths is None and cache.takes_steps():
                    out = cache.step(query, key, value, sinks=sinks)
                if out is None:
                    cache.append(key, value, lengths=lengths, side=side)
                    out = headwise.attention(query, cache, sinks=sinks)
                lists.append(key, value, lengths, side)
                if T > 9:
                    continue  # a prompt: the lists take their time
                want, lse = lists.attend(query, sinks=sinks)
                far = float((out - want).abs().max())
                if far > 4e-6 or cache.lengths != lists.lengths or bool((out[lse == -math.inf] != 0).any()):
                    wrong.append((seed, turn, lists.lengths, far))
    assert not wrong, wrong


# -- the operator's angles ---------------------------------------------------------------------------------------------


@needs_native
def test_angles_are_those_of_one_token() -> None:
    B, K = 3, 2
    with collected() as attempt:
        for tokens in (2, 3, 0):
            for rows in (1, B):
                changes = {name: torch.randn(rows, tokens, 3) for name in ("cos", "sin")}
                attempt((tokens, rows), refused_untouched, copied(call()) | changes)
        for shape in ((B, 1, 1, 3), (2, 3), (2, 1, 3), (B, K, 3), (1, B, 3)):
            changes = {name: torch.randn(shape) for name in ("cos", "sin")}
            attempt(shape, refused_untouched, copied(call()) | changes)


@natives
def test_rows_of_cosines_and_sines_may_be_one_for_all_each_by_itself(backend: str) -> None:
    """Beside cosines of each row, sines of one, in any layout."""
    B, n = 3, 3
    cos, sin = torch.randn(B, n), torch.randn(B, n)
    forms = {
        "one": lambda x: x[:1],
        "each": lambda x: x,
        "each, apart": lambda x: torch.stack([x, x + 1], -1)[..., 0],
        "each, turned": lambda x: x.mT.contiguous().mT,
        "one, apart": lambda x: torch.stack([x, x + 1], -1)[:1, :, 0],
    }
    with instructions(backend), collected() as attempt:
        for of_cos, one in forms.items():
            for of_sin, other in forms.items():
                arguments = call(cos=one(cos), sin=other(sin))
                plain = {
                    name: (x[:1] if "one" in form else x).expand(B, n).contiguous()
                    for name, form, x in (("cos", of_cos, cos), ("sin", of_sin, sin))
                }
                want = step(copied(arguments) | plain)
                attempt((of_cos, of_sin), assert_same_bits, step(arguments | {}), want)


@natives
def test_what_turns_is_a_complex_product(backend: str) -> None:
    """(x + i y)(cos + i sin) of each pair, in float64: of pairs side by side and apart, of some numbers of a head."""
    with instructions(backend), collected() as attempt:
        for interleaved in (False, True):
            for first, turned in ((0, 14), (5, 6), (8, 6), (0, 2)):
                angle = torch.randn(3, turned // 2)
                inputs = call(first=first, turned=turned, interleaved=interleaved, cos=angle.cos(), sin=angle.sin())
                key = inputs["key"].double()
                x = key[..., first : first + turned]
                pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
                spun = (
                    torch.view_as_complex(pairs.contiguous())
                    * torch.polar(torch.ones(()).double(), angle.double())[:, None, None]
                )
                parts = torch.view_as_real(spun)
                parts = parts.flatten(-2) if interleaved else parts.mT.flatten(-2)
                want = torch.cat([key[..., :first], parts, key[..., first + turned :]], -1)
                step(inputs)
                for b, place in enumerate(inputs["places"]):
                    near = {"rtol": 1e-6, "atol": 1e-6}
                    what = (interleaved, first, turned, b)
                    attempt(
                        what, torch.testing.assert_close, inputs["keys"][b, :, place].double(), want[b, :, 0], **near
                    )


# -- what may not be read, in every layout -----------------------------------------------------------------------------


@natives
@pytest.mark.parametrize("T", [1, 3, 40])
def test_a_nan_in_strided_keys_or_values_reaches_the_rows_that_see_it_alone(backend: str, T: int) -> None:
    """Keys and values of layouts that differ: each is searched by its own strides."""
    n = Sizes(2, 4, 2, T, 67, 12, 8)
    make = torch.Generator().manual_seed(T)
    query = torch.randn(n.B, n.H, T, n.D, generator=make)
    patterns = ("step 3 in 3", "step 2 in 2", "order 0132", "odd offset", "rows padded by 3")
    with instructions(backend) as name, collected() as attempt:
        for dtype in (torch.float32, torch.bfloat16):
            q = query.to(dtype)
            key, value = (torch.randn(n.B, n.K, n.S, w, generator=make).to(dtype) for w in (n.D, n.V))
            whole = headwise.attention(q, key, value, mask=headwise.causal(), backend=name)
            for which in ("key", "value"):
                for pattern in patterns:
                    for column in (1, -1):
                        bad = {"key": key.clone(), "value": value.clone()}
                        bad[which][1, 0, 60, column] = math.nan
                        bad[which] = strided(bad[which], pattern, slack=1e30)
                        out = headwise.attention(q, bad["key"], bad["value"], mask=headwise.causal(), backend=name)
                        rows = torch.zeros(n.B, n.H, T, 1, dtype=torch.bool)
                        rows[1, :2] = (torch.arange(T) + n.S - T >= 60)[:, None]
                        want = whole.masked_fill(rows, math.nan)
                        near = {"rtol": 0.0, "atol": 2e-2 if dtype == torch.bfloat16 else 2e-6, "equal_nan": True}
                        attempt((dtype, which, pattern, column), torch.testing.assert_close, out, want, **near)


def test_naive_agrees_with_the_definition_here() -> None:
    """The definition of this file is that of `headwise.testing`."""
    n = FEW_KEYS
    q, k, v = (torch.randn(*s).double() for s in ((2, 6, 1, 11), (2, 3, 7, 11), (2, 3, 7, 13)))
    ours = definition(n, torch.ones(2, 6, 1, 7, dtype=torch.bool), torch.zeros(2, 6, 1, 7), q, k, v)
    torch.testing.assert_close(ours, naive(q, k, v)[0])
