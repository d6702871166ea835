"""A layer's decode step in one call: caches, modules and outputs have the bits of rotating, appending and attending.

The native product of few rows sums in another order than PyTorch's, so it is off here (tests/nn/test_step_products.py).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import needs_native
from draw import drawn
from native_cases import collected
from step_watch import taken_steps
from torch import Tensor, nn

import headwise
from headwise.cache import PagedCache, PagePool, Quantized, RollingCache, StaticCache
from headwise.cache.base import KVCache
from headwise.nn import (
    GatedMultiHeadAttention,
    InnerAttention,
    LatentAttention,
    MultiHeadAttention,
    Rotary,
    headwise_gate,
    yarn_frequencies,
)
from headwise.nn.decode import fused_step
from headwise.ops.native.library import error_for
from headwise.ops.storage.paged import Paged
from headwise.testing import assert_same_bits

pytestmark = needs_native
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("static", "rolling", "rolling, first", "paged", "static int8", "rolling int8", "paged int8")


@pytest.fixture(autouse=True)
def torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_for() is None
    monkeypatch.setattr(fused_step, "few_rows", lambda *inputs: None)


def a_cache(kind: str, B: int, K: int, D: int, V: int, dtype: torch.dtype, **shared: bool) -> Any:
    dtype = torch.int8 if "int8" in kind else dtype
    kind = kind.removesuffix(" int8")
    if kind == "static":
        return StaticCache(B, K, D, V, capacity=300, dtype=dtype, **shared)
    if kind == "paged":
        return PagedCache(PagePool(3 * B, K, D, V, dtype=dtype, **shared), B)
    first = 3 if kind == "rolling, first" else 0
    return RollingCache(B, K, D, V, window=29, first=first, dtype=dtype, **shared)


def fill(cache: Any, lengths: list[int], dtype: torch.dtype) -> Any:
    """Tokens enough that a step falls on the first place of a page, or the last, or within."""
    sizes = cache.batch, cache.num_kv_heads
    for first in range(0, max(lengths), 100):
        part = [min(max(n - first, 0), 100) for n in lengths]
        key, value = (torch.randn(*sizes, 100, n).to(dtype) for n in (cache.head_dim, cache.value_dim))
        cache.append(key, None if cache.shared else value, lengths=part)
    return cache


def parts(x: Any) -> list[Tensor]:
    """What a cache shows, as plain tensors."""
    x = x.dense() if isinstance(x, Paged) else x
    return [x.data, x.scale] if isinstance(x, Quantized) else [x]


def same_steps(
    monkeypatch: pytest.MonkeyPatch, module: Any, cache: Any, x: Tensor, taken: bool = True, **call: Any
) -> None:
    """The tokens of x, each in one call and otherwise, give outputs and caches of the same bits."""
    ours, theirs = copy.deepcopy(cache), copy.deepcopy(cache)
    for token in x.split(1, dim=1):
        with monkeypatch.context() as patch:
            steps = taken_steps(patch)
            out, _ = module(token, cache=ours, **call)
        assert steps == [True] * taken, steps
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "step", lambda *_, **__: None)
            expected, _ = module(token, cache=theirs, **call)
        assert_same_bits(out, expected)
        assert out.stride() == expected.stride() and ours.lengths == theirs.lengths
        for mine, other in zip(ours.view(), theirs.view(), strict=True):
            for a, b in zip(parts(mine), parts(other), strict=True):
                assert_same_bits(a, b, what="cache")


ROTARIES: dict[str, Callable[[int], Rotary | None]] = {
    "none": lambda D: None,
    "halves": lambda D: Rotary(D),
    "neighbours, a part": lambda D: Rotary(D, rotary_dim=D // 4 * 2, interleaved=True),
    "yarn": lambda D: Rotary(D, rotary_dim=6, frequencies=yarn_frequencies(6, factor=4.0, original_length=50)),
}
CASES = list(itertools.product(ROTARIES, ([126], [255, 3, 127]), (True, False)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_multihead_attention(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(rotary: str, lengths: list[int], bare: bool) -> None:
        D, V = (14, 11) if rotary != "none" else (13, 17)
        options: dict[str, Any] = {"inner": InnerAttention(softcap=3.0, sinks=torch.randn(6), scale=0.3)}
        options |= {"qk_norm": nn.RMSNorm, "bias": "qkv"}
        module = MultiHeadAttention(
            31, 6, num_kv_heads=2, head_dim=D, value_dim=V, rotary=ROTARIES[rotary](D), **({} if bare else options)
        )
        module = module.to(dtype).eval()
        cache = fill(a_cache(kind, len(lengths), 2, D, V, dtype), lengths, dtype)
        x = torch.randn(len(lengths), 3, 31).to(dtype)
        same_steps(monkeypatch, module, cache, x, taken=kind != "rolling, first" or len(lengths) == 1)

    with torch.no_grad(), collected() as attempt:
        for case in drawn(CASES, kind):
            attempt(case, check, *case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_gates(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of the module, of the call and of both multiply the output before it is rounded."""
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 13, "value_dim": 11}
    modules = {
        "none": MultiHeadAttention(31, 6, **sizes),
        "of each number": GatedMultiHeadAttention(31, 6, **sizes),
        "of each head": GatedMultiHeadAttention(31, 6, gate=headwise_gate, **sizes),
    }
    gates = {
        "none": None, "(H,)": torch.rand(6), "(B, H)": torch.rand(1, 6).to(dtype), "(B, H, T)": torch.rand(1, 6, 1),
        "(B, H, T, V)": torch.rand(1, 6, 1, 11).to(dtype),
    }  # fmt: skip
    with torch.no_grad(), collected() as attempt:
        for (own, module), (name, gate) in itertools.product(modules.items(), gates.items()):
            cache = fill(a_cache(kind, 1, 2, 13, 11, dtype), [126], dtype)
            x = torch.randn(1, 3, 31).to(dtype)
            attempt((own, name), same_steps, monkeypatch, module.to(dtype).eval(), cache, x, gate=gate)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_latent_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(dtype: torch.dtype, lengths: list[int], q_lora_rank: int | None, rotary: Rotary | None) -> None:
        sizes = {"kv_lora_rank": 13, "nope_dim": 7, "rope_dim": 6, "value_dim": 5}
        module = LatentAttention(31, 3, q_lora_rank=q_lora_rank, rotary=rotary, **sizes).to(dtype).eval()
        cache = fill(a_cache(kind, len(lengths), 1, 19, 13, dtype, shared=True), lengths, dtype)
        x = torch.randn(len(lengths), 2, 31).to(dtype)
        same_steps(monkeypatch, module, cache, x, taken=kind != "rolling, first" or len(lengths) == 1)

    with torch.no_grad(), collected() as attempt:
        for case in itertools.product(FLOATS, ([126], [200, 7]), (None, 11), (None, Rotary(6))):
            attempt(case, check, *case)


def test_masks_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of the caller join the cache's own, in a band, as a map, or as a tensor."""
    masks = {
        "window": headwise.window(9),
        "causal": headwise.causal(),
        "at numbers": headwise.window(40, 60, offset=100),
        "prefix": headwise.window(9) | headwise.prefix(5),
        "segments": headwise.segments(torch.tensor([1]), torch.arange(131) // 70),
        "alibi": headwise.alibi(torch.rand(6)),
        "keep": headwise.keep(torch.rand(131) > 0.4),
    }
    module = MultiHeadAttention(31, 6, num_kv_heads=2, head_dim=14, rotary=Rotary(14)).eval()
    with torch.no_grad(), collected() as attempt:
        for (name, mask), kind in itertools.product(masks.items(), ("static", "paged", "rolling")):
            cache = fill(a_cache(kind, 1, 2, 14, 14, torch.float32), [130], torch.float32)
            attempt((name, kind), same_steps, monkeypatch, module, cache, torch.randn(1, 1, 31), mask=mask)


class Marked(Tensor):
    """A tensor subclass that computes as a tensor."""


class Marking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Marked)


class Norm(nn.RMSNorm):
    pass


@pytest.mark.unchecked
def test_steps_of_modules_with_parts_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that returns a tensor of its own class is no step; a norm of its own is called in one."""
    sizes = {"q_lora_rank": 11, "kv_lora_rank": 13, "nope_dim": 7, "rope_dim": 6, "value_dim": 5}
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = MultiHeadAttention(31, 6, num_kv_heads=2, head_dim=14, rotary=Rotary(14)).eval()
            cache = fill(a_cache("static", 1, 2, 14, 14, torch.float32), [17], torch.float32)
            own = copy.deepcopy(plain)
            setattr(own, name, Marking(31, getattr(plain, name).out_features, bias=False))
            own.load_state_dict(plain.state_dict())
            token, theirs = torch.randn(1, 1, 31), copy.deepcopy(cache)
            with monkeypatch.context() as patch:
                taken = taken_steps(patch)
                out, _ = own(token, cache=cache)
            assert taken == [] and cache.lengths == [18]
            torch.testing.assert_close(out.as_subclass(Tensor), plain(token, cache=theirs)[0])
        latent = LatentAttention(31, 3, **sizes).eval()  # type: ignore[arg-type]
        latent.q_a_layernorm = Norm(11)
        latent.q_a_layernorm.weight.mul_(torch.rand(11) + 0.5)
        cache = fill(a_cache("static", 1, 1, 19, 13, torch.float32, shared=True), [126], torch.float32)
        same_steps(monkeypatch, latent, cache, torch.randn(1, 2, 31))
        weights = latent.state_dict()
        latent.q_b_proj = Marking(11, 39, bias=False)
        latent.load_state_dict(weights)
        with monkeypatch.context() as patch:
            taken = taken_steps(patch)
            out, _ = latent(torch.randn(1, 1, 31), cache=cache)
        assert taken == [] and cache.lengths == [127] and bool(out.isfinite().all())


@pytest.mark.unchecked
def test_a_rotary_of_another_head_dim_is_refused_and_the_cache_is_as_it_was() -> None:
    module = MultiHeadAttention(31, 6, num_kv_heads=2, head_dim=14, rotary=Rotary(14)).eval()
    module.rotary = Rotary(12)
    cache = fill(a_cache("static", 1, 2, 14, 14, torch.float32), [17], torch.float32)
    with torch.no_grad(), pytest.raises(ValueError, match="12"):
        module(torch.randn(1, 1, 31), cache=cache)
    assert cache.lengths == [17]


def test_what_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, hooks, autocast, other classes and the like take the usual way, and give what it gives."""
    module = MultiHeadAttention(31, 6, num_kv_heads=2, head_dim=14, rotary=Rotary(14), inner=InnerAttention()).eval()
    token = torch.randn(1, 1, 31)

    class Own(StaticCache):
        pass

    class Half(MultiHeadAttention):
        pass

    def steps(run: Callable[[Any], Any], cache: Any = None) -> list[bool]:
        cache = fill(a_cache("static", 1, 2, 14, 14, torch.float32), [17], torch.float32) if cache is None else cache
        with monkeypatch.context() as patch:
            taken = taken_steps(patch)
            run(cache)
        assert cache.lengths == [18]
        return taken

    def plain(cache: Any) -> Any:
        return module(token, cache=cache)

    def hooked(part: Any) -> Callable[[Any], None]:
        def run(cache: Any) -> None:
            seen: list[Any] = []
            handle = part.register_forward_hook(lambda *args: seen.append(args))
            module(token, cache=cache)
            handle.remove()
            assert len(seen) == 1

        return run

    assert plain(fill(a_cache("static", 1, 2, 14, 14, torch.float32), [17], torch.float32))[0].requires_grad
    with torch.no_grad():
        assert steps(plain) == [True]
        assert steps(hooked(module.q_proj)) == [True]
        assert steps(hooked(module.inner)) == steps(hooked(module.rotary)) == []
        assert steps(plain, fill(Own(1, 2, 14, capacity=20), [17], torch.float32)) == []
        half = Half(31, 6, num_kv_heads=2, head_dim=14)
        assert steps(lambda cache: half(token, cache=cache)) == []
        assert steps(lambda cache: module(token, cache=cache, positions=torch.tensor([3]))) == []
        module.inner.dropout = 0.5
        assert steps(plain) == [True]
        module.train()
        assert steps(plain) == []
    assert steps(plain) == []


def test_a_refused_step_changes_nothing() -> None:
    """What does not fit is left to `append` and `attend`; a full cache says so in their words."""
    with torch.no_grad():
        cache = fill(StaticCache(2, 2, 14, 11, capacity=17), [17, 5], torch.float32)
        query, key, value = torch.randn(2, 6, 1, 14), torch.randn(2, 2, 1, 14), torch.randn(2, 2, 1, 11)
        assert not cache.takes_steps()
        cache = cache.truncate(5)
        assert cache.takes_steps()
        assert cache.step(query, key[..., :13], value) is None
        for gate in (torch.ones(5), torch.ones(6, dtype=torch.int64), 0.5):
            with pytest.raises((TypeError, ValueError), match="gate"):
                cache.step(query, key, value, gate=gate)  # type: ignore[arg-type]
        assert cache.step(query, key) is None
        assert cache.step(query.bfloat16(), key.bfloat16(), value.bfloat16()) is None
        assert cache.step(query[:, :5], key, value) is None
        assert cache.step(query.double(), key.double(), value.double()) is None
        assert cache.step(query.as_subclass(Marked), key, value) is None
        assert cache.step(query, key.as_subclass(Marked), value) is None
        assert cache.step(query, key, value.bfloat16()) is None
        assert cache.lengths == [5, 5] and cache._last.tokens != 1
        assert cache.step(query, key, value) is not None and cache.lengths == [6, 6]
        module = MultiHeadAttention(31, 6, num_kv_heads=2, head_dim=14, value_dim=11).eval()
        full = fill(StaticCache(1, 2, 14, 11, capacity=17), [17], torch.float32)
        with pytest.raises(ValueError, match="capacity 17 has no room for 18 tokens"):
            module(torch.randn(1, 1, 31), cache=full)


@pytest.mark.unchecked
def test_what_is_no_tensor_is_left_to_the_errors_of_append_and_attend() -> None:
    with torch.no_grad():
        cache = fill(StaticCache(2, 2, 14, 11, capacity=17), [5, 5], torch.float32)
        query, key, value = torch.randn(2, 6, 1, 14), torch.randn(2, 2, 1, 14), torch.randn(2, 2, 1, 11)
        for wrong in ((query.tolist(), key, value), (query, key.tolist(), value), (query, key, value.tolist())):
            assert cache.step(*wrong) is None and cache.lengths == [5, 5]


def test_a_step_counts_as_a_write() -> None:
    """Autograd sees that a cache was written to."""
    cache = fill(StaticCache(1, 2, 14, capacity=20), [5], torch.float32)
    before = cache.view()[0]._version
    with torch.no_grad():
        cache.step(torch.randn(1, 6, 1, 14), torch.randn(1, 2, 1, 14), torch.randn(1, 2, 1, 14))
    assert cache.view()[0]._version > before


def test_threads_change_no_bit() -> None:
    """Many rows are dealt out to threads."""
    threads, outs = torch.get_num_threads(), []
    B, D = 67, 130
    cache = fill(StaticCache(B, 2, D, capacity=9), [3] * B, torch.float32)
    query, key, value = torch.randn(B, 6, 1, D), torch.randn(B, 2, 1, D), torch.randn(B, 2, 1, D)
    turn = Rotary(D).turn(cache.lengths)
    try:
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            mine = copy.deepcopy(cache)
            with torch.no_grad():
                outs.append((mine.step(query, key, value, turn=turn), *mine.view()))
    finally:
        torch.set_num_threads(threads)
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            assert_same_bits(a, b)


@torch.no_grad()
def test_views_of_a_weight_are_made_again_where_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step keeps from one token to the next follows the weights and the rotation that the module has now."""
    sizes = {"kv_lora_rank": 13, "nope_dim": 7, "rope_dim": 6, "value_dim": 5}
    module, other = (LatentAttention(31, 3, **sizes).eval() for _ in range(2))

    def change(name: str) -> None:
        if name == "in place":
            module.kv_b_proj.weight.mul_(2)
        elif name == "assigned":
            module.load_state_dict(other.state_dict(), assign=True)
        elif name == "rotary":
            module.rotary.base = 7.0
        elif name == "dtype":
            module.bfloat16()

    with collected() as attempt:
        for name in ("", "in place", "assigned", "rotary", "dtype"):
            change(name)
            dtype = module.kv_b_proj.weight.dtype
            cache = fill(a_cache("static", 2, 1, 19, 13, dtype, shared=True), [126, 126], dtype)
            attempt(name, same_steps, monkeypatch, module, cache, torch.randn(2, 1, 31).to(dtype))
