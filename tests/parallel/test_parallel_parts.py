"""Partial results and partial gradients, in one process: keys cut into stretches give what all keys give."""

from dataclasses import dataclass

import pytest
import torch
from mask_cases import MASKS, Sizes
from torch import Tensor

import headwise
from headwise.ops.masks import Rule
from headwise.ops.native.library import error_for
from headwise.ops.options import ScoreOptions
from headwise.parallel import Comm
from headwise.parallel.context_layouts.agreement import mask_text
from headwise.parallel.context_layouts.block import Block, Partial, attend, gradient
from headwise.parallel.context_layouts.call import ContextCall
from headwise.parallel.context_layouts.merge import Merged, sink_gradient

N = Sizes(2, 6, 3, 23, 31, 5, 7)
STRETCHES = ((0, 3), (3, 17), (17, 18), (18, 31))
NAMES = ("causal", "window 3", "lengths start", "segments (B,)", "relative 2", "window 1 first 3", "window far")


@dataclass(frozen=True, eq=False)
class Steps(Rule):
    """A user's rule, which defines `at` alone, with an offset for each row of the batch."""

    offset: Tensor

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return (i + 2 * j + self.offset.view(-1, 1, 1, 1) + T) % 3 != 0


OWN = headwise.Mask((Steps(torch.arange(N.B)),))


def context_call(mask: headwise.Mask, dropout: float = 0.0) -> ContextCall:
    comm = object.__new__(Comm)  # of no group: nothing is sent here
    comm.rank, comm.world = 0, 1
    options = ScoreOptions(mask.sized(N.B, N.H), N.D**-0.5, dropout=dropout)
    return ContextCall(comm, (((0, N.T),),), (((0, N.S),),), options, N.H, N.K, N.V, 91)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(N.B, n, length, width).to(dtype) for n, length, width in SHAPES)  # type: ignore[return-value]


SHAPES = ((N.H, N.T, N.D), (N.K, N.S, N.D), (N.K, N.S, N.V))


def in_parts(made: ContextCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Partial:
    merged = Merged(query, N.V)
    for a, b in STRETCHES:
        place = Block((0, N.T), (a, b), (0, N.H))
        merged.add(slice(0, N.T), attend(made, place, query, key[:, :, a:b], value[:, :, a:b]))
    merged.finish(sinks)
    return merged.result(query.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", (*NAMES, "own"))
def test_parts_of_the_keys_give_what_all_give(name: str, dtype: torch.dtype) -> None:
    query, key, value = tensors(dtype)
    sinks, made = (
        torch.randn(N.H, dtype=dtype).requires_grad_(),
        context_call(OWN if name == "own" else MASKS[name](N).mask),
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out, lse = headwise.attention(*leaves, mask=made.mask, sinks=sinks, return_lse=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    loss = (out * grad_out).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse).sum()
    expected = torch.autograd.grad(loss, [*leaves, sinks])
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    whole = in_parts(made, query, key, value, sinks)
    torch.testing.assert_close(whole.out, out, atol=2e-6, rtol=0)
    torch.testing.assert_close(whole.lse, lse, atol=2e-6, rtol=0)
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for a, b in STRETCHES:
        place, some = Block((0, N.T), (a, b), (0, N.H)), (query, key[:, :, a:b], value[:, :, a:b])
        part = gradient(made, place, some, whole, grad_out, grad_lse, [])
        dq += part.query
        dk[:, :, a:b], dv[:, :, a:b] = part.key, part.value
    grads = (dq, dk, dv, sink_gradient(sinks, whole, grad_out, grad_lse))
    for ours, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=1e-5)


def test_sinks_learn_from_rows_that_attend_something_and_from_all_their_digits() -> None:
    """Whatever comes back for a row that attends nothing; and a sum of many rows is rounded once."""
    lse, of_lse = torch.zeros(67), torch.tensor([1e8, *[1.0] * 63, -1e8, torch.nan, 3.0])
    lse[65:] = -torch.inf
    whole, rows = Partial(torch.zeros(1, 1, 67, 2), lse.view(1, 1, 67), None), torch.full((1, 1, 67, 2), 2.0)
    grad = sink_gradient(torch.zeros(1), whole, rows, of_lse.view(1, 1, 67))
    assert grad.tolist() == [63.0]


@pytest.mark.parametrize("cuts", [((0, 6),), ((0, 2), (2, 6))])
def test_parts_of_a_row_may_come_with_different_heads(cuts: tuple[tuple[int, int], ...]) -> None:
    """All heads in one message, or a few in each, as their bytes go: one stretch of the keys unlike the next."""
    (query, key, value), made = tensors(), context_call(MASKS["causal"](N).mask)
    out, lse = headwise.attention(query, key, value, mask=made.mask, return_lse=True)
    merged, turns = Merged(query, N.V), (cuts, ((0, 4), (4, 6)))
    for n, (a, b) in enumerate(STRETCHES):
        for first, last in turns[n % 2]:
            of_keys = slice(first // 2, last // 2)
            place, keys = Block((0, N.T), (a, b), (first, last)), (key[:, of_keys, a:b], value[:, of_keys, a:b])
            merged.add(slice(0, N.T), attend(made, place, query[:, first:last], *keys), slice(first, last))
    whole = merged.result(query.dtype)
    torch.testing.assert_close(whole.out, out, atol=2e-6, rtol=0)
    torch.testing.assert_close(whole.lse, lse, atol=2e-6, rtol=0)


@pytest.mark.skipif(error_for() is not None, reason="the native kernel draws dropout")
def test_dropout_in_parts_keeps_what_one_call_keeps() -> None:
    query, key, value = tensors()
    made = context_call(headwise.causal(), dropout=0.4)
    one = attend(made, Block((0, N.T), (0, N.S), (0, N.H)), query, key, value)
    torch.testing.assert_close(in_parts(made, query, key, value, None).out, one.out, atol=2e-6, rtol=0)
    heads, rows = slice(2, 4), slice(5, 19)
    place = Block((5, 19), (0, N.S), (2, 4))
    some = attend(made, place, query[:, heads, rows], key[:, 1:2], value[:, 1:2])
    torch.testing.assert_close(some.out, one.out[:, heads, rows], atol=2e-6, rtol=0)
    seed = torch.tensor([91, N.H, 2, 5, 3])
    kept = torch.ops.headwise.dropout_keep(torch.tensor([91]), 0.4, N.B, N.H, 0, N.T, N.S)
    part = torch.ops.headwise.dropout_keep(seed, 0.4, N.B, 2, 1, 4, N.S - 3)
    assert torch.equal(part, kept[:, heads, 6:10, 3:])


def test_a_seed_is_one_number_or_five() -> None:
    with pytest.raises(RuntimeError, match="one element, or five: seed, heads, first head, query, key; got"):
        torch.ops.headwise.dropout_keep(torch.tensor([1, 2]), 0.4, 1, 1, 0, 1, 1)
    with pytest.raises(RuntimeError, match=r"the places of a seed must lie between 0 and 2\*\*40"):
        torch.ops.headwise.dropout_keep(torch.tensor([1, 2, -1, 0, 0]), 0.4, 1, 1, 0, 1, 1)


def test_masks_that_differ_differ_in_what_ranks_compare() -> None:
    """In the numbers of tensors, and in what they are joined of; the same mask made on another rank does not."""
    texts: dict[str, str] = {}
    for name in MASKS:
        text = mask_text(MASKS[name](N).mask)
        assert text == mask_text(MASKS[name](N).mask), name
        same = texts.setdefault(text, name)
        assert same == name or {same, name} == {"lengths", "prefix (B,)"}, (same, name, text)
    joined = [~(headwise.window(left) & headwise.dilated(2)) for left in (3, 4)]
    assert mask_text(joined[0]) != mask_text(joined[1])
    functions = [mask_text(headwise.rule(lambda b, h, i, j: j <= i)) for _ in range(2)]
    assert functions[0] == functions[1], "their addresses count for nothing"
