"""Masks joined by `&`, `|` and `~`; and rules of one's own, through everything that takes a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise
from headwise import Mask, bias, causal, keep, look, prefix, rule, segments, statistics, weights, window
from headwise.cache import StaticCache
from headwise.ops.masks import Band, Rule
from headwise.parallel.context_layouts.agreement import mask_text
from headwise.testing import assert_close_like_torch, assert_same_bits, make_qkv, naive, oracle

ALL, NONE = Mask(()), ~Mask(())


def same(one: Mask, other: Mask) -> bool:
    return torch.equal(one.dense(5, 7), other.dense(5, 7))


def test_everything_and_nothing() -> None:
    some = window(2) | prefix(1)
    assert (some | ALL).parts == () == (ALL | some).parts == (~NONE).parts
    assert same(some | NONE, some) and same(NONE | some, some) and same(some & ALL, some)
    assert same(some & NONE, NONE) and not NONE.dense(5, 7).any()
    assert (NONE | NONE).parts == NONE.parts == (causal() & NONE).parts
    added = NONE & bias(torch.zeros(5, 7))
    assert len(added.parts) == 2 and bool((added.dense(5, 7) == -torch.inf).all())


def test_what_is_simplified() -> None:
    [band] = (causal() & window(4)).parts
    assert (band.left, band.right) == (4, 0)
    [ahead] = (window(4, None) & window(2, None)).parts
    assert (ahead.left, ahead.right) == (2, None)
    assert len((causal() & window(4, offset=1)).parts) == 2  # other places: two rules
    assert len((causal() & window(4, first=1)).parts) == 2
    [outside] = (~causal()).parts
    assert isinstance(outside, Band)
    mask = window(3, 1) & segments(torch.arange(7) // 3, torch.arange(7) // 3)
    assert (~~mask).parts == mask.parts
    for side in (causal(), causal(offset=2), ~causal(), causal(offset=torch.tensor([1]))):
        [band], [back] = (~side).parts, (~~side).parts
        assert isinstance(band, Band) and isinstance(back, Band), (
            "one side of the diagonal is a band, and so is the other"
        )
        assert same(~~side, side) and bool((side.dense(5, 7) ^ (~side).dense(5, 7)).all())
    union = causal() | prefix(2)
    [joined] = (union | causal()).parts
    assert len(joined.rules) == 2  # causal() is one object: it is there already


def test_the_reach_of_a_union_holds_both() -> None:
    assert (window(2) | prefix(3)).reach(10, 12, 20, 20) == (0, 12)
    some = prefix(torch.tensor([3, 15]))  # names no keys without a look at the tensor
    assert (window(2) | some).reach(10, 12, 20, 20) == (0, 20)
    assert (window(2) | window(5)).reach(10, 12, 20, 20) == (6, 12)
    assert (window(2) | window(3, offset=-4)).reach(10, 12, 20, 20) == (4, 12)
    assert (~window(2)).reach(10, 12, 20, 20) == (0, 20)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("join", "text"),
    [
        (lambda: causal() | bias(torch.zeros(2, 2)), "a bias adds to the scores and joins by `&` alone; `|` met Bias"),
        (lambda: ~headwise.alibi(torch.ones(2)), "`~` met Alibi; join the rules first"),
        (lambda: causal() | torch.ones(2, 2, dtype=torch.bool), "`|` joins masks; got Tensor; wrap a bool tensor in"),
        (
            lambda: torch.ones(2, 2, dtype=torch.bool) & causal(),
            "`&` joins masks; got Tensor; wrap a bool tensor in keep",
        ),
        (lambda: None | causal(), "`|` joins masks; got NoneType"),
        (lambda: causal() and causal(), "join masks by `&`, `|` and `~`, not by `and`, `or` and `not`"),
        (lambda: not causal(), "a mask is neither true nor false"),
        (lambda: rule(3), "rule() takes a function of (b, h, i, j); got int"),
        (lambda: rule(lambda i, j: i == j), "rule() takes a function of (b, h, i, j); got one of (i, j)"),
        (lambda: prefix("a"), "n of prefix() is an int, or an integer tensor (B,); got 'a'"),
        (lambda: rule(lambda b, h, i, j: i - j).dense(2, 2), "gives a bool tensor, True = attend"),
        (lambda: rule(lambda b, h, i, j: True).dense(2, 2), "got bool"),
        (lambda: headwise.relative([1.0]), "table of relative() is a float tensor (H, 2 R + 1); got list"),
        (lambda: headwise.relative(torch.zeros(2, 3, dtype=torch.long)), "convert with .float()"),
    ],
)
def test_what_cannot_be_joined_or_made(join: Any, text: str) -> None:
    with pytest.raises(TypeError) as raised:
        join()
    assert text in str(raised.value)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: prefix(-1), "n is at least 0; got -1"),
        (lambda: headwise.dilated(0), "step is at least 1; got 0"),
        (lambda: headwise.blocks(0), "size is at least 1; got 0"),
        (lambda: headwise.relative(torch.zeros(2, 4)), "an odd number of columns, j - pos = 0 in the middle"),
        (
            lambda: headwise.attention(*make_qkv(1, 3, 1, 5, 7, 4, 4), mask=headwise.relative(torch.zeros(2, 5))),
            "relative() needs a row of its table for each query head: H = 3",
        ),
    ],
)
def test_values_that_make_no_rule(make: Any, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert text in str(raised.value)


# -- rules of one's own: nothing in src/ knows them ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EveryThird(Rule):
    """Query i sees the keys j with i + j divisible by 3, and its own."""

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return ((i + j) % 3 == 0) | (j == i + S - T)


def _random(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (7 * i + 5 * j + 3 * b + 11 * h) * 2654435761 % 97 > 40


DOCUMENTS = torch.arange(300) // 23
OWN = {
    "a class": Mask((EveryThird(),)),
    "a function": rule(_random),
    "documents and a prefix": (causal() & rule(lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j])) | prefix(5),
}


@dataclass(frozen=True, eq=False)
class Every(Rule):
    """Query i sees the keys j with i + j divisible by a number."""

    step: Tensor

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return (i + j) % self.step == 0


class _Module(torch.nn.Module):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return headwise.attention(x, x, x, mask=mask)


@pytest.mark.unchecked
def test_every_function_takes_a_rule_of_ones_own() -> None:
    """Those of the mask, of its joins, and those that look into its tensors."""
    own = Mask((Every(torch.tensor(3)),))
    plain = keep((torch.arange(7)[:, None] + torch.arange(7)) % 3 == 0)
    q = torch.randn(2, 2, 7, 8)
    for ours, theirs in (
        (own, plain),
        (own & headwise.lengths(torch.tensor([5, 7])), plain & headwise.lengths(torch.tensor([5, 7]))),
        (~own | causal(), ~plain | causal()),
    ):
        assert ours.draw(7, 7, batch=1) == theirs.draw(7, 7, batch=1)
        assert torch.equal(ours.dense(7, 7), theirs.dense(7, 7))
        assert torch.equal(ours.tiles(7, 7, tile_q=2, tile_k=3), theirs.tiles(7, 7, tile_q=2, tile_k=3))
        assert ours.reach(0, 3, 7, 7) == (0, 7) or not ours.parts[1:]
        assert ours.trimmed(7, 7).meets((0, 7), (0, 7), 7, 7)
        assert {x.device.type for x in pytree.tree_leaves(ours.to("meta"))} == {"meta"}
        expected = headwise.attention(q, q, q, mask=theirs)
        assert_same_bits(headwise.attention(q, q, q, mask=ours), expected)
        assert torch.equal(headwise.weights(q, q, mask=ours), headwise.weights(q, q, mask=theirs))
        assert torch.equal(headwise.top_keys(q, q, 2, mask=ours).keys, headwise.top_keys(q, q, 2, mask=theirs).keys)
        assert_same_bits(headwise.statistics(q, q, mask=ours).entropy, headwise.statistics(q, q, mask=theirs).entropy)
        assert headwise.explain(q, q, q, mask=ours).backend == headwise.explain(q, q, q, mask=theirs).backend
        assert mask_text(ours) != mask_text(~ours) and mask_text(ours) == mask_text(ours.to("cpu"))
    exported = torch.export.export(_Module(), (q, own)).module()
    torch.testing.assert_close(exported(q, own), headwise.attention(q, q, q, mask=plain), rtol=0, atol=1e-6)
    more = Mask((Every(torch.tensor(2)),))
    torch.testing.assert_close(exported(q, more), headwise.attention(q, q, q, mask=more), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OWN)
def test_a_rule_of_ones_own_goes_everywhere(name: str) -> None:
    mask = OWN[name]
    B, H, K, T, S, D, V = 2, 6, 3, 131, 149, 19, 17
    q, k, v = make_qkv(B, H, K, T, S, D, V, requires_grad=True)
    dense = mask.sized(B, H).dense(T, S).expand(B, H, T, S).contiguous()
    if torch.ops.headwise is not None and headwise.explain(q, k, v).backend == "native":
        assert headwise.explain(q, k, v, mask=mask).backend == "native"
    out, lse = headwise.attention(q, k, v, mask=mask, return_lse=True)
    exact = oracle(q.detach(), k.detach(), v.detach(), mask=dense)
    rough = naive(q.detach(), k.detach(), v.detach(), mask=dense)
    assert_close_like_torch(out.detach(), exact[0], rough, values=v.detach(), factor=2.0)
    # The same bits as the tensor of it: forward, gradients, statistics.
    expected, expected_lse = headwise.attention(q, k, v, mask=keep(dense), return_lse=True)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    grad_out = torch.linspace(-1, 1, out.numel()).view_as(out)
    ours = torch.autograd.grad(out, (q, k, v), grad_out)
    theirs = torch.autograd.grad(expected, (q, k, v), grad_out)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other)
    with torch.no_grad():
        for field in ("entropy", "largest", "keys", "received"):
            one, other = (getattr(statistics(q, k, mask=m), field) for m in (mask, keep(dense)))
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        some, same = (weights(q, k, rows=[3, 100], mask=m) for m in (mask, keep(dense)))
        torch.testing.assert_close(some, same, rtol=1e-5, atol=1e-7)  # of fewer keys where a mask's reach is known
        cache = StaticCache(B, K, D, V, capacity=S).append(k, v)
        assert_same_bits(
            headwise.attention(q, cache, mask=mask), headwise.attention(q, k, v, mask=causal() & keep(dense))
        )


def test_a_module_and_look_take_a_rule_of_ones_own() -> None:
    mha = headwise.MultiHeadAttention(24, 4)
    x = torch.randn(2, 67, 24)
    mask = Mask((EveryThird(),))
    assert_same_bits(mha(x, mask=mask), mha(x, mask=keep(mask.dense(67, 67))))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend = torch.nn.Embedding(31, 24), mha

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.attend(self.embed(input_ids), mask=mask)

    seen = look.at(Model(), torch.arange(31).repeat(2)[None, :59])
    assert len(seen.heads) == 4


def test_with_nothing_a_mask_is_itself() -> None:
    """The very object, for it keeps what the native kernel asks of it at every step."""
    mask = headwise.causal() & headwise.window(4)
    assert mask & Mask(()) is mask and Mask(()) & mask is mask
    assert (Mask(()) & Mask(())).parts == ()
