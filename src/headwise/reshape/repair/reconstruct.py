"""Reconstruct a reshaped model in closed form: solve its output projections and values again on text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...shapes.arguments import shown
from ..arguments import check_models, check_rows, check_told
from ..layout.head_weights import HeadWeights
from ..layout.layer_weights import layer_tensors
from ..layout.protocol import BuildableCheckpoint
from ..pruning.pruned_checkpoint import Pruning
from ..regrouping.regrouped_checkpoint import Regrouping
from .calibration import family_in_memory, loss_of, projections_of, say, weights_in_memory
from .paired_models import batches_of
from .reconstruct_modules import Inputs, Reconstruction, reconstruct_modules

SOLVED = (
    "output projections and values of the heads that stay were solved anew on text, so that attention gives out what "
    "it did before"
)
RECONSTRUCTED = ("value", "output", "value_bias", "output_bias")
"""The weights of a regrouped layer that are replaced."""

Plan = TypeVar("Plan", Pruning, Regrouping)
WeightsOf = Callable[[str], HeadWeights]
"""A function from a layer's key to its weights in the reconstructed model."""


def reconstruct(
    plan: Plan,
    model: nn.Module,
    rows: Sequence[Tensor],
    *,
    inputs: Inputs = "original",
    value_steps: int = 12,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Return the plan with output projections and values solved again, so that attention outputs what it did before.

    Nothing is trained: each layer is a least-squares problem, see `headwise.reshape.reconstruct_modules`.

    Args:
        plan: A plan of `plan_prune` or `plan_regroup`.
        model: The original model, loaded in float32.
        rows: Text as ids, each (B, T), at least two; every fifth is held out to measure the loss on.
        inputs: As in `reconstruct_modules`.
        value_steps: As in `reconstruct_modules`.
        progress: Called as ``progress(done, total)`` after each batch of text.

    Raises:
        TypeError: a plan or model of another type, or a checkpoint that cannot build the changed model.
        ValueError: too few rows, or a plan with zeroed heads, whose columns must stay 0.
    """
    if not isinstance(plan, (Pruning, Regrouping)):
        raise TypeError(f"plan is a Pruning or a Regrouping, as plan_prune and plan_regroup make it; got {shown(plan)}")
    check_models(model=model)
    check_told(progress=progress)
    source = plan.source
    if isinstance(plan, Pruning) and plan.zero:
        raise ValueError(
            "zeroed heads stay 0, so nothing is solved for them; leave out zero=True, or do not reconstruct"
        )
    if not isinstance(source, BuildableCheckpoint):
        raise TypeError(
            f"reconstruct() needs a checkpoint opened with headwise.hf.checkpoint(); got {type(source).__name__}"
        )
    check_rows(rows, 2)
    changed = source.build(plan.target.config, {one.name: one.make() for one in plan.tensors()})
    family = family_in_memory(changed, source.layouts)
    _, check = batches_of(rows)
    stage = "pruned" if isinstance(plan, Pruning) else "regrouped"
    losses = {"original": loss_of(model, check), stage: loss_of(changed, check)}
    layers = projections_of(family)
    options: dict[str, Any] = {"inputs": inputs, "value_steps": value_steps, "call": say, "progress": progress}
    done = reconstruct_modules(changed, model, rows, layers, **options)
    losses["recovered"] = loss_of(changed, check)
    tokens = sum(ids[:, 1:].numel() for ids in check)

    def weights_of(key: str) -> HeadWeights:
        return weights_in_memory(changed, family, family.layer(key))

    finished: Any  # mypy cannot infer that it has the type of the plan
    if isinstance(plan, Pruning):
        finished = _with_solved(plan, weights_of, losses, tokens)
    else:
        finished = _with_weights(plan, weights_of, losses, tokens, done)
    return finished


def _with_solved(plan: Pruning, weights_of: WeightsOf, losses: Mapping[str, float | None], tokens: int) -> Pruning:
    """Return the plan with the solved tensors, under their names in the checkpoint."""
    solved: dict[str, Tensor] = {}
    for layer in plan.family.layers:
        made = layer_tensors(plan.family, layer, weights_of(layer.key), lambda name: torch.empty(0, device="cpu"))
        changes = {name for name, form in layer.tensors.items() if form.parts() & {"v", "o"}}
        changes |= {name.removesuffix("weight") + "bias" for name in changes}
        solved |= {name: tensor for name, tensor in made.items() if name in changes}
    measured = {} if None in losses.values() else {**losses, "tokens": tokens}
    return replace(plan, solved=solved, losses=measured, notes=(*plan.notes, SOLVED))


def _with_weights(
    plan: Regrouping,
    weights_of: WeightsOf,
    losses: Mapping[str, float | None],
    tokens: int,
    done: Sequence[Reconstruction],
) -> Regrouping:
    """Return the plan with the weights that replace the merged ones, by layer."""
    reconstructed = {}
    for layer in plan.family.layers:
        parts = dict(weights_of(layer.key).tensors())
        reconstructed[layer.key] = {name: parts[name].clone() for name in RECONSTRUCTED if name in parts}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    errors = {one.module: [one.before, one.after] for one in done}
    return replace(
        plan, reconstructed=reconstructed, measured={"losses": {**known, "tokens": tokens}, "errors": errors}
    )
