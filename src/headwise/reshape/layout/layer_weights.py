"""Convert the tensors of a layer to `HeadWeights`, for every checkpoint format, and convert them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...plan.shape import short
from .families import CheckpointLayout, Layer
from .head_axes import Sizes, TensorRuns
from .head_weights import HeadWeights, Norm, RotaryLayout

NAMES = {"q": "query", "k": "key", "v": "value", "o": "output"}
NORMS = {"q_norm.weight": "query_norm", "k_norm.weight": "key_norm"}


def head_weights(family: CheckpointLayout, layer: Layer, read: Callable[[str], Tensor]) -> HeadWeights:
    """Return the weights of a layer; `read` returns a tensor by name.

    Raises:
        ValueError: latent attention, because its keys and values do not have this form.
    """
    if family.is_latent:
        raise ValueError(
            f"{family.model_type} makes keys and values from a small shared vector: none to be shared further"
        )
    parts: dict[str, Tensor] = {}
    per_head: dict[str, Tensor] = {}
    output_bias = _output_bias(layer)
    for name, form in layer.tensors.items():
        tensor, leaf = read(name), name.removeprefix(layer.prefix)
        if leaf in NORMS:
            parts[NORMS[leaf]] = _norm(tensor, layer) + family.about.get("norm_offset", 0.0)
        elif name == output_bias:
            parts["output_bias"] = tensor
        elif leaf == "sinks":
            parts["sinks"] = tensor
        elif any(run.kind == "H" and run.parts == ("",) for axis in form.axes for run in axis):
            per_head[name] = tensor.movedim(next(n for n, axis in enumerate(form.axes) if axis), 0)
        else:
            for part, some in parts_of(tensor, form, layer.sizes):
                parts[f"{NAMES[part]}_bias" if tensor.ndim == 1 else NAMES[part]] = some
    norm: Norm = family.about.get("norm", "rms")
    return HeadWeights(**parts, norm=norm, rotary=rotary_layout(family, layer), per_head=per_head)


def layer_tensors(
    family: CheckpointLayout, layer: Layer, weights: HeadWeights, read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a layer, from weights that may have fewer heads; `read` gives those without heads."""
    made: dict[str, Tensor] = {}
    output_bias = _output_bias(layer)
    sizes = replace(layer.sizes, H=weights.num_heads, K=weights.num_kv_heads)
    for name, form in layer.tensors.items():
        leaf = name.removeprefix(layer.prefix)
        if leaf in NORMS:
            norm = getattr(weights, NORMS[leaf]) - family.about.get("norm_offset", 0.0)
            made[name] = norm.flatten() if len(form.axes) == 1 else norm
        elif name == output_bias:
            assert weights.output_bias is not None
            made[name] = weights.output_bias
        elif leaf == "sinks":
            assert weights.sinks is not None
            made[name] = weights.sinks
        elif name in weights.per_head:
            made[name] = weights.per_head[name].movedim(0, next(n for n, axis in enumerate(form.axes) if axis))
        elif form.whole or not any(form.axes):
            made[name] = read(name)
        else:
            made[name] = _joined(form, weights, bias=len(form.axes) == 1)
        assert form.fits(made[name].shape, sizes), name
        made[name] = made[name].contiguous()
    return made


def rotary_layout(family: CheckpointLayout, layer: Layer) -> RotaryLayout | None:
    """Return the rotary position embedding of a layer's queries and keys, or None if it has none."""
    about = family.about.get("turns")
    if about is None:
        return None
    config = family.config
    if "layers" in about and not _turning(config, about, layer):
        return None
    dim = layer.sizes.D
    if "factor" not in about:  # this class ignores a factor in the config
        return RotaryLayout(dim, interleaved=about.get("interleaved", False))
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters are a table of settings; config.json has {short(rope)}")
    factors = [rope.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct")]
    factor: Any = next((value for value in factors if value is not None), about["factor"])
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise ValueError(f"the part of a head that turns is above 0 and at most 1; config.json has {short(factor)}")
    return RotaryLayout(int(dim * factor), interleaved=about.get("interleaved", False))


def _turning(config: Mapping[str, Any], about: Mapping[str, Any], layer: Layer) -> bool:
    """Return whether a layer has rotary positions, if a list or an interval in the config decides this by layer."""
    turning, every = config.get(about["layers"]), config.get(about["every"]) or about["default"]
    if turning is None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"{about['every']} is a whole number of layers; config.json has {short(every)}")
        return bool((layer.index + 1) % every)
    if not isinstance(turning, list) or len(turning) <= layer.index:
        raise ValueError(f"{about['layers']} has a number for each layer; config.json has {short(turning)}")
    return bool(turning[layer.index])


# --- one tensor -------------------------------------------------------------------------------------------------------


def _output_bias(layer: Layer) -> str:
    """Return the name that a bias of the output projection would have, derived from the name of its weight."""
    weight = next(name for name, form in layer.tensors.items() if "o" in form.parts())
    return weight.removesuffix("weight") + "bias"


def _norm(tensor: Tensor, layer: Layer) -> Tensor:
    """Return the weights of a norm, as (heads, D) if each head has its own."""
    return tensor.unflatten(0, (-1, layer.sizes.D)) if tensor.ndim == 1 and len(tensor) > layer.sizes.D else tensor


def parts_of(tensor: Tensor, form: TensorRuns, sizes: Sizes) -> Iterator[tuple[str, Tensor]]:
    """Yield (part, its numbers by head): (H, D, M); for o (M, H, V); for biases (H, D)."""
    for n, axis in enumerate(form.axes):
        start = 0
        for run in axis:
            stretch = tensor.narrow(n, start, run.length(sizes)).unflatten(n, (-1, run.width(sizes)))
            start += run.length(sizes)
            done = 0
            for part in run.parts:
                size = sizes.of(part)
                some = stretch.narrow(n + 1, done, size)
                done += size
                yield part, some.movedim((n, n + 1), (1, 2) if part == "o" else (0, 1))


def _joined(form: TensorRuns, weights: HeadWeights, *, bias: bool) -> Tensor:
    """Return the tensor from which `parts_of` yields these parts."""
    [n] = [n for n, axis in enumerate(form.axes) if axis]
    stretches = []
    for run in form.axes[n]:
        parts = []
        for part in run.parts:
            some = getattr(weights, f"{NAMES[part]}_bias" if bias else NAMES[part])
            parts.append(some.movedim((1, 2) if part == "o" else (0, 1), (n, n + 1)))
        stretches.append(torch.cat(parts, n + 1).flatten(n, n + 1))
    return torch.cat(stretches, n)
