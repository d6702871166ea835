"""Heads dealt out with dropout, counted, and together with tokens, against one process; in those of `ranks.py`."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from context_cases import off
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import headwise
from headwise import parallel
from headwise.cache import RollingCache, StaticCache
from headwise.nn import InnerAttention, LatentAttention, MultiHeadAttention, Rotary
from headwise.parallel import Comm, ShardedCache, tensor_parallel
from headwise.plan.ranks import communication as links
from headwise.plan.ranks.sharding import MeshCall

WIDTH, TOKENS = 12, 23


@functools.cache
def row() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@functools.cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "tokens"))


def plain(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def build(kind: str, K: int = 2, dropout: float = 0.0) -> Any:
    torch.manual_seed(3)
    rules: dict[str, Any] = {"softcap": 9.0, "sinks": torch.randn(6), "dropout": dropout}
    if kind == "mla":
        latent = LatentAttention(WIDTH, 6, kv_lora_rank=7, nope_dim=5, rope_dim=4, value_dim=3)
        latent.inner = InnerAttention(scale=latent.scale, **rules)
        return latent
    inner = InnerAttention(**rules)
    return MultiHeadAttention(WIDTH, 6, num_kv_heads=K, head_dim=8, rotary=Rotary(8), inner=inner)


def trained(
    module: Any, x: Tensor, weight: Tensor, seed: int = 11, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input, gradients of the parameters."""
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    module.zero_grad()
    out = module(x, **options)
    (out * weight).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


def inputs() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(5)
    return torch.randn(2, TOKENS, WIDTH, generator=make), torch.randn(2, TOKENS, WIDTH, generator=make)


def dropped(cases: list[tuple[str, int]]) -> dict[Any, float]:
    """Modules in training that drop weights: the largest difference from one process. Ranks have seeds of their own."""
    errors = {}
    x, weight = inputs()
    for kind, K in cases:
        mask = headwise.causal()
        want, dx, grads = trained(build(kind, K, 0.4), x, weight, mask=mask)
        split = tensor_parallel(build(kind, K, 0.4), row())
        out, ours, of = trained(split, x, weight, seed=11 + dist.get_rank(), mask=mask)
        far = {"out": off(out, want) / 1e-6, "dx": off(ours, dx) / 5e-6}
        far |= {name: off(plain(of[name]), grad) / 5e-6 for name, grad in grads.items()}
        errors[kind, K] = max(far.values())
        assert not torch.equal(want, build(kind, K, 0.0)(x, mask=mask)), "nothing was dropped"
    return errors


def dropped_op() -> dict[str, float]:
    """The op on DTensors that are cut by batch, and by head."""
    make, errors = torch.Generator().manual_seed(5), {}
    q, k, v = (torch.randn(4, heads, 7, 5, generator=make) for heads in (6, 2, 2))
    torch.manual_seed(11)
    want = headwise.attention(q, k, v, dropout=0.4)
    for name, of_query, of_key in (("batch", Shard(0), Shard(0)), ("heads", Shard(1), Replicate())):
        spread = [distribute_tensor(x, row(), [place]) for x, place in ((q, of_query), (k, of_key), (v, of_key))]
        torch.manual_seed(11 + dist.get_rank())
        errors[name] = off(plain(headwise.attention(*spread, dropout=0.4)), want)
    return errors


def counted() -> list[tuple[int, int]]:
    """Bytes of a module's forward and backward: predicted, and counted."""
    comm, (x, weight), counts = Comm.of(row()), inputs(), []
    split = tensor_parallel(build("mha"), row())
    x = x.requires_grad_()
    for run in (lambda: split(x), lambda: (split(x) * weight).sum().backward()):
        before = comm.sent["heads"]
        run()
        counts.append(comm.sent["heads"] - before)
    predicted = links.all_reduce(x.numel(), comm.world)[comm.rank] * x.itemsize
    return [(predicted, counts[0]), (2 * predicted, counts[1])]


class Together(NamedTuple):
    """A module whose heads and tokens are split, two by two."""

    kind: str
    layout: Any
    K: int
    dropout: float = 0.0
    mask: str = "causal"


MASKS: dict[str, Any] = {
    "causal": headwise.causal,
    "window": lambda: headwise.causal() & headwise.window(6),
    "documents": lambda: headwise.causal() & headwise.segments(torch.tensor([0] * 5 + [1] * 11 + [2] * 7)),
}


def learned() -> dict[str, Tensor]:
    """Slopes and a gate of all heads, that every rank has."""
    slopes = headwise.alibi_slopes(6)
    return {"slopes": slopes.requires_grad_(), "gate": torch.linspace(0.5, 1.5, 6).requires_grad_()}


def together(case: Together) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """What is off of one process, as parts of the budgets; and bytes, predicted and counted. Ranks differ in seed."""
    kind, layout, K, dropout, name = case
    (x, weight), tokens, one, own = inputs(), grid()["tokens"], learned(), learned()
    order: Any = "contiguous" if name == "window" else "zigzag"

    def options(of: dict[str, Tensor]) -> dict[str, Any]:
        gate = {"gate": of["gate"]} if kind == "mha" else {}
        return {"mask": MASKS[name]() & headwise.alibi(of["slopes"])} | gate

    want, dx, grads = trained(build(kind, K, dropout), x, weight, **options(one))
    module = tensor_parallel(build(kind, K, dropout), grid()["heads"])
    part, its = (parallel.split_sequence(one, tokens, order=order) for one in (x, weight))
    comms = Comm.of(tokens), Comm.of(grid()["heads"])
    before = [comm.sent.copy() for comm in comms]
    with parallel.context(tokens, order=order, layout=layout, length=TOKENS):
        out, ours, _ = trained(module, part, its, seed=11 + dist.get_rank(), **options(own))
    sent, summed = (comm.sent - old for comm, old in zip(comms, before, strict=True))
    parallel.sum_gradients(module, tokens)
    parallel.sum_gradients([x for x in own.values() if x.grad is not None], tokens)
    far = {"out": off(parallel.join_sequence(out, tokens, order=order), want) / 1e-6}
    far["dx"] = off(parallel.join_sequence(ours, tokens, order=order), dx) / 5e-6
    far |= {name: off(plain(p.grad), grads[name]) / 5e-6 for name, p in module.named_parameters()}
    far |= {name: off(x.grad, one[name].grad) / 5e-6 for name, x in own.items() if x.grad is not None}
    if kind == "mla" or (name == "documents" and layout == "ring"):  # no keys of all heads, or fewer than are priced
        return far, {}
    call = MeshCall(TOKENS, TOKENS, 3, len(module.shards.share.keys), 8, 8, 4, 2, left=5 if name == "window" else None)
    predicted = [links.bytes_sent(call, layout, 2, order=order, backward=way)[comms[0].rank] for way in (False, True)]
    results = {"tokens": (sum(predicted), sent[layout] + sent[f"{layout} backward"])}
    numbers = [part.numel(), part.numel(), 6, 6]  # of a forward and its backward; of the slopes and the gate
    sums = sum(links.all_reduce(n, 2)[comms[1].rank] for n in numbers) * 4
    return far, results | {"heads": (sums, summed["heads"])}


def all_together(cases: list[Together]) -> dict[Any, Any]:
    """What is off of each, and bytes that are not those predicted."""
    errors: dict[Any, Any] = {}
    for case in cases:
        far, sent = together(case)
        bad: dict[str, Any] = {name: x for name, x in far.items() if not x <= 1}
        bad |= {name: pair for name, pair in sent.items() if pair[0] != pair[1]}
        if bad:
            errors[case] = bad
    return errors


@torch.no_grad()
def decoded(kind: str, K: int) -> float:
    """Steps with a cache whose heads lie along one dimension and whose tokens along the other."""
    one, tokens = build(kind, K).eval(), grid()["tokens"]
    split = tensor_parallel(build(kind, K).eval(), grid()["heads"])
    heads, x, far = len(split.shards.share.keys), inputs()[0], 0.0
    rules: dict[str, Any] = {"capacity": 40} | ({"value_dim": 7, "shared": True} if kind == "mla" else {})
    width, all_keys, keys = (11, 1, 1) if kind == "mla" else (8, K, heads)
    whole = StaticCache(2, all_keys, width, **rules)
    cache = ShardedCache(StaticCache, 2, keys, width, **rules, group=tokens)
    for part in x.split((17, 1, 1, 4), dim=1):
        want, _ = one(part, cache=whole)
        out, _ = split(part, cache=cache)
        far = max(far, off(out, want))
    return far


def model_together(name: str, dropout: float = 0.0) -> dict[str, float]:
    """A transformers decoder, its heads split and its sequences as well."""
    from context_models import inputs as batches
    from hf_models import BY_NAME
    from tp_hf_cases import gathered, with_torch

    import headwise.hf

    errors, batch = {}, batches("padded")
    one, model = (BY_NAME[name].build() for _ in range(2))
    model.load_state_dict(one.state_dict())
    for each in (one, model):
        each.set_attn_implementation("headwise")
        for part in each.modules():
            if hasattr(part, "attention_dropout"):
                part.attention_dropout = dropout
        each.train(dropout > 0)
    torch.manual_seed(11)
    want = one(**batch, use_cache=False)
    want.loss.backward()
    if name == "gpt-oss sinks":  # which has no plan
        model = with_torch(model, gathered, grid()["heads"])
    else:
        model = headwise.hf.tensor_parallel(model, grid()["heads"])
    torch.manual_seed(11 + dist.get_rank())
    with headwise.hf.context_parallel(model, grid()["tokens"]) as shards:
        out = model(**batch)
        out.loss.backward()
        errors["logits"] = off(plain(shards.join(plain(out.logits).detach())), want.logits.detach())
        shards.sum_gradients()
    errors["loss"] = off(plain(out.loss.detach()), want.loss.detach())
    for (part, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        errors[part] = off(plain(p.grad), q.grad)
    return errors


class Planned(NamedTuple):
    """Attention whose heads and tokens are split, two by two, and what a config calls its mask."""

    kind: str
    K: int = 6
    window: int | None = None
    chunk: int | None = None

    def config(self) -> dict[str, Any]:
        """Of a model with one layer of it."""
        sizes = {"hidden_size": WIDTH, "num_attention_heads": 6, "num_key_value_heads": self.K, "num_hidden_layers": 1}
        sizes |= {"vocab_size": 22, "intermediate_size": 10, "torch_dtype": "float32"}  # type: ignore[dict-item]
        if self.kind == "mla":
            ranks = {"kv_lora_rank": 7, "q_lora_rank": None, "first_k_dense_replace": 1}
            heads = {"qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
            return {**sizes, **ranks, **heads, "model_type": "deepseek_v3"}
        if self.chunk is not None:
            more = {"num_local_experts": 2, "intermediate_size_mlp": 10, "no_rope_layers": [1]}
            return {**sizes, **more, "head_dim": 8, "model_type": "llama4_text", "attention_chunk_size": self.chunk}
        kind = "llama" if self.window is None else "mistral"
        return {**sizes, "head_dim": 8, "model_type": kind, "sliding_window": self.window}

    def mask(self) -> Any:
        """The same for the modules."""
        if self.chunk is not None:
            return headwise.causal() & headwise.blocks(self.chunk)
        return headwise.causal() & headwise.window(self.window) if self.window else headwise.causal()


def sends(comms: tuple[Comm, Comm], run: Any) -> tuple[int, int]:
    """Bytes of a call, headers apart: between ranks that share tokens, and between those that share heads."""
    before = [sum(comm.sent.values()) - comm.sent["agree"] for comm in comms]
    run()
    after = [sum(comm.sent.values()) - comm.sent["agree"] for comm in comms]
    return after[0] - before[0], after[1] - before[1]


def planned(case: Planned) -> dict[str, Any]:
    """What this rank sends in each layout, forward and backward, and in a step; its cache; and what `auto` takes."""
    (x, _), tokens, heads = inputs(), grid()["tokens"], grid()["heads"]
    module = tensor_parallel(build(case.kind, case.K), heads)
    comms = Comm.of(tokens), Comm.of(heads)
    order: Any = "zigzag" if case.window is None and case.chunk is None else "contiguous"
    own = parallel.split_sequence(x, tokens, order=order).requires_grad_()
    results: dict[str, Any] = {}
    for layout in ("ring", "gather", "ulysses", "auto"):
        out = []
        with parallel.context(tokens, order=order, layout=layout, length=TOKENS):
            forward = sends(comms, lambda: out.append(module(own, mask=case.mask())))  # noqa: B023 - run at once
        backward = sends(comms, lambda: out[0].sum().backward())  # noqa: B023
        results[layout] = forward[0], backward[0], forward[1], backward[1]
    if case.chunk is None:
        results |= steps(case, module, comms)
    return results


@torch.no_grad()
def steps(case: Planned, module: Any, comms: tuple[Comm, Comm]) -> dict[str, Any]:
    """The last token of a text by a sharded cache: bytes sent, and held."""
    x, tokens = inputs()[0], grid()["tokens"]
    sizes = (2, 1, 11) if case.kind == "mla" else (2, len(module.shards.share.keys), 8)
    rules: dict[str, Any] = {"value_dim": 7, "shared": True} if case.kind == "mla" else {}
    kept = {"capacity": TOKENS} if case.window is None else {"window": case.window, "chunk": TOKENS}
    kind = StaticCache if case.window is None else RollingCache
    cache = ShardedCache(kind, *sizes, **rules, **kept, group=tokens)
    module.eval()
    module(x[:, : TOKENS - 1], cache=cache)
    between, summed = sends(comms, lambda: module(x[:, TOKENS - 1 :], cache=cache))
    return {"step": (between, summed), "cache": cache.nbytes, "tokens": cache.local.lengths[0]}


def weights(K: int) -> tuple[dict[str, Any], int]:
    """Of a model whose heads are split: its config, and bytes of the parameters that are here."""
    import transformers

    import headwise.hf

    heads = {"num_attention_heads": 8, "num_key_value_heads": K, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=20, hidden_size=24, intermediate_size=12, **heads)
    model = headwise.hf.tensor_parallel(transformers.LlamaForCausalLM(config), row())
    here = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return config.to_dict() | {"dtype": "float32"}, sum(p.nbytes for p in here)


def peak(layout: Any, tokens: int) -> int:
    """The most bytes of this rank's tensors in a forward and backward of so many tokens in all."""
    path = Path(__file__).parents[2] / "benchmarks" / "statistics_memory.py"
    spec = importlib.util.spec_from_file_location("statistics_memory", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    own = [torch.randn(1, heads, tokens // dist.get_world_size(), 64).requires_grad_() for heads in (8, 4, 4)]
    with module.LiveBytes(*own) as live:
        parallel.context_parallel(
            own[0], own[1], own[2], mask=headwise.causal(), layout=layout, order="zigzag"
        ).sum().backward()
    return int(live.peak)
