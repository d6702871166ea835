"""What a cache refuses leaves it as it was, to the byte: every check comes before the first one is written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from malformed import fault_of, replacements
from malformed_calls import CACHES, B, D, H, K, V, appended, filled, normal
from torch import Tensor

import headwise
from headwise.cache import PagedCache, PagePool, StaticCache
from headwise.testing import assert_same_bits

pytestmark = [pytest.mark.unchecked, pytest.mark.filterwarnings("ignore::UserWarning")]

DRAWS = 60


def state_of(cache: Any) -> dict[str, Any]:
    """Every byte and every counter of a cache, and of the pool it takes its pages from."""
    pool = getattr(cache, "pool", None)
    store = cache._store if pool is None else pool.store
    tensors = {name: x.clone().view(torch.uint8) for name, x in vars(store).items() if isinstance(x, Tensor)}
    counters = {name: repr(x) for name, x in vars(cache).items() if name not in ("_store", "pool", "_table")}
    return {**tensors, **counters, "pool": None if pool is None else (list(pool._refs), list(pool._free))}


def assert_same_state(cache: Any, before: dict[str, Any], what: object) -> None:
    for name, now in state_of(cache).items():
        same = torch.equal(now, before[name]) if isinstance(now, Tensor) else now == before[name]
        assert same, f"{what}: {name} has changed"


def drawn(kind: str, method: str) -> list[tuple[str, str]]:
    """(argument, replacement) of a method's call."""
    good = appended(kind)[1] if method == "append" else {"lengths" if method == "truncate" else "rows": [1, 0]}
    every = [(argument, name) for argument, value in good.items() for name in replacements(value)]
    return random.Random(f"{kind} {method}").sample(every, min(DRAWS, len(every)))


@pytest.mark.parametrize("method", ["append", "truncate", "reorder"])
@pytest.mark.parametrize("kind", CACHES)
def test_a_refused_call_changes_nothing(kind: str, method: str) -> None:
    refused = 0
    cache: Any = filled(kind)
    before = state_of(cache)
    for argument, name in drawn(kind, method):
        good = appended(kind)[1] if method == "append" else {argument: [1, 0]}
        try:
            bad = replacements(good[argument])[name]()
        except Exception:
            continue  # torch makes no such tensor
        try:
            getattr(cache, method)(**{**good, argument: bad})
        except Exception as error:
            refused += 1
            assert fault_of(error) is None
            assert_same_state(cache, before, (argument, name))
        else:
            cache = filled(kind)
            before = state_of(cache)
    assert refused > 20


def tokens(T: int = 3) -> tuple[Tensor, Tensor]:
    return normal(B, K, T, D), normal(B, K, T, V)


NAMED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "fractions to truncate to": (
        lambda c: c.truncate([2.7, 2.7]),
        TypeError,
        "lengths are whole numbers: a sequence of ints, or an integer tensor of one axis; got [2.7, 2.7]",
    ),
    "fractions of rows": (lambda c: c.reorder([0.9, 1.9]), TypeError, "rows are whole numbers: a sequence of ints, or"),
    "bools for rows": (lambda c: c.reorder(torch.tensor([True, False])), TypeError, "got bool (2,) on cpu"),
    "True for a row": (lambda c: c.reorder([True, False]), TypeError, "got [True, False]"),
    "True to truncate to": (lambda c: c.truncate(True), TypeError, "lengths are whole numbers: a sequence of ints, or"),
    "fractions of tokens": (lambda c: c.append(*tokens(), lengths=[1.9, 2.5]), TypeError, "got [1.9, 2.5]"),
    "floats of tokens": (lambda c: c.append(*tokens(), lengths=torch.tensor([1.0, 2.0])), TypeError, "float32 (2,)"),
    "a text of rows": (lambda c: c.reorder("10"), TypeError, "rows are whole numbers: a sequence of ints, or"),
    "a set of rows": (lambda c: c.reorder({0, 1}), TypeError, "rows are whole numbers: a sequence of ints, or"),
    "a huge row": (lambda c: c.reorder([0, 10**400]), ValueError, "rows are at most"),
    "values elsewhere": (
        lambda c: c.append(tokens()[0], tokens()[1].to("meta")),
        ValueError,
        "this cache is on cpu; got a value float32 (2, 3, 3, 13) on meta; move it with .to(cache.device)",
    ),
    "keys elsewhere": (lambda c: c.append(tokens()[0].to("meta"), tokens()[1]), ValueError, "got a key float32"),
    "a side of its own": (lambda c: c.append(*tokens(), side="middle"), ValueError, 'side is "right" or "left"'),
}


@pytest.mark.parametrize("kind", ["static", "paged", "rolling", "static int8", "paged int8"])
@pytest.mark.parametrize("name", NAMED)
def test_what_was_found_is_refused(kind: str, name: str) -> None:
    call, error, text = NAMED[name]
    cache = filled(kind)
    before = state_of(cache)
    with pytest.raises(error) as caught:
        call(cache)
    assert text in str(caught.value) and fault_of(caught.value) is None
    assert_same_state(cache, before, name)


def test_what_is_whole_is_taken() -> None:
    """Tensors, arrays, numpy's integers and tensors of one number are integers all the same."""
    key, value = tokens()
    for lengths in (
        torch.tensor([1, 2]),
        torch.tensor([1, 2]).numpy(),
        [torch.tensor(1), torch.tensor(2)],
        range(1, 3),
    ):
        assert filled("static").append(key, value, lengths=lengths).lengths == [5, 6]
        assert filled("paged").truncate(lengths).lengths == [1, 2]
    assert filled("rolling").reorder(torch.tensor([1, 1, 0], dtype=torch.uint8)).batch == 3
    assert filled("static").truncate(n - 1 for n in (2, 3)).lengths == [1, 2]
    assert filled("rolling").truncate(n - 1 for n in (2, 3)).lengths == [1, 2], "read once, though both classes ask"


def test_the_state_sees_one_byte_and_one_counter() -> None:
    """A copy that left out either could not fail."""
    for kind in CACHES:
        cache: Any = filled(kind)
        before = state_of(cache)
        store = cache._store if "static" in kind else cache.pool.store
        flat = store.key.view(torch.uint8).view(-1)
        flat[-1] += 1
        with pytest.raises(AssertionError, match="key has changed"):
            assert_same_state(cache, before, kind)
        flat[-1] -= 1
        cache.lengths[0] += 1
        with pytest.raises(AssertionError, match="lengths has changed"):
            assert_same_state(cache, before, kind)


@pytest.mark.parametrize("kind", CACHES)
def test_the_default_device_is_not_the_caches(kind: str) -> None:
    """A cache on the CPU is used as ever where new tensors go elsewhere by default."""
    made: list[Any] = []
    for _ in "ab":
        torch.manual_seed(0)
        made.append(filled(kind))
    query, (_, good) = normal(B, H, 3, D), appended(kind)

    def life(cache: Any) -> list[Tensor]:
        outs = [headwise.attention(query, cache.append(**good))]
        outs.append(headwise.attention(query[:, :, -1:], cache.reorder([1, 0, 1]).reorder([1, 0])))
        step = {name: x[:, :, :1] for name, x in good.items() if isinstance(x, Tensor)}
        outs.append(headwise.attention(query[:, :, :1], cache.append(**step)))
        return [*outs, headwise.attention(query, cache.truncate([4, 4]), mask=headwise.alibi(slopes))]

    slopes = normal(H)
    with torch.device("meta"):
        ours = life(made[0])
    for one, other in zip(ours, life(made[1]), strict=True):
        assert_same_bits(one, other)


def test_a_pool_of_pages_guards_its_books() -> None:
    pool = PagePool(2, K, D, V)
    page = pool.take()
    with pytest.raises(ValueError, match=f"page {1 - page} of this pool is free"):
        pool.hold(1 - page)
    pool.give(page)
    with pytest.raises(ValueError, match=f"page {page} of this pool is free"):
        pool.give(page)
    pool.take(), pool.take()
    with pytest.raises(ValueError, match="has 0 free, and 1 are needed"):
        pool.take()
    with pytest.raises(TypeError, match=r"pool is a headwise\.cache\.PagePool; got 3"):
        PagedCache(3, 1)  # type: ignore[arg-type]


def test_the_device_of_a_cache() -> None:
    assert StaticCache(B, K, D, capacity=3, device="meta").device.type == "meta"
    assert PagedCache(PagePool(2, K, D), B).device.type == "cpu"


@pytest.mark.parametrize("paged", [False, True])
def test_int8_does_not_lose_a_gradient_without_a_word(paged: bool) -> None:
    """A module whose weights learn, in train and in eval: refused, but not where no gradient is recorded."""
    mha, x = headwise.MultiHeadAttention(K * D, K), torch.randn(1, 3, K * D)
    pool = PagePool(4, K, D, dtype=torch.int8)
    cache: Any = PagedCache(pool, 1) if paged else StaticCache(1, K, D, capacity=9, dtype=torch.int8)
    before = state_of(cache)
    for module in (mha, mha.eval()):
        with pytest.raises(
            ValueError, match=r"got a key that requires grad; decode within torch\.no_grad\(\)"
        ) as error:
            module(x, cache=cache)
        assert ".detach()" in str(error.value) and "float dtype" in str(error.value)
        assert_same_state(cache, before, "refused")
    with torch.inference_mode():
        assert not mha(x, cache=cache)[0].requires_grad
    mha.requires_grad_(False)
    learns = torch.randn(1, 1, K * D, requires_grad=True)
    query, new = mha.q_proj(learns).view(1, K, 1, D), mha.k_proj(learns).detach().view(1, K, 1, D)
    out = headwise.attention(query, cache.append(new, new))
    assert torch.autograd.grad(out.sum(), learns)[0].abs().sum() > 0  # the queries' own is kept
