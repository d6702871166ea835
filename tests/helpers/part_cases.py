"""What the ranks of test_parallel_parts_of.py run: files of other dtypes, inner parts, gathered heads, and bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mismatch_cases import words
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from tp_cases import mesh

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache, quantize
from headwise.hf.distributed.tensor_parallel import gather_heads
from headwise.nn import InnerAttention, LatentAttention, MaxLogitAttention, MultiHeadAttention
from headwise.ops.sharding.heads import Group, Share
from headwise.parallel import ShardedCache, context, load_slices, split_sequence, tensor_parallel
from headwise.parallel.head_split.shards import HeadShards

M, H, K, D = 13, 6, 2, 8


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def module(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(1)
    return MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, bias=True, **options)


def slices_in_their_dtype(folder: str) -> dict[str, str]:
    """A file in one dtype fills a split module in another: its numbers, rounded to the module's dtype."""
    wrong: dict[str, str] = {}
    for stored in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        for wanted in (torch.float32, torch.bfloat16):
            path = f"{folder}/{stored} {wanted} {dist.get_rank()}.safetensors"
            numbers = {name: x.detach().to(stored).contiguous() for name, x in module().state_dict().items()}
            save_file(numbers, path)
            for device in ("cpu", "meta"):
                with torch.device(device):
                    made = module().to(wanted)
                tensor_parallel(made, mesh())
                load_slices(made, path)
                for name, part in made.state_dict().items():
                    local = part.to_local() if isinstance(part, DTensor) else part
                    whole = part.full_tensor() if isinstance(part, DTensor) else part
                    if not local.dtype == part.dtype == wanted or not torch.equal(whole, numbers[name].to(wanted)):
                        wrong[f"{stored} {wanted} {device} {name}"] = f"{local.dtype} {part.dtype}"
    return wrong


class Local(headwise.nn.Inner):
    """An inner part of a user, which attends what it is given."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None, gate: Any = None) -> Tensor:
        return headwise.attention(query, key, value, mask=mask, gate=gate, **self.options())

    def options(self) -> dict[str, Any]:
        return {"scale": 1.0}


def inner_parts_in_a_context() -> dict[str, str]:
    """The errors of inner parts that attend the tokens of their rank alone; "" where the call runs."""
    said = {}
    parts = {
        "InnerAttention": InnerAttention(softcap=3.0),
        "Local": Local(),
        "MaxLogitAttention": MaxLogitAttention(),
        "InnerFunction": lambda q, k, v, *, mask: headwise.attention(q, k, v, mask=mask),
    }
    for name, inner in parts.items():
        mha = module(inner=inner)
        try:
            with context():
                mha(split_sequence(drawn(2, 11, M)), mask=headwise.causal())
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
    return said


def gathered_of_all_heads() -> dict[str, str]:
    """What a probe sees of each rank's part of sinks and biases; what is off. Two texts and two heads a rank, too."""
    wrong = {}
    world, rank = dist.get_world_size(), dist.get_rank()
    for heads in (world * 2, world * 3):
        here = HeadShards(Group(mesh()), Share(heads, heads, world, rank))
        own = heads // world
        q, k, v = (drawn(2, heads, 5, n, seed=n) for n in (4, 3, 7))
        shapes = {(heads,): 0, (heads, 5, 5): 0, (2, heads, 5, 5): 1, (own, heads, 1, 5): 1, (2, 1, 5, 5): None}
        for shape, axis in shapes.items():
            x = drawn(*shape, seed=9)
            part = x if axis is None else x.narrow(axis, rank * own, own)
            tensors = tuple(t.narrow(1, rank * own, own) for t in (q, k, v))
            got = gather_heads(here, tensors, bias=part, sinks=None)
            same = all(torch.equal(got[name], t) for name, t in zip(("query", "key", "value"), (q, k, v), strict=True))
            if not same or not torch.equal(got["bias"], x) or got["sinks"] is not None:
                wrong[f"{heads} {shape}"] = str(tuple(got["bias"].shape))
    return wrong


def rows_of_a_batch_have_bits_of_their_own() -> dict[str, float]:
    """A row of a sharded cache attended in a batch of three and alone, on every rank; what is off.

    Ranks merge an even share of the rows, head after head; with four heads on three ranks the shares cut heads apart.
    """
    wrong, heads = {}, 4
    makers = {
        "static": lambda B: ShardedCache(StaticCache, B, K, D, capacity=64),
        "paged": lambda B: ShardedCache(PagedCache, PagePool(8, K, D), B),
        "rolling": lambda B: ShardedCache(RollingCache, B, K, D, window=17),
    }
    for name, make in makers.items():
        key, value, query = drawn(3, K, 23, D, seed=1), drawn(3, K, 23, D, seed=2), drawn(3, heads, 5, D, seed=3)
        cache = make(3).append(key, value)
        sinks = drawn(heads, seed=4)
        for options in ({}, {"sinks": sinks}):
            together = headwise.attention(query, cache, **options)
            for b in range(3):
                alone = headwise.attention(
                    query[b : b + 1], make(1).append(key[b : b + 1], value[b : b + 1]), **options
                )
                if not torch.equal(together[b : b + 1], alone):
                    wrong[f"{name} {b} {sorted(options)}"] = float((together[b] - alone[0]).abs().max())
    return wrong


def tensors_of_some_kinds() -> dict[str, str]:
    """Attention where each of query, key and value is a DTensor or a plain tensor: what is off, or its error."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    q, k, v = drawn(2, H, 5, D, seed=1), drawn(2, H, 7, D, seed=2), drawn(2, H, 7, D, seed=3)
    expected = headwise.attention(q, k, v)
    said = {}
    for place in (Shard(1), Replicate()):
        for spread in ((1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
            tensors = [
                distribute_tensor(x, mesh(), [place]) if s else x for x, s in zip((q, k, v), spread, strict=True)
            ]
            name = f"{place} {spread}"
            try:
                out: Any = headwise.attention(*tensors)
                whole = out.full_tensor() if isinstance(out, DTensor) else out
                said[name] = "" if torch.allclose(whole, expected, atol=1e-5) else "wrong numbers"
            except (TypeError, ValueError, RuntimeError) as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said


def masks_that_a_probe_sees() -> dict[str, Any]:
    """The weights that a probe's call of a split module says, against those of the whole one; what is off.

    Each mask says something else of each head, and each rank attends with its own part of it.
    """
    wrong: dict[str, Any] = {}
    x, kept = drawn(2, 7, M, seed=3), drawn(H, 7, 7, seed=4) > 0
    masks = {
        "slopes": headwise.causal() & headwise.alibi(torch.arange(H) / 5.0),
        "kept": headwise.keep(kept | torch.eye(7).bool()),
        "alike": headwise.window(3),
    }
    for name, mask in masks.items():
        seen = []
        for made in (module(), tensor_parallel(module(), mesh())):
            with headwise.nn.probe(made) as found, torch.no_grad():
                made(x, mask=mask)
            [call] = found.calls
            seen.append(headwise.weights(call.query, call.key, **call.scoring))
        far = float((seen[0] - seen[1]).abs().max()) if seen[0].shape == seen[1].shape else -1.0
        if not 0 <= far <= 1e-6:
            wrong[name] = far
    return wrong


def dtensors_in_place_of_plain_tensors() -> dict[str, str]:
    """What calls say that read the data of their tensors, where one of these is a DTensor."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    def spread(x: Tensor) -> Any:
        return distribute_tensor(x, mesh(), [Replicate()])

    q, k, v = drawn(2, H, 5, D, seed=1), drawn(2, H, 7, D, seed=2), drawn(2, H, 7, D, seed=3)
    hidden, table = drawn(5, 7, seed=4) > 0, drawn(H, 13, seed=5)
    masks = {
        "keep": headwise.keep(spread(hidden)),
        "bias": headwise.causal() & headwise.bias(spread(hidden.float())),
        "alibi": headwise.alibi(spread(table[:, 0])),
        "relative": headwise.causal() & headwise.relative(spread(table)),
        "lengths": headwise.lengths(spread(torch.tensor([3, 7]))),
        "segments": headwise.segments(spread(torch.arange(10).view(2, 5)), spread(torch.arange(14).view(2, 7))),
        "within another": ~(headwise.prefix(2) | headwise.keep(spread(hidden))),
    }
    calls: dict[str, Callable[[], Any]] = {
        **{name: partial(headwise.attention, q, k, v, mask=mask) for name, mask in masks.items()},
        "bool tensor": lambda: headwise.attention(q, k, v, mask=spread(hidden)),
        "sinks": lambda: headwise.attention(q, k, v, sinks=spread(table[:, 0])),
        "gate": lambda: headwise.attention(q, k, v, gate=spread(table[:, 0])),
        "weights": lambda: headwise.weights(q, spread(k)),
        "statistics": lambda: headwise.statistics(spread(q), spread(k)),
        "attention_statistics": lambda: headwise.attention_statistics(spread(q), spread(k), spread(v)),
        "top_keys": lambda: headwise.top_keys(spread(q), k, 3),
        "quantize": lambda: quantize(spread(k)),
        "static": lambda: StaticCache(2, H, D, capacity=11).append(spread(k), spread(v)),
        "static, value": lambda: StaticCache(2, H, D, capacity=11).append(k, spread(v)),
        "int8": lambda: StaticCache(2, H, D, capacity=11, dtype=torch.int8).append(spread(k), v),
        "paged": lambda: PagedCache(PagePool(3, H, D), 2).append(spread(k), v),
        "rolling": lambda: RollingCache(2, H, D, window=3).append(spread(k), v),
    }
    return {name: words(call) for name, call in calls.items()}


def modes_of_split_modules() -> dict[str, Any]:
    """Whether each part of a split module is in the mode that it was in."""
    wrong: dict[str, Any] = {}
    for training in (True, False):
        for name, made in (
            ("mha", module(qk_norm=torch.nn.RMSNorm)),
            ("mla", LatentAttention(M, H, q_lora_rank=5, kv_lora_rank=7, nope_dim=6, rope_dim=2, value_dim=3)),
        ):
            split = tensor_parallel(made.train(training), mesh())
            off = [part for part, inside in split.named_modules() if inside.training != training]
            if off:
                wrong[f"{name} {training}"] = off
    return wrong


def masks_over_a_rolling_cache() -> dict[str, str]:
    """A further mask of a rolling sharded cache: the numbers are those of one rolling cache, or the mask is refused."""
    said = {}
    masks = {
        "none": None,
        "causal": headwise.causal(),
        "window": headwise.window(3),
        "window ahead": headwise.window(4, 2),
        "both": headwise.window(5) & headwise.window(3),
        "first keys": headwise.window(3, first=2),
        "first keys beside": headwise.window(3, first=1) & headwise.causal(),
        "steps": headwise.dilated(2),
        "lengths": headwise.lengths(torch.tensor([5, 9])),
        "union": headwise.window(2) | headwise.dilated(3),
        "slopes": headwise.alibi(torch.rand(H)),
    }
    key, value, query = drawn(2, K, 23, D, seed=1), drawn(2, K, 23, D, seed=2), drawn(2, H, 3, D, seed=3)
    one = RollingCache(2, K, D, window=9).append(key, value)
    for name, mask in masks.items():
        cache = ShardedCache(RollingCache, 2, K, D, window=9).append(key, value)
        try:
            out = headwise.attention(query, cache, mask=mask)
            same = torch.allclose(out, headwise.attention(query, one, mask=mask), atol=1e-5)
            said[name] = "" if same else "wrong numbers"
        except ValueError as error:
            said[name] = str(error)
    return said


def first_tokens_on_a_rank_alone() -> dict[str, float]:
    """A rolling cache whose window lies on one rank and whose first tokens on another, by the definition.

    301 tokens in blocks of 64 on three ranks: 0 to 63 are rank 0's, and the last 45 are rank 1's.
    """
    wrong, n = {}, 301
    key, value = drawn(2, K, n, D, seed=1), drawn(2, K, n, D, seed=2)
    for first, T in ((1, 1), (3, 5), (70, 2)):
        cache = ShardedCache(RollingCache, 2, K, D, window=7, first=first, block=64, chunk=64)
        for piece in zip(key.split(64, 2), value.split(64, 2), strict=True):
            cache.append(*piece)
        query = drawn(2, H, T, D, seed=3)
        i, j = torch.arange(T)[:, None] + n - T, torch.arange(n)
        seen = (j <= i) & ((j > i - 7) | (j < first))
        scores = query.double() @ key.double().repeat_interleave(H // K, 1).mT * D**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = weights @ value.double().repeat_interleave(H // K, 1)
        with torch.no_grad():
            far = float((headwise.attention(query, cache) - expected).abs().max())
        if far > 2e-6:
            wrong[f"{first} {T}"] = far
    return wrong


def frozen_key_heads() -> dict[str, Any]:
    """What the style of transformers makes of a projection of keys: replicated, frozen or learned as it was."""
    import transformers
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    import headwise.hf as hf

    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes)
    plan = hf.tensor_parallel_config(config, dist.get_world_size()).base_model_tp_plan
    [style] = {kind for kind in plan.values() if kind.startswith("headwise")}
    found: dict[str, Any] = {}
    for learned in (True, False):
        linear = torch.nn.Linear(24, 12, bias=True).requires_grad_(learned)
        before = linear.weight.detach().clone()
        for name in ("weight", "bias"):
            ALL_PARALLEL_STYLES[style].shard_param(linear, name, mesh())
        parts = list(linear.parameters())
        whole = linear.weight.full_tensor()  # type: ignore[operator]
        found[str(learned)] = ([part.requires_grad for part in parts], torch.equal(whole, before))
    return found
