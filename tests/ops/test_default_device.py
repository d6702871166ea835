"""What torch makes new tensors on is the user's affair: inputs on the CPU give what they give, whatever it is."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import BACKENDS, attend
from draw import drawn, slow_except
from hf_models import BY_NAME
from mask_cases import FEW, LONG, MASKS, SHORT
from test_threads import IDS, Reader

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache
from headwise.parallel.cache.ownership import TokenOwnership
from headwise.parallel.cache.shard_mask import mask_at, shard_mask, spans
from headwise.testing import assert_same_bits

ROOT = Path(headwise.__file__).parent
MAKERS = {
    *("arange", "as_tensor", "empty", "eye", "full", "hann_window", "linspace", "ones"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros"),
}


@contextmanager
def elsewhere() -> Iterator[None]:
    """New tensors without a device have no numbers."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def check(job: Callable[[], Any]) -> None:
    """It gives the same there."""
    torch.manual_seed(1)
    expected = job()
    torch.manual_seed(1)
    with elsewhere():
        answer = job()
    if isinstance(expected, torch.Tensor):
        assert_same_bits(answer, expected)
    else:
        assert answer == expected


@pytest.mark.parametrize("backend", slow_except(BACKENDS, {*BACKENDS} - {"flex"}))
def test_attention_under_every_mask(backend: str) -> None:
    for n in (SHORT, LONG):
        torch.manual_seed(0)
        q, k, v = torch.randn(n.B, n.H, n.T, n.D), torch.randn(n.B, n.K, n.S, n.D), torch.randn(n.B, n.K, n.S, n.V)
        for name in drawn([*MASKS] if backend in ("auto", "native") else [*FEW], f"{n}", most=4):
            mask = MASKS[name](n).mask
            if attend(backend, q, k, v, mask=mask) is not None:
                check(partial(attend, backend, q, k, v, mask=mask))


def test_weights_statistics_and_gradients() -> None:
    n = SHORT
    q, k, v = torch.randn(n.B, n.H, n.T, n.D), torch.randn(n.B, n.K, n.S, n.D), torch.randn(n.B, n.K, n.S, n.V)
    for make in MASKS.values():
        mask = make(n).mask
        check(lambda mask=mask: headwise.weights(q, k, mask=mask))
        check(lambda mask=mask: headwise.statistics(q, k, mask=mask).entropy)
        check(lambda mask=mask: headwise.top_keys(q, k, 2, mask=mask).weights)
        check(lambda mask=mask: mask.draw(n.T, n.S) if mask.parts else "")
    q.requires_grad_()
    check(lambda: torch.autograd.grad(headwise.attention(q, k, v, mask=headwise.causal()).sum(), q)[0])
    check(lambda: headwise.attention(q, k, v, dropout=0.5))


def test_masks_of_tokens_split_over_processes() -> None:
    mask, places = headwise.keep(torch.rand(1, 1, 5, 40) < 0.5), torch.arange(10)[None] * 4
    cpu = torch.device("cpu")
    for rule in (headwise.causal(), headwise.window(7), mask, headwise.causal() & headwise.bias(torch.randn(5, 40))):
        check(partial(spans, rule, 5, 40))
        check(lambda rule=rule: shard_mask(TokenOwnership(1, 2, 3), rule, 5, 40, [19]).dense(5, 19, device=cpu))
        check(lambda rule=rule: mask_at(places, rule, 5, 40, [7]).dense(5, 10, device=cpu))


@pytest.mark.parametrize(
    "make",
    [
        lambda: StaticCache(2, 2, 16, capacity=300, device="cpu"),
        lambda: PagedCache(PagePool(9, 2, 16, device="cpu"), 2),
        lambda: PagedCache(PagePool(9, 2, 16, dtype=torch.int8, device="cpu"), 2),
        lambda: RollingCache(2, 2, 16, window=9, chunk=200, device="cpu"),
    ],
    ids=["static", "paged", "int8", "rolling"],
)
def test_caches(make: Callable[[], Any]) -> None:
    x, q = torch.randn(2, 2, 140, 16), torch.randn(2, 4, 1, 16)

    def job() -> torch.Tensor:
        cache = make().append(x, x, lengths=[140, 133])
        for _ in range(3):
            cache = cache.append(x[:, :, :1], x[:, :, :1])
        other = cache.fork().reorder([1, 0]).truncate([134, 141])
        return torch.cat([headwise.attention(q, cache), headwise.attention(q, other.append(x[:, :, :1], x[:, :, :1]))])

    check(job)


def test_modules() -> None:
    for module in (
        headwise.MultiHeadAttention(12, 3, rotary=headwise.nn.Rotary(4)),
        headwise.nn.LatentAttention(24, 2, kv_lora_rank=8, nope_dim=4, rope_dim=4, value_dim=6),
    ):
        x = torch.randn(2, 7, module.d_model)
        check(lambda module=module, x=x: module(x, mask=headwise.causal()).detach())


@pytest.mark.parametrize("kind", ["ours", "Llama GQA", "BERT", "T5"])
def test_look(kind: str) -> None:
    model = Reader() if kind == "ours" else BY_NAME[kind].build()
    more = {"mask_id": 7} if kind == "BERT" else {}
    look = headwise.look
    check(lambda: replace(look.at(model, IDS), seconds=0.0).to_json())
    by = ["gradient", "zero", "mean", "contribution"]
    check(lambda: replace(look.importance(model, IDS, by=by, **more), seconds=0.0).to_json())
    check(lambda: look.ablate(model, IDS, [(0, 1)], by="mean", **more).to_json())
    if kind not in ("BERT", "T5"):
        check(lambda: look.circuits(model, IDS).to_json())
    check(lambda: look.redundancy(model, IDS).to_json())


def makers(tree: ast.Module) -> Iterator[int]:
    """The lines of calls that make a tensor on no device in particular."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
            named = any(keyword.arg in ("device", None) for keyword in node.keywords)
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and not named:
                yield node.lineno


def test_every_tensor_is_made_on_a_device() -> None:
    """But for what the user asks for by a name of its own, as of torch's modules, and in programs of our own."""
    theirs = {"alibi_slopes": 1, "trace": 1}
    free = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] not in ("cli", "testing")
        for line in makers(ast.parse(path.read_text()))
    ]
    assert len(free) == sum(theirs.values()), free
    assert list(makers(ast.parse("torch.zeros(3)\ntorch.zeros(3, device='cpu')"))) == [1], "it sees a planted one"
