"""What the kernel takes as maps of tiles and as diagonals: across tile edges, groups and chunks of the gradient."""

from __future__ import annotations

import pytest
import torch
from backends import BEST, NATIVE, attend, instructions
from torch import Tensor

import headwise
from headwise import bias, causal, keep, prefix, relative, rule, segments
from headwise.testing import assert_same_bits, make_qkv

native = pytest.mark.parametrize("backend", NATIVE)
best = pytest.mark.parametrize("backend", BEST)


def _every_seventh(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (3 * i + j + h) % 7 != 0


@native
@pytest.mark.parametrize("sizes", [(2, 6, 2, 131, 197), (1, 4, 1, 67, 65), (1, 2, 2, 1, 300), (3, 8, 1, 3, 129)])
def test_a_map_gives_the_bits_of_its_tensor(backend: str, sizes: tuple[int, int, int, int, int]) -> None:
    B, H, K, T, S = sizes
    q, k, v = make_qkv(B, H, K, T, S, 24, 20)
    every_seventh = rule(_every_seventh)
    masks = (causal() | prefix(70), every_seventh, ~headwise.blocks(5), every_seventh & causal())
    for mask in (*masks, every_seventh & headwise.window(40)):  # whose tiles begin within a word of the map
        dense = mask.sized(B, H).dense(T, S)
        assert_same_bits(attend(backend, q, k, v, mask=mask), attend(backend, q, k, v, mask=keep(dense)))


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_no_row_of_a_tile_attends(backend: str, dtype: torch.dtype) -> None:
    """They are left out at both ends of a tile, from odd places on too: output and gradients keep their bits."""
    B, H, K, T, S = 1, 2, 1, 211, 389
    ids = (torch.arange(S) >= 67).long() + (torch.arange(S) >= 131) + (torch.arange(S) >= 300)
    rows = ids[S - T :]
    packed = rule(lambda b, h, i, j: rows[i] == ids[j])
    apart = rule(lambda b, h, i, j: (j >= 7) & (j < 363) & ((j < 101) | (j > 333)))
    for mask in (packed, packed & causal(), segments(rows[None], ids[None]), apart):
        dense = keep(mask.sized(B, H).dense(T, S))
        results = []
        for each in (mask, dense):
            q, k, v = (x.requires_grad_() for x in make_qkv(B, H, K, T, S, 24, 20, dtype=dtype))
            out = attend(backend, q, k, v, mask=each)
            weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)
            with instructions(backend):
                results.append((out, *torch.autograd.grad(out, (q, k, v), weight)))
        for one, other in zip(*results, strict=True):
            assert_same_bits(one, other)


@best
def test_relative_biases_over_several_chunks(backend: str) -> None:
    """Rows of several chunks meet on a diagonal; one table for all heads, and one each; far keys share the ends."""
    H, T, S, R = 4, 2111, 67, 1031  # diagonals of every chunk have an entry of their own
    q, k, v = make_qkv(2, H, 2, T, S, 16, 16)
    for expand in (False, True):
        table = torch.randn(1 if expand else H, 2 * R + 1, requires_grad=True)
        apart = (torch.arange(S) - torch.arange(T)[:, None] - (S - T)).clamp(-R, R) + R
        rows = table.expand(H, -1)
        ours = attend(backend, q, k, v, mask=relative(rows))
        theirs = attend(backend, q, k, v, mask=bias(rows[:, apart]))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        grad_out = torch.linspace(-1, 1, ours.numel()).view_as(ours)
        one, other = (torch.autograd.grad(out, table, grad_out)[0] for out in (ours, theirs))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@native
def test_the_gradient_of_relative_biases_of_each_batch_row_and_head(backend: str) -> None:
    """Of the operator, which takes both: that of the same bias as a tensor, along its diagonals."""
    B, H, T, S, far = 2, 4, 37, 70, 1 << 40
    q, k, v = make_qkv(B, H, 2, T, S, 16, 16)
    relative_BHL = torch.randn(B, H, T + S - 1, requires_grad=True)
    diagonal = T - 1 + torch.arange(S) - torch.arange(T)[:, None]
    grad_out = torch.linspace(-1, 1, B * H * T * 16).view(B, H, T, 16)

    def gradient(dense: list[Tensor] | None, biases: list[Tensor] | None) -> Tensor:
        rules = (0.3, 0.0, None, -far, far, None, None, dense, None, None, biases, 0.0, None)
        with instructions(backend):
            out, _, ends = torch.ops.headwise.attend_kept(q, k, v, *rules)
            *_, grad = torch.ops.headwise.attend_backward(grad_out, None, out, ends, True, q, k, v, *rules)
        result: Tensor = grad
        return result

    as_tensor = relative_BHL[..., diagonal]
    (expected,) = torch.autograd.grad(as_tensor, relative_BHL, gradient([as_tensor.detach()], None))
    ours = gradient(None, [relative_BHL.detach()])
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)  # sums of up to 37 numbers in another order


@best
def test_the_operator_refuses_maps_that_do_not_fit(backend: str) -> None:
    q, k, v = make_qkv(1, 2, 2, 70, 130, 8, 8)
    attend(backend, q, k, v)  # loads the library
    index, bits = torch.zeros(1, 1, 2, 3, dtype=torch.long), torch.zeros(1, 64, dtype=torch.long)
    far = 1 << 40

    def call(maps: list[Tensor] | None, biases: list[Tensor] | None = None) -> None:
        rules = (0.3, 0.0, None, -far, far, None, None, None, None, maps, biases)
        torch.ops.headwise.attend_full(q, k, v, *rules, None, 0.0, None)

    call([index, bits])
    for wrong, text in (
        ([index], "at most 4 pairs"),
        ([index + 3, bits], "names block 3"),
        ([index - 1, bits], "names block -1"),
        ([index[..., :2], bits], "rounded up"),
        ([index, bits[:, :32]], r"must be \(n, 64\)"),
        ([index.float(), bits], "int64"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call(wrong)
    call(None, [torch.zeros(1, 2, 199)])
    for bad, text in ((torch.zeros(1, 2, 198), "T \\+ S - 1"), (torch.zeros(1, 2, 199).double(), "a wrong dtype")):
        with pytest.raises(RuntimeError, match=text):
            call(None, [bad])
