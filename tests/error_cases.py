"""What one rank raises before it agrees, or agrees to otherwise: in groups of their own, for those that break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mismatch_cases import words
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import headwise
import headwise.hf
from headwise.cache import PagedCache, PagePool, StaticCache
from headwise.parallel import (
    Comm,
    Expansion,
    ShardedCache,
    context,
    context_parallel,
    join_sequence,
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
