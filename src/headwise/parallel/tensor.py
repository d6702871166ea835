"""Tensor parallelism: the heads of an attention module split over the processes of a mesh."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..nn.gated import OutputGate, output_gate_of
from ..nn.hooks.projections import HOOKS
from ..nn.inner_attention import InnerAttention
from ..nn.latent import LatentAttention
from ..nn.multihead import MultiHeadAttention
from ..ops.sharding.heads import Group, Share
from ..shapes.arguments import shown
from .head_split.layers import RankHeadsLinear, ReplicatedLinear, ReplicatedNorm, SumOfHeads
from .head_split.shards import HeadShards, shards_of
from .head_split.split_modules import SplitLatentAttention, SplitMultiHeadAttention, set_shards

Attention = TypeVar("Attention", MultiHeadAttention, LatentAttention)


def tensor_parallel(module: Attention, mesh: DeviceMesh) -> Attention:
    """Split the heads of an attention module over the processes of a mesh, in place; call it on each process.

    Every process gets H / N consecutive query heads, the key-value heads that they read, and their parameters: rows of
    q_proj, k_proj and v_proj (of q_b_proj and kv_b_proj in latent attention), columns of o_proj, biases and sinks.
    Inputs and outputs are complete on every process. A forward pass has one all-reduce (of o_proj's outputs), a
    backward pass another (of the input's gradients). Masks, gates, slopes and score biases are passed for all heads, as
    before; each process reads its own. Caches hold the heads of the process: create them with
    ``len(module.shards.share.keys)`` key-value heads.

    If N divides the number of key-value heads, each of them is on one process. Otherwise (for example with more
    processes than key-value heads) every process has all of k_proj and v_proj and computes the heads that it needs;
    their gradients are summed.

    The parameters become DTensors under the same names, with `Shard(0)`, `Shard(1)` or `Replicate()`, so optimizers,
    gradient clipping and `torch.distributed.checkpoint` support them: a checkpoint saved from N processes loads into
    any number of processes. The values are those of the mesh's first process. On the meta device nothing is sent or
    filled in; `headwise.parallel.load_slices` then reads each process's part of a checkpoint. Because the parameters
    are new, create the optimizer and register hooks afterwards. Parameters shared within the module stay shared;
    parameters shared with other modules must be tied again.

    A module that torch's `parallelize_module` has split keeps its parameters and messages; call `tensor_parallel` after
    it, so that masks, gates and sinks are passed for all heads and gradients are summed.

    Args:
        module: a `headwise.MultiHeadAttention` or `headwise.LatentAttention` with `torch.nn.Linear` projections.
        mesh: a mesh of one dimension, such as ``torch.distributed.init_device_mesh("cpu", (N,))``; use ``mesh["tp"]``
            of a larger one.

    Returns:
        The module.

    Raises:
        TypeError: another kind of module, or projections that are not plain linear layers.
        ValueError: the number of heads is not divisible by the number of processes, the mesh has several dimensions,
            the module is already split, hooks would be lost, or o_proj shares a parameter with another part.

    Example:
        >>> import headwise
        >>> mha = headwise.MultiHeadAttention(12, 6, num_kv_heads=2)
        >>> tensor_parallel(mha, mesh)  # doctest: +SKIP
    """
    if not isinstance(module, MultiHeadAttention | LatentAttention):
        raise TypeError(
            f"tensor_parallel takes a headwise.MultiHeadAttention or LatentAttention; got {type(module).__name__}; "
            "apply it to each of those inside your model, and torch's parallelize_module to the rest"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a torch.distributed DeviceMesh; got {shown(mesh)}")
    if mesh.ndim != 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "no names"
        raise ValueError(f"heads are split along one dimension; the mesh has {mesh.ndim} ({names}); take one of them")
    if isinstance(module, SplitMultiHeadAttention | SplitLatentAttention):
        name = (MultiHeadAttention if isinstance(module, MultiHeadAttention) else LatentAttention).__name__
        raise ValueError(f"this {name} is split over processes already; split a module once")
    if any(isinstance(p, DTensor) for p in module.parameters()):
        set_shards(module, _shards_of_torch(module, mesh))
        return module
    group = Group(mesh)
    share = Share(module.num_heads, _kv_heads(module), group.size, group.rank)
    _check_parts(module)
    tied = _tied(module)
    if isinstance(module, LatentAttention):
        _split_latent(module, group)
    else:
        _split_heads(module, group, share)
    if isinstance(getattr(module.inner, "sinks", None), nn.Parameter):
        _place(module.inner, "sinks", group, Shard(0))
    for first, *others in tied:
        for name in others:
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, module.get_parameter(first))
    set_shards(module, HeadShards(group, share))
    return module


def _kv_heads(module: MultiHeadAttention | LatentAttention) -> int:
    return module.num_heads if isinstance(module, LatentAttention) else module.num_kv_heads


def _shards_of_torch(module: MultiHeadAttention | LatentAttention, mesh: DeviceMesh) -> HeadShards:
    """Return the heads of this rank in a module that torch's `parallelize_module` has split."""
    projection = module.kv_b_proj if isinstance(module, LatentAttention) else module.q_proj
    shards = shards_of(module, projection, _kv_heads(module))
    if shards is None or shards.group.size != mesh.size():
        raise ValueError(
            f"parameters of this {type(module).__name__} are DTensors, but its heads are not split over the "
            f"{mesh.size()} processes of this mesh; call tensor_parallel before anything else makes DTensors of them, "
            "or after torch's parallelize_module with ColwiseParallel() for the projections to heads, on the same mesh"
        )
    return shards


KNOWN_PARTS: dict[str, type[nn.Module]] = {"inner": InnerAttention, "gate": OutputGate}


def _check_parts(module: nn.Module) -> None:
    """Raise, before any change, if a part of the module cannot be split."""
    gate = output_gate_of(module)
    inside_gate = [] if gate is None else [("gate.proj", gate.proj)]
    for name, part in [*module.named_children(), *inside_gate]:
        if name.endswith(("_proj", ".proj")) or name == "kv_a_proj_with_mqa":
            if type(part) is not nn.Linear:
                raise TypeError(
                    f"tensor_parallel splits plain torch.nn.Linear projections; {name} is {type(part).__name__}; merge "
                    "adapters and undo quantisation first"
                )
        elif name.endswith("_layernorm") and type(part) is not nn.RMSNorm:
            raise TypeError(
                f"tensor_parallel replaces the torch.nn.RMSNorm of latent attention; {name} is {type(part).__name__}, "
                "which may compute something else"
            )
        elif name in KNOWN_PARTS and not isinstance(part, KNOWN_PARTS[name]) and any(True for _ in part.parameters()):
            raise TypeError(
                f"the {name} part {type(part).__name__} has parameters of its own, and which belong to which head is "
                f"not known; tensor_parallel knows those of headwise.nn.{KNOWN_PARTS[name].__name__}"
            )
        replaced = name.endswith(("_proj", ".proj", "_proj_with_mqa", "_layernorm"))
        if (replaced and any(getattr(part, hooks) for hooks in HOOKS)) or any(map(_has_hooks, part.parameters())):
            raise ValueError(
                f"{name} or a parameter of it has hooks, which would be lost: parts and parameters are replaced; "
                "register hooks after the module is split, and undo old-style weight_norm, spectral_norm or pruning"
            )
        if replaced and "forward" in vars(part):
            raise ValueError(
                f"{name} has a forward of its own, which would be lost, for the part is replaced; set it afterwards"
            )


def _has_hooks(parameter: Any) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _tied(module: nn.Module) -> list[list[str]]:
    """Return groups of names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [some for some in names.values() if len(some) > 1]
    for some in tied:
        if len({name.startswith("o_proj.") for name in some}) > 1:
            raise ValueError(
                f"{' and '.join(some)} are one parameter; o_proj is cut by columns and the others by rows, so they "
                "cannot stay one; untie them first"
            )
    return tied


def _split_heads(mha: MultiHeadAttention, group: Group, share: Share) -> None:
    """Split the projections and norms of multi-head attention."""
    keys: tuple[int, ...] | None = None if share.deals_keys else share.keys
    mha.q_proj = _rows(mha.q_proj, group, None, mha.head_dim)
    mha.k_proj = _rows(mha.k_proj, group, keys, mha.head_dim)
    mha.v_proj = _rows(mha.v_proj, group, keys, mha.value_dim)
    mha.o_proj = _columns(mha.o_proj, group)
    if (gate := output_gate_of(mha)) is not None:
        gate.proj = _rows(gate.proj, group, None, gate.value_dim or 1)
    for norm in (mha.q_norm, mha.k_norm):
        if norm is not None:
            _replicate(norm, group)


def _split_latent(mla: LatentAttention, group: Group) -> None:
    """Split latent attention: every process has all latents, and its own heads computed from them."""
    if mla.q_lora_rank is None:
        mla.q_proj = _rows(mla.q_proj, group, None, mla.head_dim)
    else:
        mla.q_a_proj = _like(ReplicatedLinear, mla.q_a_proj)
        mla.q_a_layernorm = _replicated_norm(mla.q_a_layernorm)
        mla.q_b_proj = _rows(mla.q_b_proj, group, None, mla.head_dim)
        _replicate(mla.q_a_proj, group)
        _replicate(mla.q_a_layernorm, group)
    mla.kv_a_proj_with_mqa = _like(ReplicatedLinear, mla.kv_a_proj_with_mqa)
    mla.kv_a_layernorm = _replicated_norm(mla.kv_a_layernorm)
    _replicate(mla.kv_a_proj_with_mqa, group)
    _replicate(mla.kv_a_layernorm, group)
    mla.kv_b_proj = _rows(mla.kv_b_proj, group, None, mla.nope_dim + mla.value_dim)
    mla.o_proj = _columns(mla.o_proj, group)


def _rows(linear: nn.Linear, group: Group, keys: tuple[int, ...] | None, size: int) -> RankHeadsLinear:
    """Return a projection to heads: split by rows, or complete if several processes need the same head."""
    own = _like(RankHeadsLinear, linear)
    own.group, own.keys, own.size = group, keys, size
    place: Placement = Shard(0) if keys is None else Replicate()
    for name in ("weight", "bias"):
        _place(own, name, group, place)
    return own


def _columns(linear: nn.Linear, group: Group) -> SumOfHeads:
    """Return the projection from heads, split by columns."""
    total = _like(SumOfHeads, linear)
    total.group = group
    _place(total, "weight", group, Shard(1))
    _place(total, "bias", group, Replicate())
    return total


Linear = TypeVar("Linear", bound=nn.Linear)


def _like(kind: type[Linear], linear: nn.Linear) -> Linear:
    """Return a linear layer of another class with the same parameters."""
    layer = kind(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    layer.weight, layer.bias = linear.weight, linear.bias
    return layer.train(linear.training)


def _replicated_norm(norm: nn.RMSNorm) -> ReplicatedNorm:
    layer = ReplicatedNorm(norm.normalized_shape, eps=norm.eps, elementwise_affine=True, device="meta")
    layer.weight = norm.weight
    return layer.train(norm.training)


def _replicate(part: nn.Module, group: Group) -> None:
    """Replicate the parameters of a part on every process."""
    for inside in part.modules():
        for name, _ in list(inside.named_parameters(recurse=False)):
            _place(inside, name, group, Replicate())


def _place(owner: nn.Module, name: str, group: Group, place: Placement) -> None:
    """Replace a parameter by a DTensor with the values of the mesh's first process."""
    old: Any = getattr(owner, name)
    if old is None:
        return
    numbers: Tensor = old.detach()
    source = None if numbers.is_meta else 0
    spread = distribute_tensor(numbers, group.mesh, [place], src_data_rank=source)
    if not spread.is_meta and spread.to_local().untyped_storage().nbytes() > spread.to_local().nbytes:
        spread = DTensor.from_local(
            spread.to_local().clone(), group.mesh, [place], run_check=False, shape=spread.shape, stride=spread.stride()
        )
    setattr(owner, name, nn.Parameter(spread, requires_grad=old.requires_grad))
