"""What a pruned model lost is won back in closed form: its output projections and values solved anew on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .arguments import check_kind, check_models, check_rows, check_told
from .calibrate import family_in_memory, loss_of, projections_of, say, weights_in_memory
from .layers import layer_tensors
from .pair import batches_of
from .prune import Pruning
from .recover import recover
from .regroup import Buildable

ANEW = (
    "output projections and values of the heads that stay were solved anew on text, so that attention gives out what "
    "it did before"
)


def mend(
    plan: Pruning,
    model: nn.Module,
    rows: Sequence[Tensor],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Pruning:
    """The same pruning with output projections and values solved anew, so that attention gives out what it did.

    No training: each layer is a problem of least squares, see `headwise.reshape.recover`.

    Args:
        plan: What `plan_prune` made.
        model: The original, loaded, in float32.
        rows: Text as ids, each (B, T), two at least; every fifth is left to measure the loss on.
        progress: Called with the batches done and the batches in all.

    Raises:
        TypeError: a source that cannot build the pruned model.
        ValueError: too few rows, or zeroed heads, whose places are to stay 0.
    """
    check_kind(Pruning, "plan_prune", plan=plan)
    check_models(model=model)
    check_told(progress=progress)
    source = plan.source
    if plan.zero:
        raise ValueError("zeroed heads stay 0, so nothing is solved anew for them; leave zero out, or do not recover")
    if not isinstance(source, Buildable):
        raise TypeError(
            f"to recover takes a checkpoint that headwise.hf.checkpoint opened; got {type(source).__name__}"
        )
    check_rows(rows, 2)
    changed = source.build(plan.target.config, {one.name: one.make() for one in plan.tensors()})
    pruned = family_in_memory(changed, source.layouts)
    _, check = batches_of(rows)
    losses = {"original": loss_of(model, check), "pruned": loss_of(changed, check)}
    recover(changed, model, rows, projections_of(pruned), call=say, progress=progress)
    losses |= {"recovered": loss_of(changed, check), "tokens": sum(ids[:, 1:].numel() for ids in check)}
    solved: dict[str, Tensor] = {}
    for layer in plan.family.layers:
        weights = weights_in_memory(changed, pruned, pruned.layer(layer.key))
        made = layer_tensors(plan.family, layer, weights, lambda name: torch.empty(0, device="cpu"))
        changes = {name for name, form in layer.tensors.items() if form.parts() & {"v", "o"}}
        changes |= {name.removesuffix("weight") + "bias" for name in changes}
        solved |= {name: tensor for name, tensor in made.items() if name in changes}
    return replace(plan, solved=solved, losses={} if None in losses.values() else losses, notes=(*plan.notes, ANEW))
