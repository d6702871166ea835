"""Measure a model with a config on text: its layers by name, moments of its heads, and losses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import AttentionCall, probe
from ...shapes.arguments import shown
from ..layout.families import CheckpointLayout, Layer, family_of
from ..layout.head_axes import Sizes, TensorRuns
from ..layout.head_weights import HeadWeights
from ..layout.layer_weights import head_weights, parts_of
from .moments import Moments
from .paired_models import Projections

OnBatch = Callable[[int, int], None] | None


def family_in_memory(model: nn.Module, layouts: Mapping[str, Any]) -> CheckpointLayout:
    """Return the architecture and layers of a loaded model, with its tensors under their names in memory.

    Raises:
        TypeError: not a model with a config.
        ValueError: an unknown architecture.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "to_dict"):
        raise TypeError(f"a model with a config is wanted, as transformers has them; got {shown(type(model).__name__)}")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return family_of(config.to_dict(), names, layouts)


def weights_in_memory(model: nn.Module, family: CheckpointLayout, layer: Layer) -> HeadWeights:
    """Return the weights of a layer of a loaded model."""
    return head_weights(family, layer, lambda name: model.get_parameter(name).detach())


def projections_of(family: CheckpointLayout) -> dict[str, Projections]:
    """Return the output and value projections of each attention module by its name, for `reconstruct_modules`."""
    made = {}
    for layer in family.layers:
        matrices = {name: form for name, form in layer.tensors.items() if name.endswith("weight")}
        output = next(name for name, form in matrices.items() if "o" in form.parts())
        value = next(name for name, form in matrices.items() if "v" in form.parts())
        made[layer.prefix.removesuffix(".")] = Projections(
            output.removesuffix(".weight"), value.removesuffix(".weight"), rows_of(matrices[value], layer.sizes, "v")
        )
    return made


def rows_of(form: TensorRuns, sizes: Sizes, part: str) -> tuple[int, ...]:
    """Return the indices of a part (q, k, v or o) on the axis of heads, head by head."""
    lengths = [sum(run.length(sizes) for run in axis) or 1 for axis in form.axes]
    places = torch.arange(math.prod(lengths), device="cpu").reshape(lengths)
    found = [some.flatten() for one, some in parts_of(places, form, sizes) if one == part]
    return tuple(torch.cat(found).tolist())


def read_moments(
    model: nn.Module, family: CheckpointLayout, rows: Sequence[Tensor], progress: OnBatch = None
) -> dict[str, Moments]:
    """Return the moments of each layer's heads, by the layer's key, while the model reads rows of ids, each (B, T).

    Raises:
        ValueError: queries, keys or values that are NaN or infinite.
    """
    made = {layer.key: Moments.like(weights_in_memory(model, family, layer)) for layer in family.layers}
    prefixes = {layer.prefix: layer.key for layer in family.layers}

    def count(call: AttentionCall) -> None:
        key = next((key for prefix, key in prefixes.items() if f"{call.module}.".startswith(prefix)), None)
        if key is not None:
            made[key].watch(call)

    with in_eval_mode_without_grad(model), probe(model, count):
        for n, ids in enumerate(rows):
            say(model, ids)
            if progress is not None:
                progress(n + 1, len(rows))
    for key, one in made.items():
        one.check_finite(f"layer {key}")
    return made


def say(model: nn.Module, ids: Any) -> Any:
    """Return the output of a model for ids; in an encoder-decoder, encoder and decoder read the same text."""
    takes = inspect.signature(model.forward).parameters
    both = {"decoder_input_ids": ids} if "decoder_input_ids" in takes else {}
    return model(input_ids=ids, use_cache=False, **both)


def loss_of(model: nn.Module, rows: Sequence[Tensor]) -> float | None:
    """Return the loss in nats per token, without the first token of each row; None if there are no token logits."""
    total, count = 0.0, 0
    with in_eval_mode_without_grad(model):
        for ids in rows:
            logits = getattr(say(model, ids), "logits", None)
            if not isinstance(logits, Tensor) or logits.shape[:-1] != ids.shape or logits.shape[-1] <= int(ids.max()):
                return None
            said = logits[:, :-1].flatten(0, 1).float()
            total += float(nn.functional.cross_entropy(said, ids[:, 1:].flatten(), reduction="sum"))
            count += ids[:, 1:].numel()
    return total / max(count, 1)
