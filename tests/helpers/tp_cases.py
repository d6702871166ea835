"""What the ranks of test_parallel_tensor.py run: each compares with one process, which it is itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import headwise
from headwise.cache import StaticCache
from headwise.nn import InnerAttention, LatentAttention, MultiHeadAttention, Rotary
from headwise.parallel import context, load_slices, split_sequence, sum_gradients, tensor_parallel

OUT, GRADIENT = 1e-6, 5e-6  # of fp32, relative to the largest: what issue 16 asks for
M = 13  # d_model: an odd one


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number."""
    return float((one - other).abs().max() / one.abs().max().clamp_min(1e-30))


def build(kind: str, H: int, K: int) -> Any:
    """A module of every part: the same numbers on every rank."""
    torch.manual_seed(H + K)
    if kind.startswith("mla"):
        low = 5 if kind == "mla low" else None
        return LatentAttention(M, H, q_lora_rank=low, kv_lora_rank=7, nope_dim=6, rope_dim=2, value_dim=3, bias=True)
    memory = {"memory_dim": (11, 5)} if kind == "cross" else {"rotary": Rotary(4)}
    inner = InnerAttention(softcap=7.0, sinks=torch.randn(H)) if "plain" not in kind else None
    norm = None if kind == "bare" else nn.RMSNorm
    gate = headwise.nn.headwise_gate if "headwise" in kind else headwise.nn.OutputGate
    gated = functools.partial(headwise.nn.GatedMultiHeadAttention, gate=gate)
    kind_of = gated if kind.startswith("gated") else MultiHeadAttention
    return kind_of(M, H, num_kv_heads=K, head_dim=4, value_dim=3, bias=True, qk_norm=norm, inner=inner, **memory)


def trained(module: Any, kind: str, form: str | None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Output and all gradients, of everything that has one for each head, too."""
    H, T, S = module.num_heads, 7, 11 if kind == "cross" else 7
    draw = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).requires_grad_()

    x, slopes, table, gate = leaf(2, T, M), leaf(H), leaf(H, 5), leaf(2, H)
    mask = headwise.window(4, 2) & headwise.alibi(slopes) & headwise.relative(table)
    mask &= headwise.keep(torch.rand(2, H, T, S, generator=draw) > 0.2)
    options: dict[str, Any] = {"mask": mask}
    learn = {"x": x, "slopes": slopes, "table": table}
    if not kind.startswith("mla"):
        learn["gate"] = options["gate"] = gate
    if kind == "cross":
        learn["keys"], learn["values"] = options["memory"] = leaf(2, S, 11), leaf(2, S, 5)
    if form is not None:
        options["form"] = form
    module.zero_grad()
    out = module(x, **options)
    (out * torch.randn(out.shape, generator=draw)).sum().backward()
    result = {"out": out.detach(), **{name: whole(one.grad) for name, one in learn.items()}}
    return result | {name: whole(p.grad) for name, p in module.named_parameters()}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """What lies apart by more than it may."""
    assert one.keys() == other.keys()
    far = {name: apart(one[name], other[name]) for name in one}
    return {name: x for name, x in far.items() if not x <= (OUT if name == "out" else GRADIENT)}


def modules(cases: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Modules split by `tensor_parallel` against whole ones, forward and backward; what is wrong."""
    wrong: dict[str, Any] = {}
    for kind, H, K in cases:
        one, split = build(kind, H, K), build(kind, H, K)
        with torch.no_grad():
            for p in split.parameters() if dist.get_rank() else ():
                p.zero_()  # the first rank's numbers count
        assert tensor_parallel(split, mesh()) is split
        for form in ("expanded", "absorbed") if kind.startswith("mla") else (None,):
            far = differences(trained(one, kind, form), trained(split, kind, form))
            if far:
                wrong[f"{kind} {H} {K} {form}"] = far
    return wrong


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "cut": lambda: {"k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()},
    "gathered": lambda: {name: ColwiseParallel(output_layouts=Replicate()) for name in ("k_proj", "v_proj")},
    "whole": dict,
}


def torch_plans(cases: list[tuple[str, str, int, int]]) -> dict[str, Any]:
    """Modules split by torch's own `parallelize_module`."""
    wrong: dict[str, Any] = {}
    for plan, kind, H, K in cases:
        one, split = build(kind, H, K), build(kind, H, K)
        latent = {"q_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel()}
        heads = {"q_proj": ColwiseParallel(), **PLANS[plan]()}
        styles = (latent if kind == "mla" else heads) | {"o_proj": RowwiseParallel()}
        tensor_parallel(parallelize_module(split, mesh(), styles), mesh())
        for form in ("expanded", "absorbed") if kind == "mla" else (None,):
            far = differences(trained(one, kind, form), trained(split, kind, form))
            if far:
                wrong[f"{plan} {kind} {H} {K} {form}"] = far
    return wrong


def answered_for() -> dict[str, Any]:
    """Latent attention with a hook that answers for kv_b_proj: heads split, tokens split, decoding; what is wrong."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return 1.5 * out

    plain, one, split, torchs = (build("mla", 12, 1) for _ in range(4))
    one.kv_b_proj.register_forward_hook(hook)
    tensor_parallel(split, mesh())
    split.kv_b_proj.register_forward_hook(hook)
    truth = trained(one, "mla", None)
    assert apart(truth["out"], trained(plain, "mla", None)["out"]) > 0.01, "the hook changes nothing"
    wrong: dict[str, Any] = {"heads": differences(truth, trained(split, "mla", None))}
    x = torch.randn(2, 9, M, generator=torch.Generator().manual_seed(5))
    outs = []
    for module in (one, split):
        cache = StaticCache(2, 1, 9, 7, capacity=16, shared=True)
        with torch.no_grad():
            outs.append(torch.cat([module(part, cache=cache)[0] for part in (x[:, :5], x[:, 5:6], x[:, 6:])], dim=1))
    wrong["decoding"] = {} if apart(*outs) < 2e-6 else apart(*outs)
    one.zero_grad()
    out = one(x, mask=headwise.causal())
    out.square().sum().backward()
    grads = {name: p.grad for name, p in one.named_parameters()}
    one.zero_grad()
    with context():
        own = one(split_sequence(x), mask=headwise.causal())
        own.square().sum().backward()
        sum_gradients(one)
    far = {name: apart(whole(grad), whole(p.grad)) for (name, p), grad in zip(
        one.named_parameters(), grads.values(), strict=True)} | {"out": apart(split_sequence(out), own)}  # fmt: skip
    wrong["tokens"] = {name: x for name, x in far.items() if not x <= GRADIENT}
    styles = {"q_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    tensor_parallel(parallelize_module(torchs, mesh(), styles), mesh())
    torchs.kv_b_proj.register_forward_hook(hook)
    try:
        torchs(x, mask=headwise.causal())
        wrong["torch's plan"] = "not refused"
    except TypeError as error:
        if "torch.nn.Linear without bias and without hooks of yours" not in str(error):
            wrong["torch's plan"] = str(error)
    return {name: what for name, what in wrong.items() if what}


@torch.no_grad()
def low_precision() -> dict[str, tuple[float, float]]:
    """bfloat16 against float64: the error of one process and of all."""
    errors = {}
    for kind, H, K in (("mha plain", 12, 12), ("mha plain", 12, 1), ("gated plain", 12, 2), ("mla", 12, 1)):
        x = torch.randn(2, 37, M, generator=torch.Generator().manual_seed(5))
        exact = build(kind, H, K).double()(x.double(), mask=headwise.causal())
        one = build(kind, H, K).bfloat16()
        split = tensor_parallel(copy.deepcopy(one), mesh())
        outs = [m(x.bfloat16(), mask=headwise.causal()).double() for m in (one, split)]
        errors[f"{kind} {K}"] = tuple(float((out - exact).square().mean().sqrt()) for out in outs)
    return errors  # type: ignore[return-value]


@torch.no_grad()
def decoding() -> dict[str, float]:
    """Prefill and steps with a cache of each process's heads."""
    far = {}
    for kind, H, K in (("mha", 12, 12), ("mha", 12, 2), ("mha", 12, 1), ("mla", 12, 1)):
        one = build(kind, H, K)
        split = tensor_parallel(build(kind, H, K), mesh())
        x = torch.randn(2, 9, M, generator=torch.Generator().manual_seed(5))
        outs = []
        for module, heads in ((one, K), (split, len(split.shards.share.keys))):
            latent = kind == "mla"
            sizes = (1, 9, 7) if latent else (heads, 4, 3)
            cache = StaticCache(2, *sizes, capacity=16, shared=latent)
            steps = [module(part, cache=cache)[0] for part in (x[:, :5], x[:, 5:6], x[:, 6:])]
            outs.append(torch.cat(steps, dim=1))
        far[f"{kind} {K}"] = apart(*outs)
    return far


# -- the op ------------------------------------------------------------------------------------------------------------


def op_inputs(B: int, H: int, K: int, T: int = 7, S: int = 11) -> list[Tensor]:
    draw = torch.Generator().manual_seed(B + H + K)
    shapes = (B, H, T, 4), (B, K, S, 4), (B, K, S, 3), (H,), (B, H), (H,)
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in shapes]


def attended(tensors: list[Any]) -> tuple[Any, list[Tensor]]:
    """Output and gradients of the op."""
    q, k, v, sinks, gate, slopes = tensors
    mask = headwise.causal() & headwise.alibi(slopes) & headwise.lengths(torch.arange(5, 5 + q.shape[0]))
    out, lse = headwise.attention(q, k, v, mask=mask, sinks=sinks, gate=gate, return_lse=True)
    (whole(out).square().sum() + whole(lse).sum()).backward()
    return out, [whole(x.grad) for x in tensors]


def ops(cases: list[tuple[int, int, int, Placement, Placement, bool]]) -> dict[str, Any]:
    """DTensors against plain tensors: what is wrong, and where bits differ that must not."""
    wrong: dict[str, Any] = {}
    for B, H, K, of_query, of_key, alike in cases:
        plain = op_inputs(B, H, K)
        places = [of_query, of_key, of_key, Shard(0) if of_query == Shard(1) else None]
        spread: list[Any] = [x.detach().clone().requires_grad_() for x in plain]
        for n, place in enumerate(places):
            if place is not None:
                spread[n] = distribute_tensor(plain[n].detach(), mesh(), [place]).requires_grad_()
        out, gradients = attended(spread)
        expected, exact = attended(plain)
        names = ("query", "key", "value", "sinks", "gate", "slopes")
        far = differences(
            {"out": expected.detach(), **dict(zip(names, exact, strict=True))},
            {"out": whole(out).detach(), **dict(zip(names, gradients, strict=True))},
        )
        name = f"{B} {H} {K} {of_query} {of_key}"
        if far or out.placements != (of_query,):
            wrong[name] = far, out.placements
        same = zip((expected, *exact[:3]), (whole(out), *gradients[:3]), strict=True)
        if alike and not all(torch.equal(a, b) for a, b in same):
            wrong[f"{name} bits"] = True
    return wrong


@torch.no_grad()
def bits() -> list[tuple[int, ...]]:
    """Shapes at which a head's bits depend on how many others are here: a long row, a step, a prompt."""
    wrong = []
    for shape in ((1, 12, 12, 1, 1100), (2, 24, 12, 1, 67), (1, 24, 12, 197, 131)):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (x.detach().to(dtype) for x in op_inputs(*shape)[:3])
            spread = [distribute_tensor(x, mesh(), [Shard(1)]) for x in (q, k, v)]
            out = headwise.attention(*spread, mask=headwise.causal())
            if not torch.equal(whole(out), headwise.attention(q, k, v, mask=headwise.causal())):
                wrong.append(shape)
    return wrong


def a_mesh_of_two() -> dict[str, float]:
    """Batch over one dimension, heads over the other."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = op_inputs(3, 4, 2)
    places = [[Shard(0), Shard(1)]] * 3 + [[Replicate(), Shard(0)], [Shard(0), Shard(1)]]
    spread: list[Any] = [
        distribute_tensor(x.detach(), grid, place).requires_grad_() for x, place in zip(plain, places, strict=False)
    ]
    out, gradients = attended([*spread, plain[5].detach().clone().requires_grad_()])
    expected, exact = attended(plain)
    return differences(
        {"out": expected.detach(), **{str(n): x for n, x in enumerate(exact)}},
        {"out": whole(out).detach(), **{str(n): x for n, x in enumerate(gradients)}},
    )


# -- looks -------------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Ids in, logits out, through one attention module."""

    def __init__(self, kind: str, H: int, K: int) -> None:
        super().__init__()
        self.attention = build(kind, H, K)
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(17, M), nn.Linear(M, 17)

    def forward(self, ids: Tensor) -> Tensor:
        slopes = headwise.alibi_slopes(self.attention.num_heads)
        x = self.embed(ids)
        return self.head(x + self.attention(x, mask=headwise.causal() & headwise.alibi(slopes)))


def leaves(x: Any, at: str = "") -> dict[str, Any]:
    """Every number, text and packed vector of a record by its place."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else None
    if items is None:
        return {at: x}
    values: dict[str, Any] = {}
    for key, value in items:
        values |= leaves(value, f"{at}/{key}")
    return values


def unlike(one: Any, other: Any) -> list[str]:
    """Where two looks differ by more than rounding: their numbers are written with five digits.

    What the weights move is not measured where the heads are split.
    """
    a, b = ({at: x for at, x in leaves(asdict(look)).items() if "moved" not in at} for look in (one, other))
    assert a.keys() == b.keys()

    def same(x: Any, y: Any) -> bool:
        near = isinstance(x, float) and (abs(x - y) <= 2e-5 * max(1.0, abs(x)) or x != x)
        return near or x == y or isinstance(x, bytes)

    return [f"{at}: {a[at]} {b[at]}" for at in a if "seconds" not in at and not same(a[at], b[at])]


def looks(cases: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Looks at a split module, and what gates of a probe get as gradients, against those at a whole one."""
    wrong: dict[str, Any] = {}
    for kind, H, K in cases:
        one, split = Reader(kind, H, K), Reader(kind, H, K)
        tensor_parallel(split.attention, mesh())
        ids = torch.randint(17, (13,), generator=torch.Generator().manual_seed(2))
        far = unlike(headwise.look.at(one, ids), headwise.look.at(split, ids))
        gates = [gate_gradients(model, ids[None]) for model in (one, split)]
        if far or apart(*gates) > GRADIENT:
            wrong[f"{kind} {H} {K}"] = far[:3], apart(*gates)
    return wrong


def gate_gradients(model: Reader, ids: Tensor) -> Tensor:
    """The gradient of a gate on each head, by a probe that answers."""
    gate = torch.ones(model.attention.num_heads, 1, 1, requires_grad=True)
    with headwise.nn.probe(model, lambda call: call.attend() * gate):
        model(ids).square().sum().backward()
    assert gate.grad is not None
    return gate.grad


# -- checkpoints -------------------------------------------------------------------------------------------------------

STORED = (("mha", 12, 2), ("mla low", 12, 1))


def read_slices(folder: str) -> dict[str, Any]:
    """Modules made on the meta device and filled from safetensors; and saved as a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    slices: dict[str, Any] = {}
    for kind, H, K in STORED:
        with torch.device("meta"):
            module = build(kind, H, K)
        load_slices(tensor_parallel(module, mesh()), folder, prefix=f"{kind}.")
        slices[kind] = (
            sorted(unequal(module, build(kind, H, K))),
            {name: tuple(p.to_local().shape) for name, p in module.named_parameters()},
        )
        dcp.save(module.state_dict(), checkpoint_id=f"{folder}/{kind} {dist.get_world_size()}")
    return slices


def read_checkpoint(folder: str, ranks: int) -> list[str]:
    """Saved by another number of ranks."""
    import torch.distributed.checkpoint as dcp

    wrong = []
    for kind, H, K in STORED:
        module = build(kind, H, K)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        state = tensor_parallel(module, mesh()).state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{kind} {ranks}")
        module.load_state_dict(state)
        wrong += sorted(unequal(module, build(kind, H, K)))
    return wrong


def unequal(module: nn.Module, other: nn.Module) -> set[str]:
    theirs = other.state_dict()
    return {name for name, p in module.state_dict().items() if not torch.equal(whole(p), theirs[name])}


def clipped() -> tuple[float, float]:
    """The norm by which torch clips gradients, of a split module and of a whole one."""
    norms = []
    for split in (True, False):
        module = build("mha", 12, 2)
        module = tensor_parallel(module, mesh()) if split else module
        trained(module, "mha", None)
        norms.append(float(whole(nn.utils.clip_grad_norm_(module.parameters(), 1.0))))
        torch.optim.AdamW(module.parameters()).step()
    return norms[0], norms[1]
