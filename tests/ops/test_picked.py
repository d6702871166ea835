"""Attention to chosen keys per query: the definition's results, by a list that is never a matrix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from backends import NATIVE, instructions, needs_native
from draw import drawn
from torch import Tensor

import headwise
import headwise.testing
from headwise import Mask
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.ops.native import picked_keys

B, H, K, D, V = 2, 6, 2, 16, 11
SIZES = ((1, 1, 1), (1, 300, 97), (3, 31, 5), (16, 17, 16), (33, 97, 31), (65, 64, 33), (7, 1025, 129))


def tensors(T: int, S: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, D).to(dtype), torch.randn(B, K, S, D).to(dtype), torch.randn(B, K, S, V).to(dtype)


def lists(T: int, S: int, n: int, b: int = B, h: int = 1) -> Tensor:
    """n keys a query, of which some are none and some are twice; the first query has none."""
    x = torch.randint(-1, S, (b, h, T, n))
    x[:, :, :, n // 2 :] = x[:, :, :, n // 2 :].where(torch.rand(b, h, T, n - n // 2) > 0.3, x[:, :, :, :1])
    x[:, :, 0] = -1
    return x


def options(T: int, S: int) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "causal": {"mask": headwise.causal()},
        "ragged": {"mask": headwise.causal() & headwise.lengths(torch.tensor([S, S // 2]))},
        "by head": {"mask": headwise.keep(torch.rand(H, T, S) > 0.4)},
        "biased": {"mask": headwise.alibi(torch.rand(H)) & headwise.bias(torch.randn(B, 1, T, S))},
        "sinks": {"sinks": torch.randn(H), "softcap": 3.0, "scale": -0.4},
        "gate": {"gate": torch.rand(B, H, T)},
    }


def with_picked(indices: Tensor, how: dict[str, Any]) -> dict[str, Any]:
    mask = headwise.picked(indices)
    return how | {"mask": mask & how["mask"] if "mask" in how else mask}


@functools.cache
def cases(dtype: torch.dtype) -> list[tuple[str, tuple[Tensor, ...], dict[str, Any], dict[str, Any], Tensor, Tensor]]:
    """(name, inputs, options with the list, options with its matrix, the exact output, that of plain PyTorch)."""
    made = []
    for at, (T, S, n) in enumerate(drawn(SIZES, most=3)):
        given, indices = tensors(T, S, dtype), lists(T, S, n, *((B, 1), (1, H), (B, H))[at % 3])
        for name, how in options(T, S).items():
            how = with_picked(indices, how)
            matrix = headwise.keep(headwise.picked(indices).dense(T, S))
            with_matrix = how | {"mask": Mask((matrix.parts[0], *how["mask"].parts[1:]))}
            exact, plain = (
                headwise.attention(*(x.to(kind) for x in given), backend="reference", **how)
                for kind in (torch.float64, dtype)
            )
            made.append((name, given, how, with_matrix, exact, plain))
    return made


@pytest.mark.parametrize("backend", NATIVE or [pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_definition(backend: str, dtype: torch.dtype) -> None:
    for name, given, how, with_matrix, exact, plain in cases(dtype):
        with instructions(backend) as run:
            out, lse = headwise.attention(*given, backend=run, return_lse=True, **how)
            masked = headwise.attention(*given, backend=run, **with_matrix)
        # The largest errors of a few rows differ twofold from draw to draw.
        headwise.testing.assert_close_like_torch(out, exact, (plain, masked), values=given[2], factor=2.0)
        gone = lse == -torch.inf
        assert bool(gone[:, :, 0].all()) and bool((out.movedim(-1, 0)[:, gone] == 0).all()), name


@needs_native
def test_gradients() -> None:
    for T, S, n in ((1, 7, 3), (33, 97, 31), (9, 300, 64)):
        for b, h in ((B, 1), (B, H)):
            indices = lists(T, S, n, b, h)
            for name, how in options(T, S).items():
                how, leaves = with_picked(indices, how), [x.requires_grad_() for x in tensors(T, S)]
                extra = [x.requires_grad_() for key, x in how.items() if key in ("sinks", "gate")]
                if name == "biased":
                    table = torch.randn(B, H, T, S, requires_grad=True)
                    slopes = torch.rand(H, requires_grad=True)
                    extra += [table, slopes]
                    how["mask"] = headwise.picked(indices) & headwise.bias(table) & headwise.alibi(slopes)
                grads = []
                for backend in ("native", "reference"):
                    out, lse = headwise.attention(*leaves, backend=backend, return_lse=True, **how)
                    loss = out.square().sum() + lse.where(lse > -torch.inf, 0).sum()
                    grads.append(torch.autograd.grad(loss, [*leaves, *extra]))
                for ours, true in zip(*grads, strict=True):
                    # float32 sums over T queries in another order
                    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5, msg=f"{name} {T} {h}")


@needs_native
def test_the_gradient_of_a_gradient() -> None:
    leaves = [x.requires_grad_() for x in tensors(5, 17)]
    seconds = []
    for backend in ("native", "reference"):
        how: dict[str, Any] = {"mask": headwise.picked(torch.arange(3).repeat(1, 1, 5, 1)), "backend": backend}
        first = torch.autograd.grad(headwise.attention(*leaves, **how).square().sum(), leaves, create_graph=True)
        seconds.append(torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves))
    for ours, true in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-4)  # float32 sums in other orders, twice


@needs_native
@pytest.mark.parametrize("learns", [False, True])
def test_what_is_not_picked_changes_no_bit(learns: bool) -> None:
    T, S = 9, 70
    query, key, value = tensors(T, S)
    indices = lists(T, 34, 7)
    indices = (2 * indices + 2).masked_fill(indices < 0, -1)  # even keys, and never key 0

    def run(key: Tensor, value: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(learns) for x in (query, key, value)]
        out = headwise.attention(*leaves, mask=headwise.picked(indices))
        if not learns:
            return [out]
        grads = torch.autograd.grad(out.square().sum(), leaves)
        return [out, grads[0], grads[1][:, :, 2::2], grads[2][:, :, 2::2]]

    true = run(key, value)
    for poison in (torch.nan, torch.inf, 1e30):
        bad_key, bad_value = key.clone(), value.clone()
        bad_key[:, :, 1::2], bad_value[:, :, 1::2] = poison, poison
        bad_key[:, :, 0], bad_value[:, :, 0] = poison, poison  # what stands in for "none" is not read
        assert all(torch.equal(one, other) for one, other in zip(run(bad_key, bad_value), true, strict=True)), poison
    bad = key.clone()
    bad[1, 0, int(indices[1, 0, 3].max())] = torch.nan
    assert bool(run(bad, value)[0][1, :3, 3].isnan().all()) and not bool(run(bad, value)[0][0].isnan().any())


@needs_native
@pytest.mark.parametrize("learns", [False, True])
def test_bits_do_not_depend_on_threads_batch_or_blocks(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    T, S = 33, 300
    query, key, value = tensors(T, S)
    indices = lists(T, S, 64)

    def run(rows: slice = slice(None)) -> list[Tensor]:
        leaves = [x[rows].clone().requires_grad_(learns) for x in (query, key, value)]
        out = headwise.attention(*leaves, mask=headwise.picked(indices[rows]) & headwise.causal())
        return [out, *(torch.autograd.grad(out.square().sum(), leaves) if learns else ())]

    true = run()
    assert all(torch.equal(one, other[1:]) for one, other in zip(run(slice(1, 2)), true, strict=True)), "the batch"
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            assert all(torch.equal(one, other) for one, other in zip(run(), true, strict=True)), threads
        finally:
            torch.set_num_threads(before)
    if not learns:  # sums of gradients are made block by block
        monkeypatch.setattr(picked_keys, "BLOCK_BYTES", 1 << 15)
        assert all(torch.equal(one, other) for one, other in zip(run(), true, strict=True)), "blocks"


@needs_native
def test_the_order_of_a_list_and_keys_listed_twice_do_not_matter() -> None:
    query, key, value = tensors(5, 40)
    once = torch.stack([torch.randperm(40)[:8] for _ in range(5)])[None, None]
    out = headwise.attention(query, key, value, mask=headwise.picked(once))
    for other in (once.flip(-1), once.int(), torch.cat([once, torch.full_like(once, -1)], -1)[..., torch.randperm(16)]):
        torch.testing.assert_close(headwise.attention(query, key, value, mask=headwise.picked(other)), out)
    twice = torch.cat([once, once[..., :3]], -1)
    torch.testing.assert_close(headwise.attention(query, key, value, mask=headwise.picked(twice)), out)


@needs_native
def test_strides() -> None:
    """Keys as projections leave them, (B, S, K, D) in memory, expanded, reversed in the last axis, values in keys."""
    query, key, value = tensors(9, 50)
    mask = headwise.picked(lists(9, 50, 7))
    true = headwise.attention(query, key, value, mask=mask)
    wide = torch.randn(B, K, 60, D + 5)
    wide[:, :, :50, :D] = key
    last = key.transpose(2, 3).contiguous().transpose(2, 3)
    for other in (key.transpose(1, 2).contiguous().transpose(1, 2), wide[:, :, :50, :D], last):
        assert torch.equal(headwise.attention(query, other, value, mask=mask), true)
    one = headwise.attention(query, key[:1].expand(B, -1, -1, -1), key[:1, ..., :V].expand(B, -1, -1, -1), mask=mask)
    assert torch.equal(
        one, headwise.attention(query, key[:1].repeat(B, 1, 1, 1), key[:1, ..., :V].repeat(B, 1, 1, 1), mask=mask)
    )


def caches(dtype: torch.dtype) -> dict[str, KVCache]:
    return {
        "static": StaticCache(B, K, D, V, capacity=400, dtype=dtype),
        "paged": PagedCache(PagePool(20, K, D, V, dtype=dtype), B),
        "rolling": RollingCache(B, K, D, V, window=300, chunk=300, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_caches(dtype: torch.dtype) -> None:
    for name, cache in caches(dtype).items():
        _, key, value = tensors(1, 270)
        cache.append(key, value, lengths=[270, 201])
        for T in (1, 5):
            query, new_key, new_value = tensors(T, T)
            cache.append(new_key, new_value)
            indices = lists(T, min(cache.columns), 40)
            out = headwise.attention(query, cache, mask=headwise.picked(indices))
            true = headwise.attention(query, cache, mask=headwise.picked(indices), backend="reference")
            torch.testing.assert_close(out, true, rtol=1e-4, atol=1e-5, msg=name)  # other orders of float32 sums
    shared = StaticCache(B, 1, D, V, capacity=400, shared=True, dtype=dtype).append(torch.randn(B, 1, 270, D))
    query, mask = torch.randn(B, H, 1, D), headwise.picked(lists(1, 270, 40))
    out, true = (headwise.attention(query, shared, mask=mask, backend=name) for name in ("auto", "reference"))
    torch.testing.assert_close(out, true, rtol=1e-4, atol=1e-5)


@needs_native
def test_memory_does_not_grow_with_the_keys() -> None:
    """What is gathered at a time is bounded, forward and backward; nothing has T x S elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                if isinstance(x, Tensor) and x.untyped_storage().nbytes():
                    self.most = max(self.most, x.numel())
            return result

    T, S, n = 2048, 4096, 64
    query, key, value = (torch.randn(1, 1, length, D, requires_grad=True) for length in (T, S, S))
    mask = headwise.picked(torch.randint(0, S, (1, 1, T, n))) & headwise.causal()
    with Largest() as seen:
        headwise.attention(query, key, value, mask=mask).sum().backward()
    assert seen.most <= max(picked_keys.BLOCK_BYTES // 4, S * D) < T * n * D < T * S


@pytest.mark.slow
@needs_native
@pytest.mark.unchecked
@pytest.mark.parametrize("learns", [False, True])
def test_one_graph(learns: bool) -> None:
    query, key, value = (x.requires_grad_(learns) for x in tensors(9, 33))
    indices = lists(9, 33, 5)

    def run(query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Tensor:
        return headwise.attention(query, key, value, mask=headwise.picked(indices) & headwise.causal())

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value, indices), run(query, key, value, indices))
    if learns:
        ours, true = (
            torch.autograd.grad(f(query, key, value, indices).sum(), (query, key, value)) for f in (compiled, run)
        )
        torch.testing.assert_close(ours, true)


@pytest.mark.unchecked
def test_what_is_refused() -> None:
    query, key, value = tensors(3, 7)
    for indices, error, text in (
        (torch.full((1, 1, 3, 2), 7), ValueError, "0 <= j < S = 7, or -1 for none; got 7 to 7"),
        (torch.full((1, 1, 3, 2), -2), ValueError, "-1 for none"),
        (torch.zeros(1, 1, 4, 2).long(), ValueError, "T = 3"),
        (torch.zeros(3, 1, 3, 2).long(), ValueError, "B = 2"),
        (torch.zeros(1, 2, 3, 2).long(), ValueError, "H = 6"),
        (torch.zeros(3, 2).long(), ValueError, "n keys a query"),
        (torch.zeros(1, 1, 3, 2), TypeError, "integer tensor"),
    ):
        with pytest.raises(error, match=text):
            headwise.attention(query, key, value, mask=headwise.picked(indices))
    mask = headwise.picked(torch.zeros(1, 1, 3, 2).long())
    with pytest.raises(ValueError, match="dropout by the place"):
        headwise.attention(query, key, value, mask=mask, dropout=0.5, backend="native")
    assert headwise.explain(query, key, value, mask=mask, dropout=0.5).backend == "blocks"
    nothing = headwise.picked(torch.zeros(1, 1, 3, 0).long())
    assert headwise.attention(query, key, value, mask=nothing).eq(0).all()
    some = nothing.allowed(3, 5, rows=slice(None), cols=torch.tensor([4, 1]))
    assert some is not None and some.shape[-2:] == (3, 2) and not some.any()


def test_statistics_and_the_largest_logit() -> None:
    query, key, value = tensors(9, 31)
    indices = lists(9, 31, 6)
    mask, dense = headwise.picked(indices), headwise.keep(headwise.picked(indices).dense(9, 31))
    ours, true = headwise.statistics(query, key, mask=mask), headwise.statistics(query, key, mask=dense)
    for name in ("entropy", "largest", "distance", "received", "offsets", "pooled"):
        torch.testing.assert_close(getattr(ours, name), getattr(true, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.keys, true.keys)
    one, other = (headwise.attention_max_logits(query, key, value, mask=m)[1] for m in (mask, dense))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", [*(["native"] if NATIVE else []), "blocks", "reference"])
@pytest.mark.parametrize("cols", [(0, 5), (3, 8), (7, 13), (5, 6)], ids=str)
def test_a_part_of_some_keys_lists_these_alone(backend: str, cols: tuple[int, int]) -> None:
    """As where keys are split over processes: every key stands in the lists, those right beside the part, too."""
    (T, S), (first, last) = (7, 13), cols
    query, key, value = tensors(T, S)
    indices = torch.stack([torch.randperm(S)[:9] for _ in range(B * H * T)]).view(B, H, T, 9)
    mask = headwise.picked(indices).part(cols=cols, T=T, S=S)
    out = headwise.attention(query, key[:, :, first:last], value[:, :, first:last], mask=mask, backend=backend)
    listed = torch.zeros(B, H, T, S).bool().scatter(3, indices, True)[..., first:last]
    groups = [x[:, :, first:last].double().repeat_interleave(H // K, 1) for x in (key, value)]
    scores = (query.double() @ groups[0].mT * D**-0.5).masked_fill(~listed, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ groups[1]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-6)
