"""transformers' tensor parallelism: the heads of an attention call on this rank, and any number of key-value heads.

transformers' attention functions get the heads of their process as plain tensors. The place of these heads among all
heads is read from the sharding of the module's weights and from its config.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...nn.hooks.projections import is_linear
from ...ops.sharding.heads import Group, Share, as_dtensor, pick_heads
from ...ops.storage.layout import in_one_piece
from ...parallel.head_split.layers import as_replica
from ...parallel.head_split.shards import HeadShards
from ...shapes.arguments import check_counts, shown
from ..errors import ModelError
from ..models.support import refuse_own_code, title

Config = TypeVar("Config", bound=PreTrainedConfig)
KEYS = ("k_proj", "v_proj")


def heads_here(module: nn.Module, query: Tensor, key: Any) -> HeadShards | None:
    """Return the heads of a call of the module on this rank, or None if the call has all heads.

    Raises:
        ModelError: the call has a part of the heads that headwise cannot assign to ranks.
    """
    group = _group(module)
    if group is None or group.size == 1:
        return None
    config, groups = getattr(module, "config", None), getattr(module, "num_key_value_groups", None)
    heads, here, keys = getattr(config, "num_attention_heads", None), query.shape[1], key.shape[1]
    if heads == here:  # gathered
        return None
    H = here * group.size
    K = H // groups if isinstance(groups, int) and groups > 0 else keys * group.size
    own = any(isinstance(getattr(part, "share", None), Share) for part in module.children())
    if keys == here and keys != K and not own:  # the model has repeated the keys: each query head has one
        K = H
    if isinstance(heads, int) and heads != H:
        raise ModelError(
            f"{type(module).__name__} passes {here} of {heads} query heads, and its weights are cut for {group.size} "
            "processes; take a number of processes that divides the heads"
        )
    share = Share(H, K, group.size, group.rank)
    if keys != K and not (keys == len(share.keys) and (share.deals_keys or own)):
        raise ModelError(
            f"{type(module).__name__} passes {here} query heads and {keys} key-value heads of {H} and {K} on each of "
            f"{group.size} processes, so queries would read the wrong keys; headwise.hf.tensor_parallel splits models "
            "by whole heads, any number of key-value heads included"
        )
    return HeadShards(group, share)


def own_keys(module: nn.Module, here: HeadShards, key: Any, value: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the keys and values that the queries on this rank read; the gradients of gathered ones are summed.

    Keys and values of all heads that a cache stores in pages or in int8 become tensors of this dtype.

    Raises:
        ModelError: a norm follows the gathering of keys, and its gradient would be summed twice.
    """
    share, own = here.share, any(hasattr(part, "share") for part in module.children())
    if own or (share.deals_keys and key.shape[1] == len(share.keys)):
        return key, value
    key, value = in_one_piece(key, dtype), in_one_piece(value, dtype)
    norms = [
        name for name, part in module.named_children() if "k_norm" in name and next(part.parameters(), None) is not None
    ]
    if norms and torch.is_grad_enabled() and key.requires_grad:
        raise ModelError(
            f"{type(module).__name__} has {norms[0]} behind keys that were gathered for all heads, and in training its "
            "gradient would count them once a process; headwise.hf.tensor_parallel splits models by whole heads, any "
            "number of key-value heads included"
        )
    return here.share.pick(here.group.shared(key)), here.share.pick(here.group.shared(value))


def gather_heads(here: HeadShards, tensors: tuple[Tensor, Tensor, Tensor], **by_head: Tensor | None) -> dict[str, Any]:
    """Return the call with the heads of all processes, for a probe; tensors in `by_head` have heads on axis -3 or 0."""
    query, key, value = (here.group.gathered(x, 1) for x in tensors)
    key, value = (pick_heads(x, here.share.places) for x in (key, value))
    whole: dict[str, Any] = {"query": query, "key": key, "value": value}
    for name, x in by_head.items():
        axis = 0 if x is None or x.ndim < 3 else x.ndim - 3
        cut = x is not None and x.shape[axis] == here.share.count
        whole[name] = here.group.gathered(x, axis) if cut and x is not None else x
    return whole


def own_part(here: HeadShards, x: Tensor | None) -> Tensor | None:
    """Return the part of `x` for the heads on this rank; `x` has one entry for each head, on axis -3 or 0."""
    if x is None:
        return None
    if as_dtensor(x) is not None:
        return here.parameter(x)
    axis = 0 if x.ndim < 3 else x.ndim - 3
    if x.shape[axis] != here.share.num_heads:
        return x
    return here.group.shared(x).narrow(axis, here.share.heads.start, here.share.count)


def _group(module: nn.Module) -> Group | None:
    """Return the processes over which the weights of a module or of its submodules are sharded, or None."""
    if not (dist.is_available() and dist.is_initialized()):  # without processes, no weight is sharded
        return None
    for parameter in module.parameters():
        spread = as_dtensor(parameter)
        for dim, place in enumerate(() if spread is None else spread.placements):
            if place.is_shard():
                return Group(spread.device_mesh, dim)
    return None


# -- splitting models --------------------------------------------------------------------------------------------------


def tensor_parallel(model: PreTrainedModel, mesh: Any) -> PreTrainedModel:
    """Split a model over the processes of a mesh by transformers' own plan, with any number of key-value heads.

    If the number of processes divides the number of key-value heads, this is transformers' own plan. Otherwise that
    plan would split a head, and fails. Then every process has the whole weights of k_proj and v_proj and computes the
    heads that its queries read; their gradients are summed. Call it on each process, with the same weights. Afterwards,
    the model has ``attn_implementation="headwise"``.

    For a model that does not fit into the memory of one process, see `tensor_parallel_config`.

    Args:
        model: a model with a plan (``model.tp_plan``), such as those of Llama, Qwen2, Qwen3 and Mistral.
        mesh: a `torch.distributed.DeviceMesh` of one dimension.

    Returns:
        The model.

    Raises:
        TypeError: not a transformers model, or not a mesh.
        ModelError: a model without a plan, or query heads that the number of processes does not divide. Also key-value
            heads that it does not divide, if they are projected together with the queries.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> model = tensor_parallel(model, init_device_mesh("cpu", (4,)))  # doctest: +SKIP
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"tensor_parallel takes a transformers PreTrainedModel; got {type(model).__name__}")
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TypeError(f"mesh is a torch.distributed DeviceMesh of one dimension; got {shown(mesh)}")
    refuse_own_code(model, "tensor_parallel")
    apply = _transformers("tensor_parallel").apply_tensor_parallelism
    model.tp_plan = _plan(model.tp_plan, model.config, mesh.size(), title(model))
    apply(model, mesh, model._expand_parallel_plan(model.tp_plan))
    model._tp_size, model._device_mesh = mesh.size(), mesh
    model.set_attn_implementation("headwise")
    return model


def tensor_parallel_config(config: Config, processes: int) -> Config:
    """Return the config for loading a model that is split over `processes`, with any number of key-value heads.

    With it, ``from_pretrained`` reads on each process only its part of the files (transformers needs the package
    accelerate for that)::

        config = headwise.hf.tensor_parallel_config(AutoConfig.from_pretrained(name), 4)
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, distributed_config=DistributedConfig(tp_size=4), attn_implementation="headwise"
        )

    Args:
        config: of a text model with a plan, such as those of Llama, Qwen2, Qwen3 and Mistral.
        processes: their number, equal to ``tp_size``.

    Returns:
        The same object; its ``base_model_tp_plan`` now covers keys and values.

    Raises:
        TypeError, ModelError: as `tensor_parallel`.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"tensor_parallel_config takes a transformers config; got {shown(config)}")
    check_counts(1, processes=processes)
    text = config.get_text_config()
    plan = _plan(text.base_model_tp_plan or {}, text, processes, f"model_type {text.model_type!r}")
    text.base_model_tp_plan = plan
    return config


def _plan(plan: dict[str, str], config: Any, processes: int, name: str) -> dict[str, str]:
    """Return a plan in which key-value heads that the processes do not divide are computed where they are read."""
    text = config.get_text_config()
    H = text.num_attention_heads
    K = getattr(text, "num_key_value_heads", None) or H
    if not plan:
        raise ModelError(
            f"{name} has no plan of tensor parallelism in transformers; write one, as a dict, to its tp_plan"
        )
    if H % processes:
        raise ModelError(
            f"{name}: {H} heads do not divide over {processes} processes; take a number of processes that divides them"
        )
    if K % processes == 0:
        return plan
    cut = [rule for rule, style in plan.items() if rule.rpartition(".")[2] in KEYS and style == "colwise"]
    if not cut:
        raise ModelError(
            f"{name}: {K} key-value heads do not divide over {processes} processes, and its plan has no k_proj and "
            f"v_proj of their own to share; take one of {', '.join(map(str, _divisors(K)))} processes"
        )
    style = f"headwise_keys_{H}_{K}"
    _register(style, H, K)
    return plan | dict.fromkeys(cut, style)


def _divisors(n: int) -> Iterator[int]:
    return (d for d in range(1, n + 1) if n % d == 0)


def _transformers(part: str) -> Any:
    """Return a module of transformers' distributed package."""
    import importlib

    try:
        return importlib.import_module(f"transformers.distributed.{part}")
    except ImportError as error:
        raise ModelError(
            f"this version of transformers has no transformers.distributed.{part} ({error}); take 5.23 or later"
        ) from None


def _register(name: str, num_heads: int, num_kv_heads: int) -> None:
    """Register a transformers style for k_proj and v_proj: whole weights, and only the key-value heads read here."""
    styles = _transformers("parallel_utils").ALL_PARALLEL_STYLES
    if name in styles:
        return
    base: Any = _transformers("tensor_parallel").TensorParallelLayer

    class KeyHeads(base):
        def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
            from torch.distributed.tensor import Replicate, distribute_tensor

            old = getattr(module, param, None)
            if old is not None:
                whole = distribute_tensor(old.detach(), mesh, [Replicate()], src_data_rank=None)
                setattr(module, param, nn.Parameter(whole, requires_grad=old.requires_grad))

        def install_forward(self, module: Any, mesh: Any) -> nn.Module:
            group = Group(mesh)
            module.share = Share(num_heads, num_kv_heads, group.size, group.rank)

            def own(parameter: Tensor) -> Tensor:
                heads = as_replica(as_dtensor(parameter), group.dim).unflatten(0, (num_kv_heads, -1))
                return module.share.pick(heads, 0).flatten(0, 1)

            if not is_linear(module):
                raise ModelError(
                    f"key-value heads of {type(module).__name__} are not shared between processes, for it may compute "
                    f"something else than its weight says; take one of {', '.join(map(str, _divisors(num_kv_heads)))} "
                    "processes, or load without quantisation and adapters"
                )

            def forward(x: Tensor) -> Tensor:
                bias = None if module.bias is None else own(module.bias)
                return nn.functional.linear(group.shared(x), own(module.weight), bias)

            module.forward = forward
            return module

    styles.register(name, KeyHeads())
