"""Ranks of `test_parallel_training.py`: what a training loop does around attention over ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from context_cases import off
from mismatch_cases import words
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import headwise
from headwise.cache import RollingCache, StaticCache
from headwise.distributed.workers import Processes
from headwise.nn import MultiHeadAttention
from headwise.parallel import (
    Expansion,
    ShardedCache,
    context,
    context_parallel,
    join_sequence,
    split_sequence,
    sum_gradients,
    tensor_parallel,
)

TIMEOUT = 5.0


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


# --- sums of gradients ------------------------------------------------------------------------------------------------


def unused(how: str) -> list[Any]:
    """The gradients of three parameters: found on all ranks, on the first alone, on none."""
    here = dist.get_rank() == 0
    some = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    (some[0].sum() + (3 * some[1].sum() if here else 0)).backward()
    if how == "dtensors":
        split: list[Any] = [nn.Parameter(DTensor.from_local(x.detach(), mesh())) for x in some]
        for x, old in zip(split, some, strict=True):
            x.grad = None if old.grad is None else DTensor.from_local(old.grad, mesh())
        some = split
    if how == "processes":
        Processes.of(dist.group.WORLD).add_gradients(some)
    else:
        sum_gradients(some)
    return [None if x.grad is None else getattr(x.grad, "_local_tensor", x.grad).tolist() for x in some]


def refused_gradients() -> dict[str, str]:
    """What is said of gradients that are not summed; the group goes on."""
    here, table = dist.get_rank() == 1, nn.Embedding(5, 2, sparse=True)
    if here:  # the other has none, of which nobody could say that it would be sparse
        table(torch.tensor([1])).sum().backward()
    frozen = [nn.Parameter(torch.ones(2)).requires_grad_(here == bool(n)) for n in range(2)]
    lists: dict[str, Any] = {"sparse": [nn.Parameter(torch.ones(1)), table.weight], "frozen": frozen}
    lists |= {"names": {"weight": frozen[0]}, "nothing": []}
    return {name: words(functools.partial(sum_gradients, one)) for name, one in lists.items()}


# --- modules whose heads are split ------------------------------------------------------------------------------------


def build(tie: str = "", K: int = 6) -> MultiHeadAttention:
    torch.manual_seed(3)
    made = MultiHeadAttention(12, 6, num_kv_heads=K, head_dim=4, bias=True, qk_norm=nn.RMSNorm)
    if tie == "key is value":
        made.v_proj = made.k_proj
    if tie == "query is key":
        made.k_proj.weight = made.q_proj.weight
    if tie == "norms":
        assert made.k_norm is not None and made.q_norm is not None
        made.k_norm.weight = made.q_norm.weight
    return made


def steps(module: Any, rounds: int = 2) -> dict[str, Tensor]:
    """The parameters after steps of two backward calls each."""
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    for _ in range(rounds):
        optimizer.zero_grad()
        for part in x.split(1):
            module(part, mask=headwise.causal()).square().sum().backward()
        optimizer.step()
    return {name: whole(p.detach()) for name, p in module.state_dict().items()}


def tied(cases: list[tuple[str, int]]) -> dict[str, Any]:
    """What is off, of the largest, after steps of a split module whose parts share parameters; and whether they do."""
    wrong: dict[str, Any] = {}
    for tie, K in cases:
        split = tensor_parallel(build(tie, K), mesh())
        one, other = steps(build(tie, K)), steps(split)
        far = {name: off(other[name], one[name]) for name in one if name != "k_proj.bias"}  # which scores leave out
        numbers = len([*split.parameters()]), len([*build(tie, K).parameters()])
        if max(far.values()) > 1e-4 or numbers[0] != numbers[1]:
            wrong[f"{tie} {K}"] = far, numbers
    return wrong


def split_uses() -> dict[str, Any]:
    """Of a split module: a gradient of its gradient, its copies after a call, and dtypes under autocast."""
    one = build()
    split: Any = tensor_parallel(build(), mesh())
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def twice() -> None:
        (grad,) = torch.autograd.grad(split(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    here = split(x)
    copied = copy.deepcopy(split)
    averaged = torch.optim.swa_utils.AveragedModel(split)
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = one(x).dtype, split(x).dtype
    return {
        "twice": words(twice),
        "copies": [off(again(x), here) for again in (copied, averaged)],
        "dtypes": dtypes,
    }


class Scaled(nn.Linear):
    """A linear layer that is no plain one."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def parameter_bytes() -> tuple[int, int]:
    """Bytes of memory of the parameters that are here, and of their numbers."""
    parts = [p.to_local() for p in tensor_parallel(build(), mesh()).parameters()]  # type: ignore[attr-defined]
    return sum(x.untyped_storage().nbytes() for x in parts), sum(x.nbytes for x in parts)


def frozen() -> dict[str, tuple[bool, bool]]:
    """Of each parameter whether it learns after the split, and whether it did before; and whether it is in training."""
    made = build().eval()
    for name, p in made.named_parameters():
        p.requires_grad_(name.startswith(("v_proj", "q_norm")))
    before = {name: p.requires_grad for name, p in made.named_parameters()}
    parts = {name: part.training for name, part in made.named_modules()}
    split = tensor_parallel(made, mesh())
    learns = {name: (p.requires_grad, before[name]) for name, p in split.named_parameters()}
    return learns | {name: (part.training, parts[name]) for name, part in split.named_modules()}


def hooked() -> dict[str, str]:
    """What is said of hooks that would be lost, and of an o_proj that is another part, too."""

    def case(change: Callable[[Any], object]) -> str:
        made = build()
        change(made)
        said = words(lambda: tensor_parallel(made, mesh()))
        assert not any(isinstance(p, DTensor) for p in made.parameters()) or said == "nothing"
        return said

    def latent() -> Any:
        made = headwise.LatentAttention(12, 6, kv_lora_rank=7, nope_dim=6, rope_dim=2, value_dim=3)
        made.kv_a_layernorm = nn.LayerNorm(7)
        return made

    def same(made: Any) -> None:
        made.o_proj = made.q_proj = nn.Linear(24, 24)

    return {
        "forward": case(lambda made: made.o_proj.register_forward_hook(print)),
        "before": case(lambda made: made.q_proj.register_forward_pre_hook(print)),
        "backward": case(lambda made: made.v_proj.register_full_backward_hook(print)),
        "gradient": case(lambda made: made.k_proj.bias.register_hook(print)),
        "accumulated": case(lambda made: made.q_norm.weight.register_post_accumulate_grad_hook(print)),
        "kept": case(lambda made: made.inner.register_forward_hook(print)),
        "o_proj": case(same),
        "forward of its own": case(lambda made: setattr(made.q_proj, "forward", made.q_proj.forward)),
        "no plain one": case(lambda made: setattr(made, "v_proj", Scaled(12, 24))),
        "no plain norm": words(lambda: tensor_parallel(latent(), mesh())),
    }


def state_dicts() -> list[float]:
    """A whole state dict into a split module, and out of it."""
    options, x = (
        StateDictOptions(full_state_dict=True),
        torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1)),
    )
    other = build(K=2)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1)
    split = tensor_parallel(build(K=2), mesh())
    set_model_state_dict(split, other.state_dict(), options=options)
    one = build(K=2)
    one.load_state_dict(get_model_state_dict(split, options=options))
    return [off(split(x).detach(), other(x).detach()), off(one(x).detach(), other(x).detach())]


# --- what every process does alike ------------------------------------------------------------------------------------


def no_rows() -> list[Any]:
    """A batch of none, in each layout, forward and backward; and a call after it."""
    shapes: list[Any] = []
    for layout in ("ring", "gather", "ulysses"):
        x = torch.randn(0, 2, 3, 4, requires_grad=True)
        out, lse = context_parallel(x, x, x, layout=layout, mask=headwise.causal(), return_lse=True)  # type: ignore[arg-type]
        out.sum().backward()
        assert x.grad is not None
        shapes.append((tuple(out.shape), tuple(lse.shape), tuple(x.grad.shape)))
    y = torch.randn(1, 2, 3, 4)
    return [*shapes, tuple(context_parallel(y, y, y).shape)]


def learning_cache() -> dict[str, str]:
    """What is said of what would learn beside a query that does not; and what is kept then."""
    x, learns = torch.randn(1, 2, 5, 8), torch.ones(4, requires_grad=True)
    query, key = torch.randn(1, 4, 5, 8), x.clone().requires_grad_()
    full, empty = (ShardedCache(StaticCache, 1, 2, 8, capacity=9) for _ in range(2))
    full.append(x, x)
    own = ShardedCache(StaticCache, 1, 2, 8, capacity=9, own_heads=4)
    runs: dict[str, Callable[[], object]] = {
        "sinks": lambda: full.attend(query, sinks=learns),
        "gate": lambda: full.attend(query, gate=learns),
        "mask": lambda: full.attend(query, mask=headwise.alibi(learns)),
        "key": lambda: empty.append(key, x),
        "value": lambda: empty.append(x, key),
        "own key": lambda: own.append(key[:, :1], x[:, :1]),
    }
    said = {name: words(run) for name, run in runs.items()} | {"lengths": f"{empty.lengths} {own.lengths}"}
    with torch.no_grad():
        return said | {"no_grad": words(lambda: empty.append(key, key).attend(query, sinks=learns))}


def of_lse(layout: Any) -> dict[str, float]:
    """Gradients of a loss that reads lse alone, against one process."""
    make, mask = torch.Generator().manual_seed(1), headwise.causal()
    tensors = [torch.randn(1, heads, 11, 4, generator=make) for heads in (4, 2, 2)]
    grads = []
    for own in (False, True):
        q, k, v = ((split_sequence(x, dim=2) if own else x.clone()).requires_grad_() for x in tensors)
        attend: Any = functools.partial(context_parallel, layout=layout) if own else headwise.attention
        attend(q, k, v, mask=mask, return_lse=True)[1].square().sum().backward()
        grads.append([x.grad for x in (q, k)])
    return {name: off(ours, split_sequence(want, dim=2)) for name, want, ours in zip("qk", *grads, strict=True)}


def forked() -> list[float]:
    """A sharded cache that goes on beside its fork, and the fork, against caches of one process."""
    x, query = (torch.randn(1, n, 9, 8, generator=torch.Generator().manual_seed(n)) for n in (2, 4))
    far, pairs = [], []
    for kind in (ShardedCache, None):
        cache: Any = ShardedCache(StaticCache, 1, 2, 8, capacity=20) if kind else StaticCache(1, 2, 8, capacity=20)
        other = cache.append(x, x).fork()
        pairs.append((cache.append(x[:, :, :5], x[:, :, :5]), other.append(x[:, :, 3:], x[:, :, 3:])))
    for ours, want in zip(*pairs, strict=True):
        far.append(off(headwise.attention(query, ours), headwise.attention(query, want)))
    return far


def unlike_caches() -> dict[str, str]:
    """What is said of caches and calls of rank 1 that are others, and of calls that cannot be."""
    here, group = dist.get_rank() == 1, dist.new_group()
    x, query = torch.randn(2, 2, 5, 8), torch.randn(2, 4, 5, 8)

    def made(kind: Any = StaticCache, heads: int = 2, **options: Any) -> ShardedCache:
        sizes: dict[str, Any] = {"capacity": 20} if kind is StaticCache else {"window": 9, "chunk": 9}
        cache = ShardedCache(kind, 2, 2, 8, group=group, timeout=TIMEOUT, **sizes | options)
        return cache.append(x[:, :heads], x[:, :heads])

    cache = made()
    runs: dict[str, Callable[[], object]] = {
        "block": lambda: made(block=2 if here else 1).attend(query),
        "dtype": lambda: made(dtype=torch.int8 if here else torch.float32).attend(query),
        "kind": lambda: made(RollingCache if here else StaticCache).attend(query),
        "queries": lambda: cache.attend(query[:, :, : 4 if here else 5]),
        "scale": lambda: cache.attend(query, scale=0.25 if here else 0.5),
        "return_lse": lambda: cache.attend(query, return_lse=here),
        "heads": lambda: cache.attend(query[:, :3]),
        "option": lambda: cache.attend(query, seed=1),
        "own heads": lambda: made(heads=1, own_heads=4).attend(query[:, :1]),
        "rows": lambda: cache.truncate([3]),
        "more": lambda: cache.truncate(6),
        "chunk": lambda: made(RollingCache, chunk=4),
        "nothing": lambda: cache.attend(query),
    }
    return {name: words(run) for name, run in runs.items()}


def joined() -> dict[str, float]:
    """Gradients of sequences that were joined, each rank's loss another, against those of one process."""
    rank, world, far = dist.get_rank(), dist.get_world_size(), {}
    x, weights = (torch.randn(n, 2, 11, 3, generator=torch.Generator().manual_seed(n)) for n in (1, world))
    for order in ("contiguous", "zigzag"):
        own = split_sequence(x[0], order=order).requires_grad_()  # type: ignore[arg-type]
        (join_sequence(own, order=order) * weights[rank]).sum().backward()  # type: ignore[arg-type]
        assert own.grad is not None
        far[order] = off(own.grad, split_sequence(weights.sum(0), order=order))  # type: ignore[arg-type]
    return far


# --- what ranks do not agree on ---------------------------------------------------------------------------------------


def halves(vectors: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    both = vectors.expand(-1, last - first, -1, -1)
    return both[..., :4], both[..., :3]


def unlike() -> dict[str, str]:
    """What is said where rank 1 does otherwise, or all do what cannot be; the group goes on."""
    here, x = dist.get_rank() == 1, torch.randn(1, 2, 5, 4)
    group = dist.new_group()
    made = Expansion(halves, (), 3, 4)

    def run(*tensors: Tensor, **options: Any) -> object:
        return context_parallel(*(tensors or (x, x, x)), group=group, timeout=TIMEOUT, **{"layout": "ring", **options})

    def back() -> None:
        y = x.clone().requires_grad_()
        outs = [context_parallel(y, y, y, group=group, layout=layout) for layout in ("ring", "ulysses")]  # type: ignore[arg-type]
        for out in outs[:: -1 if here else 1]:
            out.sum().backward()

    def back_of_joined() -> None:
        y = x.clone().requires_grad_()
        wholes = [join_sequence(n * y, group, dim=2) for n in (1, 2)]
        for one in wholes[:: -1 if here else 1]:
            one.sum().backward()

    runs: dict[str, Callable[[], object]] = {
        "order": lambda: run(order="zigzag" if here else "contiguous"),
        "dropout": lambda: run(dropout=0.25 if here else 0.5),
        "softcap": lambda: run(softcap=2.0 if here else 3.0),
        "return_lse": lambda: run(return_lse=here, layout="ulysses"),
        "a mask that learns": lambda: run(mask=headwise.alibi(torch.ones(2, requires_grad=here))),
        "an option": lambda: run(backend="native"),
        "a flag": lambda: run(return_lse=1),
        "sinks": lambda: run(sinks=torch.zeros(3)),
        "a mask of other lengths": lambda: run(mask=headwise.keep(torch.ones(3, 3, dtype=torch.bool))),
        "two vectors a token": lambda: run(x, x, expansion=made),
        "values beside vectors": lambda: run(x, x[:, :1], x[:, :1], expansion=made),
        "joined": lambda: join_sequence(x, group, dim=2, order="zigzag" if here else "contiguous"),
        "joined widths": lambda: join_sequence(x[..., : 3 + here], group, dim=2),
        "joined dtypes": lambda: join_sequence(x.double() if here else x, group, dim=2),
        "nothing": run,
    }
    runs |= {"backward": back, "backward of joined": back_of_joined}
    return {name: words(one) for name, one in runs.items()}


# --- autocast ---------------------------------------------------------------------------------------------------------


def latent() -> headwise.LatentAttention:
    torch.manual_seed(3)
    return headwise.LatentAttention(11, 3, q_lora_rank=5, kv_lora_rank=7, nope_dim=5, rope_dim=4, value_dim=3)


def autocast(layout: Any) -> dict[str, tuple[float, float]]:
    """Root mean square errors of gradients against float64: of one process and of ranks, both under autocast."""
    x, mask = torch.randn(2, 13, 11, generator=torch.Generator().manual_seed(1)), headwise.causal()
    own, grads = split_sequence(x, order="zigzag"), []
    for dtype, split in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        made = latent().to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            if split:
                with context(order="zigzag", layout=layout):
                    out = made(own, mask=mask)
            else:
                out = made(x.to(dtype), mask=mask)
        out.to(dtype).square().sum().backward()
        if split:
            sum_gradients(made)
        grads.append({name: p.grad for name, p in made.named_parameters()})
    exact, one, ours = grads

    def error(some: dict[str, Any], name: str) -> float:
        return float((some[name].double() - exact[name]).square().mean().sqrt())

    return {name: (error(one, name), error(ours, name)) for name in exact}
