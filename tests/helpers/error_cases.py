"""What one rank raises before it agrees, or agrees to otherwise; and what runs anew in a backward, or is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mismatch_cases import words
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import headwise
import headwise.hf
import headwise.parallel
from headwise.cache import PagedCache, PagePool, StaticCache
from headwise.nn.attention_mode import current_mode
from headwise.parallel import (
    Comm,
    Expansion,
    ShardedCache,
    context,
    context_parallel,
    join_sequence,
    split_sequence,
    sum_gradients,
)

TIMEOUT = 3.0  # seconds that a rank waits for one that told nothing


def planted(*places: Tensor, **_: object) -> Tensor:
    """A mask's function, or something else, that fails on rank 1."""
    if dist.get_rank() == 1:
        raise KeyError("planted")
    return places[3] <= places[2]


def early_errors() -> dict[str, str]:
    """What each rank says where rank 1 alone raises, by what it was about to do; the group goes on."""
    here, group = dist.get_rank() == 1, dist.new_group()
    Comm.of(group, TIMEOUT)
    x, q = torch.randn(1, 2, 5, 8), torch.randn(1, 4, 5, 8)
    keep: Any = torch.ones(10, 10, dtype=torch.bool, device="meta") if here else None
    pages = ShardedCache(PagedCache, PagePool(9, 2, 8), 1, group=group)
    full = ShardedCache(PagedCache, PagePool(9, 2, 8), 1, group=group)
    if here:
        full.local.append = planted
    own = ShardedCache(StaticCache, 1, 4, 8, capacity=50, own_heads=4, group=group).append(x, x)
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5, **sizes))
    model.set_attn_implementation("headwise")
    mha = headwise.MultiHeadAttention(8, 2, rotary=headwise.nn.Rotary(4))

    def module() -> None:
        with context(group, length=11):
            mha(torch.randn(1, 4 if here else 6, 8))

    def forward() -> None:
        with headwise.hf.context_parallel(model, group):
            model(input_ids=torch.ones(1, 4, dtype=torch.long), logits_to_keep=int(here))

    runs: dict[str, Callable[[], object]] = {
        "context_parallel": lambda: context_parallel(x, x, x, mask=keep, group=group),
        "append": lambda: pages.append(x.double() if here else x, x),
        "room": lambda: full.append(x, x),
        "attention to a ShardedCache": lambda: own.attend(q[:, :2], mask=headwise.rule(planted)),
        "join_sequence": lambda: join_sequence([] if here else x, group),  # type: ignore[arg-type]
        "sum_gradients": lambda: sum_gradients(torch.zeros(2) if here else [torch.zeros(2)], group),
        "positions": module,
        "forward": forward,
    }
    return {what: words(run) for what, run in runs.items()} | {"lengths": f"{pages.lengths} {full.lengths}"}


def late_error() -> str:
    """Rank 1 raises while it attends a cache; the others wait for its part."""
    group = dist.new_group()
    x = torch.randn(1, 2, 5, 8)
    cache = ShardedCache(StaticCache, 1, 2, 8, capacity=50, group=group, timeout=TIMEOUT).append(x, x)
    return words(lambda: cache.attend(x, mask=headwise.rule(planted)))


def refused_backend() -> tuple[str, str]:
    """A backend that there is not, and the call after it."""
    group = dist.new_group()
    x = torch.randn(1, 2, 5, 8)
    cache = ShardedCache(StaticCache, 1, 2, 8, capacity=50, group=group, timeout=TIMEOUT).append(x, x)
    return words(lambda: cache.attend(x, backend="none")), words(lambda: cache.attend(x))


def double(vectors: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    both = vectors.expand(-1, last - first, -1, -1)
    return both[..., :4], both[..., :3]


def disagreed() -> dict[str, str]:
    """What is said where rank 1 passes another scale, width, or lets something else learn."""
    here, group = dist.get_rank() == 1, dist.new_group()
    x, v = torch.randn(1, 2, 5, 4), torch.randn(1, 1, 5, 7 if here else 6)

    def run(key: Tensor = x, value: Tensor | None = x, **options: Any) -> Tensor:
        out: Tensor = context_parallel(x, key, value, group=group, timeout=TIMEOUT, layout="ring", **options)
        return out

    def made(width: int = 6, value_dim: int = 3, learns: bool = False) -> dict[str, Any]:
        read = (torch.zeros(1, requires_grad=learns),)
        return {"value": None, "expansion": Expansion(double, read, value_dim, width)}

    def learned() -> None:
        with torch.set_grad_enabled(not here):
            run(sinks=torch.zeros(2, requires_grad=True))

    return {
        "scale": words(lambda: run(scale=0.5000001 if here else 0.5)),
        "width": words(lambda: run(v, **made(v.shape[3]))),
        "read": words(lambda: run(v[..., :6], **made(learns=here))),
        "no_grad": words(learned),
        "own width": words(lambda: run(v[..., :6], **made(5))),
        "value_dim": words(lambda: run(v[..., :6], **made(value_dim=0))),
        "fine": words(lambda: run(v[..., :6], **made())),
    }


def checkpointed(reentrant: bool) -> tuple[float, float, str, str]:
    """Activation checkpointing, with the backward within the context and outside; and a plain forward after it.

    Returns the errors of gradients within the context and of none, relative to the largest, and what is said outside,
    and of what ran outside within.
    """
    torch.manual_seed(1)
    mha = headwise.MultiHeadAttention(16, 4, num_kv_heads=2, rotary=headwise.nn.Rotary(4))
    mla = headwise.LatentAttention(16, 2, kv_lora_rank=7, nope_dim=5, rope_dim=4, value_dim=3)
    x, mask = torch.randn(2, 11, 16), headwise.causal()

    def run(z: Tensor) -> Tensor:
        return mla(mha(z, mask=mask), mask=mask)  # type: ignore[no-any-return]

    def again(z: Tensor) -> Tensor:
        return checkpoint(run, z, use_reentrant=reentrant).square().sum()  # type: ignore[no-any-return]

    parameters = [*mha.parameters(), *mla.parameters()]
    whole = x.clone().requires_grad_()
    run(whole).square().sum().backward()
    want = [whole.grad, *(p.grad for p in parameters)]

    def far(got: list[Any]) -> float:
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))

    for p in parameters:
        p.grad = None
    own = split_sequence(x).requires_grad_()
    with context(timeout=TIMEOUT):
        again(own).backward()
    sum_gradients(parameters)
    within = far([join_sequence(own.grad), *(p.grad for p in parameters)])
    with context(timeout=TIMEOUT):
        loss = again(own)
    outside = words(loss.backward)
    loss = again(whole)
    with context(timeout=TIMEOUT):
        inside = words(loss.backward)
    for p in (whole, *parameters):
        p.grad = None
    again(whole).backward()
    return within, far([whole.grad, *(p.grad for p in parameters)]), outside, inside


def checkpointed_model(reentrant: bool) -> float:
    """The same of a model of transformers, whose contexts end with its forward: how far the gradients are off."""
    torch.manual_seed(1)
    sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5, **sizes)).train()
    model.set_attn_implementation("headwise")
    ids = torch.randint(5, (2, 13))

    def again(forward: Callable[..., Tensor], hidden: Tensor, **options: Any) -> object:
        return checkpoint(partial(forward, **options), hidden, use_reentrant=reentrant)

    model(input_ids=ids, labels=ids).loss.backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    for layer in model.model.layers:
        layer.forward = partial(again, layer.forward)
    with headwise.hf.context_parallel(model) as shards:
        loss = model(input_ids=ids, labels=ids).loss
        other = model(input_ids=ids[:, :7], labels=ids[:, :7]).loss  # its shards are others
        (loss + 0 * other).backward()
        left = current_mode() is None
    shards.sum_gradients()
    far = max(float((p.grad - w).abs().max() / w.abs().max()) for p, w in zip(model.parameters(), want, strict=True))
    return far if left else torch.inf


def compiled() -> tuple[dict[str, float], str]:
    """How far attention is off that torch.compile has seen, and what fullgraph=True is told."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    mha = headwise.MultiHeadAttention(16, 4, num_kv_heads=2, rotary=headwise.nn.Rotary(4))
    x, mask = torch.randn(2, 11, 16), headwise.causal()
    want = mha(x, mask=mask)
    own = split_sequence(x)

    def op(part: Tensor, **options: Any) -> Tensor:
        q = part[:, None]
        return join_sequence(context_parallel(q, q, q, mask=mask, **options), dim=2)  # type: ignore[no-any-return]

    whole = words(lambda: torch.compile(op, backend="eager", fullgraph=True)(own))
    run = torch.compile(mha, backend="eager")
    with context(length=11, timeout=30.0):
        out = join_sequence(run(own, mask=mask).detach())
    far = {"context": float((out - want).detach().abs().max())}
    q = x[:, None]
    far["op"] = float((torch.compile(op, backend="eager")(own) - headwise.attention(q, q, q, mask=mask)).abs().max())
    split = torch.compile(headwise.parallel.tensor_parallel(mha, mesh), backend="eager")
    far["heads"] = float((split(x, mask=mask) - want).detach().abs().max())
    return far, whole


def sums() -> list[list[float]]:
    """Of numbers that bfloat16 rounds when they are added one by one, and of integers."""
    comm = Comm.of()
    parts = [torch.tensor([1.0 if comm.rank else 256.0])] * comm.world
    comm.agree("sums", {})
    narrow = comm.reduce_scatter("sums", [x.bfloat16() for x in parts])
    whole = comm.reduce_scatter("sums", [x.long() + 2**24 for x in parts], step=1)
    assert (narrow.dtype, whole.dtype) == (torch.bfloat16, torch.int64)
    return [narrow.tolist(), whole.tolist()]
