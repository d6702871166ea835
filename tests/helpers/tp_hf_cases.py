"""What the ranks of test_hf_tensor.py run: transformers models split over them, against the model in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tp_cases import GRADIENT, apart, mesh, unlike, whole
from tp_refusals import said

import headwise
import headwise.hf as hf
from headwise.hf.distributed.tensor_parallel import own_part
from headwise.hf.models.architectures import CACHE
from headwise.ops.sharding.heads import Group, Share
from headwise.parallel.head_split.shards import HeadShards

OUT = 2e-6  # of logits, behind two layers of sums that are rounded in another order


def build(name: str, H: int, K: int) -> Any:
    """A small model with the same random weights on every rank."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(H + K)
    sizes: dict[str, Any] = dict(hidden_size=24, num_attention_heads=H, num_key_value_heads=K, num_hidden_layers=2)
    sizes |= dict(intermediate_size=12, vocab_size=23, max_position_embeddings=64, pad_token_id=0)
    sizes |= {"Mistral": {"sliding_window": 5, "head_dim": 4}, "Qwen3": {"head_dim": 4}}.get(name, {})
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="headwise")


def ids() -> Tensor:
    return torch.randint(1, 23, (2, 9), generator=torch.Generator().manual_seed(7))


def trained(model: Any) -> dict[str, Tensor]:
    """Logits, with padding in one row, and all gradients."""
    model.zero_grad()
    seen = torch.ones(2, 9).long()
    seen[1, :3] = 0
    out = model(ids(), attention_mask=seen, labels=ids())
    out.loss.backward()
    return {"logits": out.logits.detach(), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def differences(one: Any, split: Any) -> dict[str, float]:
    a, b = trained(one), trained(split)
    assert a.keys() == b.keys()
    far = {name: apart(a[name], b[name]) for name in a}
    return {name: x for name, x in far.items() if not x <= (OUT if name == "logits" else GRADIENT)}


def generated(model: Any, **cache: Any) -> Tensor:
    made = {CACHE: hf.make_cache(model, **cache)} if cache else {}
    length = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    out: Tensor = model.generate(ids(), attention_mask=torch.ones(2, 9).long(), **length, **made)
    return out


CACHES: tuple[dict[str, Any], ...] = ({}, {"kind": "static"}, {"kind": "paged"}, {"kind": "paged", "dtype": torch.int8})


def split_models(cases: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Models that `hf.tensor_parallel` splits: logits, gradients, generation; and the look of the last."""
    wrong: dict[str, Any] = {}
    for name, H, K in cases:
        one, split = build(name, H, K), build(name, H, K)
        assert hf.tensor_parallel(split, mesh()) is split
        far = differences(one, split)
        if far:
            wrong[f"{name} {H} {K}"] = far
    exact = generated(one)
    for cache in CACHES[:3]:
        if not torch.equal(generated(split, **cache), exact):
            wrong[f"cache {cache}"] = True
    if far := unlike(*(headwise.look.at(model, ids()[0], name="a model") for model in (one, split))):
        wrong["look"] = far[:5]
    return wrong


def loaded(folder: str, H: int, K: int) -> dict[str, Any]:
    """As transformers loads: each rank its part of the files; with a config that knows of the heads, or without."""
    from transformers.distributed import DistributedConfig

    world = dist.get_world_size()
    config = hf.tensor_parallel_config(transformers.AutoConfig.from_pretrained(folder), world)
    split = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, distributed_config=DistributedConfig(tp_size=world), attn_implementation="headwise"
    )
    one, wrong = build("Llama", H, K), {}
    if far := differences(one, split):
        wrong["numbers"] = far
    exact = generated(one)
    for cache in CACHES[:3]:
        if not torch.equal(generated(split, **cache), exact):
            wrong[f"cache {cache}"] = True
    int8 = [generated(model, **CACHES[3]) for model in (one, split)]
    if not torch.equal(*int8):
        wrong["int8"] = True
    if far := unlike(*(headwise.look.at(model, ids()[0], name="a model") for model in (one, split))):
        wrong["look"] = far[:5]
    return wrong


def with_torch(model: Any, keys: Callable[[], Any], over: Any = None) -> Any:
    """The attention of a model split by torch's styles, over a mesh; over all ranks by default."""
    plan = {"q_proj": ColwiseParallel(), "k_proj": keys(), "v_proj": keys(), "o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh() if over is None else over, plan)
    return model


def gathered() -> ColwiseParallel:
    return ColwiseParallel(output_layouts=Replicate())


def gathered_keys(cases: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Keys and values gathered for all heads beside queries of some: right, forward and backward."""
    wrong: dict[str, Any] = {}
    for name, H, K in cases:
        if far := differences(build(name, H, K), with_torch(build(name, H, K), gathered)):
            wrong[f"{name} {H} {K}"] = far
    return wrong


def refusals() -> dict[str, str]:
    """What two ranks say of what cannot be."""
    normed = with_torch(build("Qwen3", 6, 3), gathered)
    with torch.no_grad():
        exact, split = build("Qwen3", 6, 3)(ids()).logits, normed(ids()).logits
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=5)
    fused = transformers.Phi3Config(hidden_size=24, num_attention_heads=6, num_key_value_heads=3, pad_token_id=0)
    return {
        "a norm behind gathered keys": said(lambda: normed(ids())),
        "which runs without gradients": str(apart(exact, split) < OUT),
        "heads cut apart": said(lambda: with_torch(build("Llama", 6, 3), ColwiseParallel)(ids())),
        "no model": said(lambda: hf.tensor_parallel(torch.nn.Linear(2, 3), mesh())),  # type: ignore[arg-type]
        "no mesh": said(lambda: hf.tensor_parallel(build("Llama", 6, 3), 2)),
        "no config": said(lambda: hf.tensor_parallel_config({}, 2)),  # type: ignore[type-var]
        "no plan": said(lambda: hf.tensor_parallel_config(config, 2)),
        "uneven heads": said(lambda: hf.tensor_parallel_config(build("Llama", 6, 3).config, 4)),
        "fused": said(lambda: hf.tensor_parallel_config(fused, 2)),
    }


def own_parts() -> dict[str, str]:
    """What of sinks and biases of all six heads a rank of two takes, and their gradients; what is off."""
    group = Group(mesh())
    here = HeadShards(group, Share(6, 3, 2, group.rank))
    wrong = {}
    for shape, axis in (((6,), 0), ((6, 4, 5), 0), ((2, 6, 4, 5), 1), ((1,), None), ((2, 1, 4, 5), None), ((3,), None)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        part = own_part(here, x)
        if axis is None:
            wrong |= {} if part is x else {str(shape): "not left as it is"}
            continue
        part.square().sum().backward()
        if not torch.equal(part, x.narrow(axis, 3 * group.rank, 3)) or not torch.equal(x.grad, 2 * x):
            wrong[str(shape)] = f"{part}, {x.grad}"
    spread = distribute_tensor(torch.arange(6.0), mesh(), [Shard(0)])
    if own_part(here, spread).tolist() != [3.0 * group.rank + n for n in range(3)] or own_part(here, None) is not None:
        wrong["a DTensor"] = str(own_part(here, spread))
    return wrong
