"""Prune heads of a module in memory: its weights shrink, and layers may lose different numbers of heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ...nn.gated import GatedMultiHeadAttention, OutputGate, output_gate_of
from ...nn.hooks.projections import weight_of
from ...nn.inner_attention import InnerAttention
from ...nn.multihead import MultiHeadAttention
from ...plan.model.heads_by_layer import base_type
from ...shapes.arguments import shown, whole_numbers
from ..layout.families import CheckpointLayout, Layer, family_of, with_heads
from ..layout.head_axes import KeptHeads, Sizes, form
from . import selection as choose

OURS = {"q_proj": "(H q)", "k_proj": "(K k)", "v_proj": "(K v)"}
OUT = form("M (H o)")


def prune_module(
    module: nn.Module,
    heads: Iterable[int] | Mapping[Any, Iterable[int]] | str,
    *,
    layouts: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Remove heads of a module, in place. Parameters are replaced by smaller ones, so create a new optimizer.

    Layers may lose different numbers of heads. Under GQA every remaining key-value head must keep equally many query
    heads.

    Args:
        module: A `headwise.MultiHeadAttention`; a model that holds some; or, with `layouts`, a transformers model.
        heads: The query heads to remove: a list for one module, ``{"blocks.0.attend": [1, 3]}`` for a model that holds
            some; for a transformers model as in `prune`: ``"0.1,3.7"`` or ``{0: [1], 3: [7]}``.
        layouts: ``headwise.hf.layouts()``, for a transformers model.

    Returns:
        The module.

    Raises:
        TypeError, ValueError: another type of module or heads; unknown heads, or heads that cannot be removed alone.
            Then nothing has changed.

    Example:
        >>> import torch, headwise
        >>> mha = headwise.MultiHeadAttention(12, 6)
        >>> x = torch.randn(2, 5, 12)
        >>> gated = mha(x, gate=torch.tensor([1.0, 0, 1, 1, 0, 1]))
        >>> torch.allclose(prune_module(mha, [1, 4])(x), gated, atol=1e-6)
        True
        >>> mha.num_heads, mha.q_proj.weight.shape
        (4, torch.Size([8, 12]))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"prune_module takes a torch.nn.Module; got {shown(module)}")
    if layouts is not None:
        _prune_known(module, heads, layouts)
    elif isinstance(module, MultiHeadAttention):
        if isinstance(heads, (str, Mapping)):
            raise TypeError(f"of one MultiHeadAttention a list of heads goes; got {shown(heads)}")
        _prune_ours({"": module}, {"": heads})
    else:
        inside = {name: part for name, part in module.named_modules() if isinstance(part, MultiHeadAttention)}
        if not inside:
            raise TypeError(
                f"{type(module).__name__} holds no headwise.MultiHeadAttention; for a transformers model add "
                "layouts=headwise.hf.layouts()"
            )
        if not isinstance(heads, Mapping):
            raise TypeError(f"heads of a model are {{{next(iter(inside))!r}: [1, 3]}}; got {shown(heads)}")
        _prune_ours(inside, heads)
    return module


# --- headwise's own ---------------------------------------------------------------------------------------------------


def _prune_ours(modules: Mapping[str, MultiHeadAttention], heads: Mapping[Any, Iterable[int]]) -> None:
    """Prune headwise's own modules; all arguments are checked before the first module changes."""
    wanted = []
    for name, gone in heads.items():
        if name not in modules:
            raise ValueError(f"no attention module {shown(name)}; there are {', '.join(map(repr, modules))}")
        mha = modules[name]
        sizes = Sizes(mha.num_heads, mha.num_kv_heads, mha.head_dim, mha.value_dim)
        _check_parts(name, mha)
        _check_projections(mha)
        layer = Layer(name or "of the module", "self", 0, "", sizes, {})
        gone = whole_numbers("heads", gone)
        wrong = [head for head in gone if not 0 <= head < sizes.H]
        if wrong:
            raise ValueError(f"layer {layer.key} has the heads 0 to {sizes.H - 1}; got {wrong[0]}")
        wanted.append((mha, sizes, choose.kept_exactly(layer, set(gone))))
    for mha, sizes, kept in wanted:
        for projection, text in OURS.items():
            _cut(getattr(mha, projection), form(f"{text} M").keep, form(text).keep, sizes, kept)
        _cut(mha.o_proj, OUT.keep, None, sizes, kept)
        if (gate := output_gate_of(mha)) is not None:
            text = "H" if gate.value_dim is None else "(H o)"
            _cut(gate.proj, form(f"{text} M").keep, form(text).keep, sizes, kept)
        inner = mha.inner
        if isinstance(inner, InnerAttention) and inner.sinks is not None:
            inner.sinks = _parameter(form("H").keep(inner.sinks.detach(), sizes, kept), inner.sinks)
        mha.num_heads, mha.num_kv_heads = len(kept.query), len(kept.kv)


def _check_parts(name: str, mha: MultiHeadAttention) -> None:
    known: list[tuple[str, nn.Module, type[nn.Module]]] = [("inner", mha.inner, InnerAttention)]
    if isinstance(mha, GatedMultiHeadAttention):
        known.append(("gate", mha.gate, OutputGate))
    for role, part, kind in known:
        if not isinstance(part, kind) and any(True for _ in part.parameters()):
            raise ValueError(
                f"the {role} part {type(part).__name__} of module {name!r} has weights of its own, and which of them "
                f"belong to a head is not known; prune a module with headwise.nn.{kind.__name__}"
            )


def _check_projections(mha: MultiHeadAttention) -> None:
    gate = [] if output_gate_of(mha) is None else ["gate.proj"]
    for name in (*OURS, "o_proj", *gate):
        weight = weight_of(name, mha.get_submodule(name), "prune_module()")
        if not isinstance(weight, nn.Parameter):
            raise TypeError(
                f"prune_module() cuts parameters, and the weight of {name} is computed from others "
                "(torch.nn.utils.parametrize); remove its parametrization first"
            )


def _cut(linear: nn.Linear, weight: Any, bias: Any, sizes: Sizes, kept: KeptHeads) -> None:
    """Keep only the rows or columns of a projection that belong to kept heads."""
    linear.weight = _parameter(weight(linear.weight.detach(), sizes, kept), linear.weight)
    if bias is not None and linear.bias is not None:
        linear.bias = _parameter(bias(linear.bias.detach(), sizes, kept), linear.bias)
    linear.out_features, linear.in_features = linear.weight.shape


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=like.requires_grad)


# --- models with a config ---------------------------------------------------------------------------------------------


def _prune_known(model: nn.Module, heads: Any, layouts: Mapping[str, Any]) -> None:
    """Prune a model whose config names its architecture."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise TypeError(f"layouts are for a model with a config, as transformers has them; got {type(model).__name__}")
    state = {name: part for name, part in model.named_parameters(remove_duplicate=False)}
    family = family_of(config.to_dict(), state, layouts)
    gone = choose.named(family, heads)
    if any(gone.values()) and "inexact" in family.about:
        raise ValueError(f"no head of {family.model_type} can go: {family.about['inexact']}")
    kept = {layer.key: choose.kept_exactly(layer, gone[layer.key]) for layer in family.layers}
    _check_together(family, kept)
    for layer in family.layers:
        _check_shapes(layer, state)
    for layer in family.layers:
        _prune_layer(model, layer, kept[layer.key], layouts["attributes"])
    if family.by_layer and base_type(family.model_type) is None:
        return  # this config has one number of heads for all layers, and the size of a head depends on it
    counts = {
        field: {(len(kept[layer.key].query), len(kept[layer.key].kv)) for layer in layers}
        for field, layers in family.counts.items()
    }
    if all(len(some) == 1 for some in counts.values()):
        after = with_heads(family, {field: some.pop() for field, some in counts.items()})
        changes = {name: value for name, value in after.items() if family.config.get(name) != value}
        for part in {id(c): c for c in (getattr(part, "config", None) for part in model.modules())}.values():
            for name, value in changes.items():
                if getattr(part, "model_type", None) == family.config.get("model_type") and hasattr(part, name):
                    setattr(part, name, value)


def _check_together(family: CheckpointLayout, kept: Mapping[str, KeptHeads]) -> None:
    """Raise ValueError if layers with a shared bias table keep different heads, or need equal numbers and differ."""
    for role in family.same_heads:
        if len({kept[layer.key] for layer in family.layers if layer.role == role}) > 1:
            raise ValueError(
                f"the {role} layers share one table of position biases, a column a head; name the same heads in each"
            )
    if family.about.get("one_count") and len({len(some.query) for some in kept.values()}) > 1:
        raise ValueError(
            f"the layers of {family.model_type} share what depends on their number of heads; lose as many in every one"
        )


def _check_shapes(layer: Layer, state: Mapping[str, Tensor]) -> None:
    for name, one in layer.tensors.items():
        if not one.fits(state[name].shape, layer.sizes):
            raise ValueError(
                f"{name} is {tuple(state[name].shape)}, not of the {layer.sizes.H} heads in the model's config; if it "
                "was pruned before, each layer by another number, load it anew"
            )


def _prune_layer(model: nn.Module, layer: Layer, kept: KeptHeads, attributes: Mapping[str, str]) -> None:
    """Replace the tensors of one layer, and update the numbers that its modules store."""
    sizes, after = layer.sizes, kept.sizes(layer.sizes)
    for name, one in layer.tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        old = getattr(owner, leaf)
        if not isinstance(old, nn.Parameter):
            continue
        new = _parameter(one.keep(old.detach(), sizes, kept), old)
        setattr(owner, leaf, new)
        if leaf == "weight":
            for attribute, before, now in _features(owner, old, new):
                if getattr(owner, attribute, None) == before:
                    setattr(owner, attribute, now)
    numbers = {"H": (sizes.H, after.H), "K": (sizes.K, after.K), "G": (sizes.group, after.group)}
    numbers["H q"] = (sizes.H * sizes.D, after.H * after.D)
    for part in model.get_submodule(layer.prefix.rstrip(".")).modules():
        for attribute, what in attributes.items():
            if what in numbers and getattr(part, attribute, None) == numbers[what][0]:
                setattr(part, attribute, numbers[what][1])


def _features(owner: nn.Module, old: Tensor, new: Tensor) -> list[tuple[str, int, int]]:
    """Return the attributes of linear layers and embeddings that store sizes: (name, before, after)."""
    rows, columns = ("out_features", "in_features") if hasattr(owner, "out_features") else ("nx", "nf")
    if isinstance(owner, nn.Embedding):
        rows, columns = "num_embeddings", "embedding_dim"
    return [(rows, old.shape[0], new.shape[0])] + [(columns, old.shape[-1], new.shape[-1])] * (old.ndim > 1)
