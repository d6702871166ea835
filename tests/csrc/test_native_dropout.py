"""Dropout in the native kernel: drawn by place from a seed: forward, backward and tests see the same weights."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest
import torch
from backends import NATIVE, attend, instructions, natives, needs_native
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from test_invariance import threads
from torch import Tensor

import headwise
from headwise.testing import assert_same_bits, make_qkv

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

FORMS = {
    "decoding": Sizes(3, 4, 2, 1, 300, 8, 300),
    "decoding, split": Sizes(1, 2, 1, 1, 1100, 8, 1100),
    "a few rows": Sizes(2, 2, 2, 3, 131, 8, 131),
    "many rows": Sizes(2, 4, 2, 67, 131, 8, 131),
}
forms = pytest.mark.parametrize("n", FORMS.values(), ids=FORMS)
FAR = 1 << 40


def weights(
    backend: str, n: Sizes, p: float, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    """The weights after dropout, read off an identity as values: V = S."""
    q, k, _ = make_qkv(*n, dtype=dtype)
    torch.manual_seed(seed)
    identity = torch.eye(n.S, dtype=dtype).expand(n.B, n.K, n.S, n.S)
    out: Tensor = attend(backend, q, k, identity, dropout=p, **options)
    return out


@pytest.mark.sweep
@native_dtypes
@forms
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_a_fraction_is_dropped_and_the_rest_scaled(backend: str, dtype: torch.dtype, n: Sizes, p: float) -> None:
    """After the softmax: what stays is the plain weight over 1 - p, the sum of a row is 1 on average."""
    ours, plain = weights(backend, n, p, dtype=dtype).double(), weights(backend, n, 0.0, dtype=dtype).double()
    gone, count = ours == 0, ours.numel()
    spread = 5 * (p * (1 - p) / count) ** 0.5
    assert abs(float(gone.double().mean()) - p) < spread
    eps = torch.finfo(dtype).eps
    rtol = 3 * eps + torch.finfo(torch.float32).eps / (1 - p)  # 1 - p in float32 rounds p
    torch.testing.assert_close(ours[~gone], (plain / (1 - p))[~gone], rtol=rtol, atol=torch.finfo(dtype).tiny)
    total = ours.sum(-1)
    noise = 5 * (p / (1 - p) * float(plain.square().sum()) / total.numel() ** 2) ** 0.5
    assert abs(float(total.mean()) - 1) < noise + eps


@natives
@forms
def test_no_row_head_batch_or_column_is_like_another(backend: str, n: Sizes) -> None:
    """Each line of places is drawn for itself, about as even as chance has it (chi-squared of bits, 5 sigma)."""
    gone = (weights(backend, n, 0.5) == 0).flatten(0, 2)
    assert len({bytes(row.to(torch.uint8).tolist()) for row in gone}) == len(gone)
    for lines in (gone, gone.mT):
        if lines.shape[0] > 1 and lines.shape[1] > 1:
            agree = (lines[1:] == lines[:-1]).double().mean()
            assert abs(float(agree) - 0.5) < 5 * 0.5 / (lines[1:].numel()) ** 0.5
    for shift in (1, 2, 3, 4, 8, 16):  # neighbours of a generator's block
        agree = (gone[:, shift:] == gone[:, :-shift]).double()
        assert abs(float(agree.mean()) - 0.5) < 5 * 0.5 / agree.numel() ** 0.5


@pytest.mark.sweep
@native_dtypes
@forms
def test_a_seed_decides(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Again and on any threads the same bits; with another seed others; without dropout no seed is drawn."""
    first = weights(backend, n, 0.3, seed=5, dtype=dtype)
    for count in (1, 2, 3):
        with threads(count):
            assert_same_bits(weights(backend, n, 0.3, seed=5, dtype=dtype), first)
    assert not torch.equal(weights(backend, n, 0.3, seed=6, dtype=dtype), first)
    torch.manual_seed(9)
    state = torch.get_rng_state()
    attend(backend, *make_qkv(*n, dtype=dtype))
    assert torch.equal(torch.get_rng_state(), state)
    q, k, v = make_qkv(*n, dtype=dtype)
    calls = [attend(backend, q, k, v, dropout=0.3) for _ in range(2)]
    assert not torch.equal(*calls), "two calls in a row drop alike"


@needs_native
@forms
def test_every_instruction_set_drops_the_same(n: Sizes) -> None:
    places = [weights(backend, n, 0.4, mask=headwise.window(60, 60)) == 0 for backend in NATIVE]
    for other in places[1:]:
        assert torch.equal(other, places[0])


@pytest.mark.sweep
@native_dtypes
@forms
def test_the_operator_that_tells_what_is_kept(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """`dropout_keep`, all rows or some, is what `attend_full` drops for that seed; whatever the mask skips."""
    q, k, _ = make_qkv(*n, dtype=dtype)
    identity = torch.eye(n.S, dtype=dtype).expand(n.B, n.K, n.S, n.S)
    ops = torch.ops.headwise
    with collected() as attempt:
        for seed in (0, 1, 1 << 40, (1 << 62) - 1):
            number = torch.tensor([seed])
            for low, high in ((-FAR, FAR), (-FAR, n.S - n.T + 1), (n.S // 2, n.S // 2 + 40)):
                full = attend_full(backend, q, k, identity, low, high, 0.4, number)
                keep = ops.dropout_keep(number, 0.4, n.B, n.H, 0, n.T, n.S)
                assert keep.dtype == torch.bool and keep.shape == (n.B, n.H, n.T, n.S)
                i, j = torch.arange(n.T)[:, None], torch.arange(n.S)
                seen = (j >= i + low) & (j < i + high)
                attempt(f"{seed} {low} {high}", assert_same_bits, (full != 0) & seen, keep & seen)
                attempt(f"{seed} {low} {high}", assert_same_bits, full.masked_fill(seen, 0), torch.zeros_like(full))
            for first, rows in ((0, 1), (n.T // 2, n.T - n.T // 2), (n.T - 1, 1)):
                part = ops.dropout_keep(number, 0.4, n.B, n.H, first, rows, n.S)
                attempt(f"rows {first}", assert_same_bits, part, keep[:, :, first : first + rows])


def attend_full(
    backend: str, q: Tensor, k: Tensor, v: Tensor, low: int, high: int, p: float, seed: Tensor | None
) -> Tensor:
    ops = torch.ops.headwise
    before = ops.isa()
    ops.use_isa(backend.removeprefix("native-"))
    try:
        masks: tuple[Any, ...] = (low, high, None, None, None, None, None, None)
        out: Tensor = ops.attend_full(q, k, v, 0.5, 0.0, None, *masks, None, p, seed)[0]
        return out
    finally:
        ops.use_isa(before)


@pytest.mark.sweep
@natives
@forms
def test_the_mean_over_many_seeds_is_no_dropout(backend: str, n: Sizes) -> None:
    q, k, v = make_qkv(n.B, n.H, n.K, n.T, n.S, 8, 4)
    plain = attend(backend, q, k, v, mask=headwise.causal())
    draws = []
    for seed in range(300):
        torch.manual_seed(seed)
        draws.append(attend(backend, q, k, v, mask=headwise.causal(), dropout=0.2))
    many = torch.stack(draws)
    error = (many.mean(0) - plain) / (many.std(0) / math.sqrt(len(draws)))
    assert float(error.abs().max()) < 6 and float(error.square().mean()) < 4


@natives
@forms
def test_lse_sinks_and_gate_are_not_dropped(backend: str, n: Sizes) -> None:
    q, k, v = make_qkv(*n)
    options: dict[str, Any] = {"sinks": torch.linspace(-1, 1, n.H), "gate": torch.zeros(n.H), "return_lse": True}
    _, plain = attend(backend, q, k, v, **options)
    out, lse = attend(backend, q, k, v, dropout=0.9, **options)
    assert_same_bits(lse, plain)
    assert bool((out == 0).all())
    # a row that may attend nothing, and a poisoned key where nothing may look
    out, lse = attend(backend, q, k, v, mask=headwise.lengths(torch.tensor([0])), dropout=0.5, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.sweep
@native_dtypes
@forms
def test_the_backward_drops_what_the_forward_dropped(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """With an identity as values, out is the dropped weights P, and the gradient of the values is P^T dO."""
    q, k, _ = make_qkv(*n, dtype=dtype)
    v = torch.eye(n.S, dtype=dtype).expand(n.B, n.K, n.S, n.S).contiguous().requires_grad_()
    out = attend(backend, q.requires_grad_(), k, v, mask=headwise.causal(), dropout=0.4)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (grad,) = torch.autograd.grad(out, v, grad_out)
    expected = (out.detach().double().mT @ grad_out.double()).unflatten(1, (n.K, -1)).sum(2)
    budget = 8 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=budget)


def philox(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 as its authors wrote it (Salmon et al. 2011)."""
    c, key, mask = list(counter), [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c


@needs_native
def test_the_generator_is_philox() -> None:
    """The published answers, and then every weight's word by its place: a seed drops the same in any version."""
    answers = {  # counter and key: Random123's known answers
        (0, (0, 0, 0, 0)): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((1 << 64) - 1, (0xFFFFFFFF,) * 4): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (key, counter), words in answers.items():
        assert [f"{x:08x}" for x in philox(key, counter)] == words.split()
    B, H, T, S, first = 2, 3, 4, 11, 5
    for seed in (0, 12345, (1 << 62) - 1, 0x7766554433221100):
        word = torch.tensor(
            [
                [philox(seed, (j // 4, first + i, plane & 0xFFFFFFFF, plane >> 32))[j % 4] for j in range(S)]
                for plane in range(B * H)
                for i in range(T)
            ]
        ).view(B, H, T, S)
        for dropout in (0.0, 0.1, 0.5, 0.9, 1.0):
            threshold = min(int(torch.tensor(dropout).double() * 2**32), 2**32 - 1)
            keep = torch.ops.headwise.dropout_keep(torch.tensor([seed]), dropout, B, H, first, T, S)
            assert_same_bits(keep, word >= threshold)


# One query has the keys in the lanes, more have the rows there, up to three vectors of them.
BLOCKS = ((1, 1), (1, 2), (1, 7), (3, 1), (3, 2), (17, 1), (33, 3), (50, 1))  # queries, heads of a group
FIRST = (*range(9), 31, 33, 63, 126, 127, 128, 129, 131)  # keys at which windows begin


def seeds(first: int) -> list[Tensor]:
    """A seed, and the same of calls that are parts of larger ones: heads of it, first head, query and key.

    The greatest numbers that fit a word are crossed; 0 heads are the call's own number.
    """
    word = 1 << 32
    places = [[], [13, 5, 3, first], [13, word - 2, word - 2, 4 * word - 6 + first], [1 << 30, 1 << 40, 9, 2]]
    places.append([0, 3, 1, first])
    return [torch.tensor([0x7766554433221100, *place]) for place in places]


@natives
@pytest.mark.parametrize(("T", "G"), BLOCKS)
def test_words_of_keys_that_begin_anywhere(backend: str, T: int, G: int) -> None:
    """Four keys share a block of the generator; the first key of a tile that a window reaches may be any of them."""
    n = Sizes(2, 2 * G, 2, T, 140, 8, 140)
    q, k, _ = make_qkv(*n)
    identity = torch.eye(n.S).expand(n.B, n.K, n.S, n.S)
    i, j = torch.arange(T)[:, None], torch.arange(n.S)
    with collected() as attempt:
        for first in FIRST:
            seen = (j >= i + first) & (j < i + first + 20)
            plain = attend_full(backend, q, k, identity, first, first + 20, 0.0, None).double()
            for number, seed in enumerate(seeds(first)):
                ours = attend_full(backend, q, k, identity, first, first + 20, 0.375, seed)
                keep = torch.ops.headwise.dropout_keep(seed, 0.375, n.B, n.H, 0, T, n.S)
                attempt(f"{first}, seed {number}", assert_same_bits, ours != 0, keep & seen)
                attempt(f"{first}, seed {number}", close, ours, plain * keep / 0.625)


def close(ours: Tensor, exact: Tensor) -> None:
    """To a rounding of the weight, of the factor and of their product."""
    torch.testing.assert_close(ours.double(), exact.double(), rtol=3 * torch.finfo(ours.dtype).eps, atol=0)


@needs_native
def test_a_part_draws_what_the_whole_draws() -> None:
    """Which the tests above take from `dropout_keep`: by the place in the whole, whose heads may be beyond 2^32."""
    keep = torch.ops.headwise.dropout_keep
    for number in (5, 1 << 61):
        whole = keep(torch.tensor([number]), 0.375, 3, 13, 0, 29, 41)
        for head, query, key in ((5, 3, 1), (0, 0, 6), (11, 17, 31)):
            part = keep(torch.tensor([number, 13, head, query, key]), 0.375, 3, 2, 0, 7, 10)
            assert_same_bits(part, whole[:, head : head + 2, query : query + 7, key : key + 10])
        heads, head = 1 << 30, (1 << 40) - 1
        far = keep(torch.tensor([number, heads, head, 2, 3]), 0.375, 2, 2, 0, 4, 5)
        for b, h, i, j in itertools.product(range(2), range(2), range(4), range(5)):
            plane = b * heads + head + h
            word = philox(number, ((3 + j) // 4, 2 + i, plane & 0xFFFFFFFF, plane >> 32))[(3 + j) % 4]
            assert bool(far[b, h, i, j]) == (word >= 0.375 * 2**32)


@cache
def gradients_under_windows(T: int, G: int) -> tuple[tuple[Tensor, ...], Tensor, list[tuple[Any, tuple[Tensor, ...]]]]:
    """Inputs, the gradient of the output, and ((first key, number of the seed, seed), gradients) of every window."""
    n = Sizes(1, 2 * G, 2, T, 140, 8, 12)
    qkv = make_qkv(*n)
    grad_out = torch.randn(n.B, n.H, T, n.V, generator=torch.Generator().manual_seed(1))
    i, j, wanted = torch.arange(T)[:, None], torch.arange(n.S), []
    for first in FIRST[::2]:
        seen = (j >= i + first) & (j < i + first + 20)
        for number, seed in enumerate(seeds(first)):
            keep = torch.ops.headwise.dropout_keep(seed, 0.375, n.B, n.H, 0, T, n.S)
            leaves = [x.double().requires_grad_() for x in qkv]
            query, key, value = leaves[0], *(x.repeat_interleave(G, 1) for x in leaves[1:])
            scores = (0.5 * query @ key.mT).masked_fill(~seen, -math.inf)
            empty = ~seen.any(-1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(empty, 0.0), -1) * (keep & ~empty) / 0.625
            gradients = torch.autograd.grad(weights @ value, leaves, grad_out.double())
            wanted.append(((first, number, seed), gradients))
    return qkv, grad_out, wanted


@natives
@pytest.mark.parametrize(("T", "G"), BLOCKS)
def test_the_gradient_under_windows_that_begin_anywhere(backend: str, T: int, G: int) -> None:
    """Of query, key and value, as autograd finds it through what `dropout_keep` tells, in float64."""
    qkv, grad_out, wanted = gradients_under_windows(T, G)
    with collected() as attempt:
        for (first, number, seed), theirs in wanted:
            numbers = (0.5, 0.0, None, first, first + 20, *[None] * 6, 0.375, seed)
            with instructions(backend):
                out, _, ends = torch.ops.headwise.attend_kept(*qkv, *numbers)
                ours = torch.ops.headwise.attend_backward(grad_out, None, out, ends, False, *qkv, *numbers)
            for x, y, what in zip(ours, theirs, ("query", "key", "value"), strict=True):
                # a constant: a dropped weight moves a gradient by a hundredth and more
                attempt(f"{first}, seed {number}, {what}", torch.testing.assert_close, x.double(), y,
                        rtol=1e-5, atol=2e-5)  # fmt: skip


@needs_native
def test_heads_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"more elements than 2\*\*63"):
        torch.ops.headwise.dropout_keep(torch.tensor([1, 1 << 40, 0, 0, 0]), 0.5, 1 << 23, 1, 0, 1, 1)
    q, k, v = (x.expand(1 << 23, 1, 1, 1) for x in make_qkv(1, 1, 1, 1, 1, 1, 1))
    with pytest.raises(RuntimeError, match=r"more elements than 2\*\*63"):
        attend_full("native-baseline", q, k, v, -FAR, FAR, 0.5, torch.tensor([1, 1 << 40, 0, 0, 0]))


@natives
def test_all_may_be_dropped(backend: str) -> None:
    """A probability of 1, which only the operator takes: nothing is left, and nothing is divided by 0."""
    for T in (1, 37):
        q, k, v = make_qkv(1, 2, 1, T, 131, 8, 9)
        out = attend_full(backend, q, k, v, -FAR, FAR, 1.0, torch.tensor([3]))
        assert_same_bits(out, torch.zeros_like(out))
