"""Masks and lent keys are tensors to everybody who computes with them, and cost none to those who do not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import B, padding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils as theirs

from headwise.cache import quantize
from headwise.hf import ModelError, StructuralMask
from headwise.hf.attention.call_mask import mask_of
from headwise.hf.attention.function import headwise_attention
from headwise.hf.attention.lazy_tensors import Lazy, LazyKeys, from_model, to_model
from headwise.hf.attention.mask import Hidden, headwise_mask
from headwise.hf.own_code.lazy_scores import Added
from headwise.hf.own_code.replacements import ByContent
from headwise.ops.masks import Mask
from headwise.ops.storage.paged import PAGE, Paged
from headwise.testing import largest_tensor

T, S = 3, 7
LOWEST = torch.finfo(torch.float32).min


def made_mask(dtype: torch.dtype = torch.float32) -> StructuralMask:
    pad = padding("left", S).bool()
    mask = headwise_mask(
        B, T, S, q_offset=4, attention_mask=pad, dtype=dtype, mask_function=theirs.causal_mask_function
    )
    assert isinstance(mask, StructuralMask)
    return mask


def eager(dtype: torch.dtype = torch.float32) -> Tensor:
    pad = padding("left", S).bool()
    return theirs.eager_mask(B, T, S, q_offset=4, attention_mask=pad, dtype=dtype)


def is_made(x: Lazy) -> bool:
    return x._source.tensor is not None


# -- what is asked of a tensor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_asked_without_numbers_makes_no_tensor(dtype: torch.dtype) -> None:
    mask = made_mask(dtype)
    assert isinstance(mask, Tensor) and torch.is_tensor(mask)
    assert mask.shape == (B, 1, T, S) and (mask.ndim, mask.dim(), mask.size(2), len(mask)) == (4, 4, T, B)
    assert mask.dtype == dtype and mask.device.type == "cpu" and mask.is_floating_point() and not mask.requires_grad
    assert mask.contiguous() is mask and mask.is_contiguous() and mask.to("cpu") is mask
    for same in (mask.detach(), mask[:, :, :, :S], mask[:, :, :, :99], mask.to(dtype=dtype)):
        assert isinstance(same, StructuralMask) and same.mask is mask.mask
    assert not is_made(mask) and not mask.exposed


READ: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x + 1.0,
    "other side": lambda x: torch.ones(1, S) - x,
    "cat": lambda x: torch.cat([x, torch.zeros(B, 1, T, 2)], -1),
    "where": lambda x: torch.where(x == 0, 3.0, 2.0),
    "repeat": lambda x: x.repeat(1, 4, 1, 1),
    "bool": lambda x: x.to(torch.bool),
    "all": lambda x: torch.all(~(x == 0.0), dim=2),
    "item": lambda x: torch.tensor(x.sum().item()),
    "padded": lambda x: nn.functional.pad(x, (0, 2), value=0.0),
    "sdpa": lambda x: nn.functional.scaled_dot_product_attention(*(torch.ones(B, 2, n, 5) for n in (T, S, S)), x),
    "many": lambda x: torch.stack([x, x]),
    "out": lambda x: torch.add(x, 1.0, out=torch.empty(B, 1, T, S)),
}


@pytest.mark.parametrize("name", READ)
def test_an_operation_gets_the_tensor_of_eager(name: str) -> None:
    """Made once; attention still reads the rules."""
    mask = made_mask()
    result = READ[name](mask)
    assert type(result) is (Hidden if name == "bool" else Tensor) and torch.equal(result, READ[name](eager()))
    first = mask.plain()
    assert torch.equal(READ[name](mask), result) and mask.plain() is first
    assert not mask.exposed and mask_of(nn.Module(), mask, T, S) is mask.mask


VIEWS: dict[str, Callable[[Any], Any]] = {
    "last keys": lambda x: x[..., 2:],
    "one row": lambda x: x[:, :, 0],
    "expanded": lambda x: x.expand(-1, 4, -1, -1),
    "transposed": lambda x: x.mT,
    "picked": lambda x: x[:, :, torch.tensor([0, 2])],
}


@pytest.mark.parametrize("name", VIEWS)
def test_parts_are_those_of_the_tensor(name: str) -> None:
    mask = made_mask()
    assert torch.equal(VIEWS[name](mask), VIEWS[name](eager()))


@pytest.mark.parametrize("tables", ["both", "by query", "by key"])
def test_a_bias_by_content_is_its_definition_whoever_reads_it(tables: str) -> None:
    """A rule in all its ways; and the tensor of it, (B, H, T, S) or (B * H, T, S), where the model's code wants one."""
    H, P = 3, 5
    by_query = torch.randn(B, H, T, P) if tables != "by key" else None
    by_key = torch.randn(B, H, S, P) if tables != "by query" else None
    columns = [torch.randint(P, (T + S - 1,)) for _ in range(2)]
    wanted = torch.zeros(B, H, T, S)
    for i in range(T):
        for j in range(S):
            for table, own, column in ((by_query, i, columns[0]), (by_key, j, columns[1])):
                if table is not None:
                    wanted[:, :, i, j] += table[:, :, own, column[i - j + S - 1]]
    rule = ByContent(by_query, by_key, *columns)
    assert_added(Mask((rule,)), wanted)
    assert torch.equal(rule.at(torch.arange(T)[:, None], torch.arange(S)[None], T, S), wanted)
    for shape in ((B, H, T, S), (B * H, T, S)):
        made = Added(Mask((rule,)), shape, torch.bfloat16, wanted.device)
        assert torch.equal(made + 0.0, wanted.bfloat16().view(shape))
    with pytest.raises(ValueError, match=r"a bias by content has scores of \(B, H, n\)"):
        rule.check(B, H, T + 1, S + 1, wanted.device)


def assert_added(mask: Mask, wanted: Tensor) -> None:
    rows, cols = torch.tensor([2, 0]), torch.tensor([1, 6, 4])
    for r, c in ((None, None), (slice(1, 3), slice(2, 5)), (rows, cols)):
        part = wanted[:, :, slice(None) if r is None else r][..., slice(None) if c is None else c]
        ours = mask.added(T, S, rows=r, cols=c)
        assert ours is not None and torch.equal(ours, part), (r, c)


def multiplied(x: Any) -> None:
    x *= 2.0


def assigned(x: Any) -> None:
    x[:, :, 1:, 3] = 0.0


def added_to_rows(x: Any) -> None:
    x[:, :, 1:] += 5.0


def through_a_view(x: Any) -> None:
    x.squeeze(1)[0].fill_(-2.0)


def into_it(x: Any) -> None:
    torch.neg(eager(), out=x)


@pytest.mark.parametrize("write", [multiplied, assigned, added_to_rows, through_a_view, into_it])
def test_what_is_written_counts(write: Callable[[Any], None]) -> None:
    """Also by whoever holds the same mask under another name; and attention takes what was written."""
    mask, exact = made_mask(), eager()
    other = mask.detach()
    write(mask), write(exact)
    assert mask.exposed and other.exposed
    assert torch.equal(mask + 0.0, exact) and torch.equal(other + 0.0, exact)
    read = mask_of(nn.Module(), mask, T, S)
    (tensor,) = (part.tensor for part in read.parts)
    assert torch.equal(tensor, exact.masked_fill(exact <= LOWEST, -torch.inf))


def test_rows_alone_are_made_alone() -> None:
    """As models ask whose last layers run one query: no tensor of all pairs."""
    n = 4096
    mask = headwise_mask(1, n, n, mask_function=theirs.causal_mask_function)
    with largest_tensor() as seen:
        last, some = mask[:, :, slice(-1, None), :], mask[:, :, 5:9, :]
    assert seen.numel <= 4 * n and not is_made(mask)
    exact = theirs.eager_mask(1, n, n)
    assert torch.equal(last, exact[:, :, -1:, :]) and torch.equal(some, exact[:, :, 5:9, :])
    mask[:, :, 5, :].fill_(7.0)
    exact[:, :, 5, :] = 7.0
    assert is_made(mask) and mask.exposed
    assert torch.equal(mask[:, :, 5:9, :], exact[:, :, 5:9, :]), "what was written shows"


def test_rows_of_a_mask_that_forbids_nothing() -> None:
    mask = StructuralMask(Mask(()), (B, 1, T, S))
    assert mask[:, :, :2, :].shape == (B, 1, 2, S) and not mask[:, :, :2, :].any() and not mask.plain().any()


def test_on_another_device_it_is_still_structural() -> None:
    mask = made_mask()
    moved = mask.to("meta")
    assert isinstance(moved, StructuralMask) and moved.device.type == "meta" and moved.shape == mask.shape
    assert (moved + 1).device.type == "meta"
    half = mask.to("cpu", torch.float16)
    assert type(half) is Tensor and half.dtype == torch.float16
    mask[:] = 3.0
    assert type(mask.to("meta")) is Tensor, "what was written goes along"


def test_inference_mode_leaves_a_tensor_that_can_be_used_later() -> None:
    mask = made_mask()
    with torch.inference_mode():
        assert torch.equal(mask + 0.0, eager())
    weight = torch.ones(1, S, requires_grad=True)
    (weight * mask.plain()).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_takes_it(reentrant: bool) -> None:
    x = torch.randn(B, 1, T, S, requires_grad=True)
    grads = []
    for mask in (made_mask(), eager()):
        out = checkpoint(lambda x, mask: (x + mask).softmax(-1).square(), x, mask, use_reentrant=reentrant)
        grads.append(torch.autograd.grad(out.sum(), x)[0] if not reentrant else _backward(out, x))
    assert torch.equal(*grads)


def _backward(out: Tensor, x: Tensor) -> Tensor:
    x.grad = None
    out.sum().backward()
    assert x.grad is not None
    return x.grad


# -- a mask meets other keys than its own -----------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize("sizes", [(T, S + 1), (T, S - 1), (T + 1, S), (1, S)])
def test_a_mask_of_another_length_is_refused(sizes: tuple[int, int]) -> None:
    """Rules would fit any length, and count from another place."""
    q, k, v = (torch.randn(B, 2, n, 5) for n in (sizes[0], sizes[1], sizes[1]))
    text = f"Linear attends {sizes[1]} keys with {sizes[0]} queries under a mask made for {T} queries and {S} keys; the"
    with pytest.raises(ModelError, match=text + r".*set_attn_implementation\(\"eager\"\)"):
        headwise_attention(nn.Linear(1, 1), q, k, v, made_mask())


# -- keys of a cache -----------------------------------------------------------------------------------------------


def quantized_pages() -> tuple[Any, Tensor]:
    """int8 in pages, and the same numbers."""
    x = torch.randn(4, 2, PAGE, 5)
    pages, table = quantize(x), torch.tensor([[0, 2], [3, 1]])
    whole = pages.dequantize()[table].transpose(1, 2).flatten(2, 3)
    return Paged(pages, table, PAGE + 3), whole[:, :, : PAGE + 3]


def test_lazy_keys_are_tensors_in_the_models_dtype() -> None:
    stored, exact = quantized_pages()
    for dtype in (torch.float32, torch.bfloat16):
        key = to_model(stored, dtype)
        assert isinstance(key, LazyKeys) and key.shape == exact.shape and key.dtype == dtype and not is_made(key)
        assert str(key) == f"LazyKeys(Paged, shape={tuple(exact.shape)}, dtype={dtype})"
        assert from_model(key) is stored and from_model(key.detach()) is stored
        assert torch.equal(torch.cat([key, key], 1), torch.cat([exact, exact], 1).to(dtype))
        assert torch.equal(key.view(-1, 5), exact.to(dtype).reshape(-1, 5)), "laid out as it says"
        pages, table = torch.randn(4, 2, PAGE, 5), torch.tensor([[0, 2], [3, 1]])
        cut = to_model(Paged(pages, table, 7), dtype)
        assert torch.equal(cut.view(-1), pages[[0, 3], :, :7].flatten())
        assert torch.equal(copy.copy(key)[:, :1].mT, exact[:, :1].mT.to(dtype))
    plain = torch.ones(2)
    assert to_model(plain, torch.float16) is plain and from_model(plain) is plain


def test_keys_that_a_model_has_written_to_are_those_attended() -> None:
    stored, exact = quantized_pages()
    key = to_model(stored, torch.float32)
    key.mul_(2.0)
    assert torch.equal(from_model(key), 2 * exact)


@pytest.mark.parametrize("computed", ["key", "value"])
def test_keys_in_pages_beside_values_that_the_model_made(computed: str) -> None:
    """As DiffLlama's: it joins its values anew, and leaves its keys where they lie."""
    stored, exact = quantized_pages()
    q = torch.randn(2, 4, 1, 5)
    whole = headwise_attention(nn.Module(), q, exact, exact, None)[0]
    pair = {name: to_model(stored, torch.float32) for name in ("key", "value")}
    pair[computed] = torch.cat([pair[computed]])
    out = headwise_attention(nn.Module(), q, pair["key"], pair["value"], None)[0]
    torch.testing.assert_close(out, whole, atol=2e-6, rtol=2e-6)
