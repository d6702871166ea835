"""Prune heads of a checkpoint: plan the tensors and the class that loads them, write the folder, and prove it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...plan.model.heads_by_layer import FIELD, base_type
from ...shapes.arguments import check_flags, shown
from ..arguments import check_kind, check_writing
from ..layout.families import CheckpointLayout, Layer, check_shapes, family_of
from ..layout.head_axes import KeptHeads, Sizes, TensorRuns
from ..layout.protocol import ReshapableCheckpoint, check_source, check_unpruned
from ..layout.target_class import Target, target
from ..write.readme import BY_LAYER, PLAN, README, ZEROED, proved, readme
from ..write.shards import as_json
from ..write.verify import PLAIN, Proof
from ..write.writer import Planned, kept, write
from . import selection as choose
from .budget import Budget, counts_of, loadable, select, size_facts
from .scores import Scorer, in_order
from .selection import OR_ZERO, HeadScores

HeadChoice = str | Mapping[Any, Iterable[int]] | Iterable[tuple[Any, int]]


@dataclass(frozen=True)
class Pruning:
    """A plan to prune a checkpoint; nothing is written yet.

    Attributes:
        source: The checkpoint.
        family: Its architecture and layers.
        kept: The heads that stay, by layer.
        target: The class that loads the result, and its config.
        zero: True if heads are zeroed instead of removed, so that all sizes stay.
        notes: Notes on the choice, for the user.
        solved: Tensors that were solved again (see `headwise.reshape.reconstruct`), by name.
        losses: Losses before and after this reconstruction, as plain data.
    """

    source: ReshapableCheckpoint
    family: CheckpointLayout
    kept: Mapping[str, KeptHeads]
    target: Target
    zero: bool
    notes: tuple[str, ...]
    solved: Mapping[str, Tensor] = field(default_factory=dict)
    losses: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def gone(self) -> dict[str, list[int]]:
        """The heads to remove, by layer; a layer that loses none is left out."""
        lost = {
            layer.key: sorted(set(range(layer.sizes.H)) - set(self.kept[layer.key].query))
            for layer in self.family.layers
        }
        return {key: heads for key, heads in lost.items() if heads}

    def tensors(self) -> list[Planned]:
        """Return every tensor of the result."""
        where = {name: (layer, form) for layer in self.family.layers for name, form in layer.tensors.items()}
        return [self._tensor(name, *where.get(name, (None, None))) for name in self.source.tensors]

    def _tensor(self, name: str, layer: Layer | None, form: TensorRuns | None) -> Planned:
        planned = kept(self.source, name)
        if layer is not None and form is not None and layer.key in self.gone:
            planned = changed(planned, form, layer.sizes, self.kept[layer.key], zero=self.zero)
        planned = as_stored(planned, self.target)
        if name in self.solved:
            anew, dtype = self.solved[name], planned.dtype
            planned = Planned(name, dtype, planned.shape, lambda: anew.to(dtype))
        return planned

    def heads_plan(self) -> dict[str, Any]:
        """Return the heads that stay, by layer, in the form that `headwise.plan.of` reads."""
        return {"layers": {key: {"keep": list(some.query)} for key, some in self.kept.items()}}

    def gates(self) -> list[list[int]]:
        """Return 1 for each head that stays and 0 for each other; layers are in the order in which they attend."""
        order = in_order(self.family.layers)
        return [[int(head in self.kept[layer.key].query) for head in range(layer.sizes.H)] for layer in order]

    def facts(self, context: int = 8192) -> dict[str, Any]:
        """Return the changes as plain data: heads, sizes, class, and the counts of `headwise.plan` at `context`."""
        before, after = self._counts(pruned=False), self._counts(pruned=not self.zero)
        count = sum(map(len, self.gone.values()))
        heads = sum(layer.sizes.H for layer in self.family.layers)
        change = "zeroed" if self.zero else "removed"
        notes = [f"{count} of {heads} heads {'is' if count == 1 else 'are'} {change}.", *self.notes]
        if self.zero:
            notes.append(ZEROED)
        if self.target.why:
            notes.append(f"written as {self.target.model_type}, which computes the same: {self.target.why}")
        return {
            "done": "Heads zeroed" if self.zero else "Heads pruned",
            "change": change,
            "notes": notes,
            "gone": self.gone,
            "losses": dict(self.losses),
            "counts": {field: [before[field], after[field]] for field in before},
            **size_facts(self.source, self.family, self.target, self.tensors(), context),
        }

    def _counts(self, *, pruned: bool) -> dict[str, int | list[int]]:
        """Return the numbers of heads and key-value heads by config field; as a list if layers differ."""
        counts: dict[str, int | list[int]] = {}
        if base_type(self.target.model_type):
            return {
                FIELD: [len(self.kept[layer.key].query) if pruned else layer.sizes.H for layer in self.family.layers]
            }
        for name, layers in self.family.counts.items():
            whole = layers[0].sizes
            sizes = self.kept[layers[0].key].sizes(whole) if pruned else whole
            counts[self.family.field_name(name)] = sizes.H
            if whole.group > 1 or sizes.group > 1:
                counts["num_key_value_heads"] = sizes.K
        return counts


def changed(planned: Planned, form: TensorRuns, sizes: Sizes, some: KeptHeads, *, zero: bool) -> Planned:
    """Return a tensor with only these heads, or with 0 for the others."""
    make = planned.make
    if zero:
        return Planned(planned.name, planned.dtype, planned.shape, lambda: form.zero(make(), sizes, some))
    shape = form.shape(planned.shape, sizes, some)
    return Planned(planned.name, planned.dtype, shape, lambda: form.keep(make(), sizes, some))


def as_stored(planned: Planned, target: Target) -> Planned:
    """Return a tensor as the target class stores it: transposed if the class stores it transposed."""
    if not planned.name.endswith(target.transposed):
        return planned
    make = planned.make
    return Planned(planned.name, planned.dtype, planned.shape[::-1], lambda: make().T.contiguous())


def plan_prune(
    source: ReshapableCheckpoint,
    *,
    heads: HeadChoice | None = None,
    keep_fraction: float | int | None = None,
    budget: Budget | None = None,
    scores: HeadScores | Scorer | None = None,
    zero: bool = False,
) -> Pruning:
    """Return the changes that `prune` would make; write nothing. The arguments are those of `prune`.

    Raises:
        TypeError: an argument of another type.
        ValueError: in one line, what does not fit: an unknown architecture, heads that do not exist or cannot go
            alone, a number of heads that no class of transformers loads.

    Example:
        >>> import headwise.hf, headwise.models
        >>> from headwise import reshape
        >>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
        ...     plan = reshape.plan_prune(opened, heads="0.1,1.7", zero=True)
        >>> plan.gone
        {'0': [1], '1': [7]}
    """
    check_source(source)
    _check_request(heads, keep_fraction, budget, zero)
    check_unpruned(source.config)
    family = family_of(source.config, source.tensors, source.layouts)
    check_shapes(family, {name: entry.shape for name, entry in source.tensors.items()})
    gone = choose.named(family, [] if heads is None else heads)
    if callable(scores):
        scores = scores(family.layers)
    values = None if scores is None else choose.checked_scores(family, scores)
    chosen, notes = select(family, source.tensors, gone, values, keep_fraction=keep_fraction, budget=budget, zero=zero)
    goal = Target(family.model_type, family.whole(family.config)) if zero else _target(family, chosen)
    return Pruning(source, family, chosen, goal, zero, notes)


def _check_request(heads: object, keep_fraction: object, budget: object, zero: object) -> None:
    """Check types and ranges of the request, and that it is given in exactly one way."""
    check_flags(zero=zero)
    ways = {"heads": heads, "keep_fraction": keep_fraction, "budget": budget}
    names = [name for name, value in ways.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"give one of heads, keep_fraction and budget; got {' and '.join(names) or 'none'}")
    if budget is not None and not isinstance(budget, Budget):
        raise TypeError(f"budget is a headwise.reshape.Budget; got {shown(budget)}")
    number = isinstance(keep_fraction, (int, float)) and not isinstance(keep_fraction, bool)
    if keep_fraction is not None and not (number and 0 < keep_fraction <= 1):  # type: ignore[operator]
        raise ValueError(
            f"keep_fraction is the fraction of the heads that stays, above 0 and at most 1; got {shown(keep_fraction)}"
        )


def _target(family: CheckpointLayout, chosen: Mapping[str, KeptHeads]) -> Target:
    """Return the class that loads the result; raise ValueError with the numbers of heads that would load."""
    loses = any(len(chosen[layer.key].query) < layer.sizes.H for layer in family.layers)
    if loses and "inexact" in family.about:
        raise ValueError(
            f"no head of {family.model_type} can go: {family.about['inexact']}; add zero=True, which is exact"
        )
    try:
        return target(family, counts_of(family, chosen))
    except ValueError as none:
        raise ValueError(f"{none}; {_what_loads(family)}{OR_ZERO}") from None


def _what_loads(family: CheckpointLayout) -> str:
    """Return a hint with the numbers of heads that load; empty if layers have several fields."""
    if len(family.counts) > 1:
        return ""
    [(field, layers)] = family.counts.items()
    good = sorted({count[0] for count in loadable(family, field)} - {layers[0].sizes.H})
    return f"keep {', '.join(map(str, good[-8:]))} heads of each layer, " if good else ""


def prune(
    source: ReshapableCheckpoint,
    destination: str | os.PathLike[str],
    *,
    heads: HeadChoice | None = None,
    keep_fraction: float | int | None = None,
    budget: Budget | None = None,
    scores: HeadScores | Scorer | None = None,
    zero: bool = False,
    proof: Proof | None = PLAIN,
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[Path], str] | None = None,
) -> dict[str, Any]:
    """Remove heads of a checkpoint and write one that unmodified transformers loads; after an error no folder is left.

    One number in the config counts the heads of all layers, so each layer loses equally many. An encoder keeps a
    number for each layer, in a class that `headwise.hf` registers with transformers (see
    `headwise.plan.model.heads_by_layer`). Query heads that share a key-value head (GQA) go as whole groups, or equally
    many of each group.

    Args:
        source: An open checkpoint, as `headwise.hf.checkpoint` opens it; it is only read.
        destination: The folder to write; it must not exist.
        heads: The heads to remove: ``"0.1,3.7"`` (layer 0 head 1, layer 3 head 7), ``{0: [1], 3: [7]}``, or pairs. In
            an encoder-decoder the layers are ``encoder.0``, ``0`` (the decoder's self-attention) and ``cross.0``. With
            `scores`, further heads are removed if all layers need the same number.
        keep_fraction: The fraction of the heads of each layer that stays; the nearest possible number is taken.
        budget: The limit for the bytes of weights and cache.
        scores: A score for each head, {(layer, head): number}, or a function of the layers that returns it, such as
            `random_scores()`. The heads with the lowest scores are removed.
        zero: Write 0 where o_proj reads these heads, instead of removing them: any heads, any architecture, the same
            size and speed.
        proof: Settings of the proof that runs before the folder gets its name; None for no proof.
        progress: Called with the bytes done and the total bytes.
        remark: Called with the folder after the proof, before it gets its name; its text is appended to RESHAPE.md.

    Returns:
        The changes and the proof, as plain data; RESHAPE.md in the folder states the same. `heads-plan.json` in the
        folder lists the heads that stayed, as `headwise plan` and `headwise look --against` read it.

    Raises:
        TypeError, ValueError, OSError: in one line, what is wrong; then nothing has been written.

    Example:
        >>> import tempfile, headwise.hf, headwise.models
        >>> from headwise import reshape
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
        ...         scores = reshape.random_scores()
        ...         facts = reshape.prune(opened, f"{folder}/new", keep_fraction=0.5, scores=scores, proof=None)
        >>> facts["counts"]
        {'num_attention_heads': [8, 4]}
    """
    check_writing(destination, proof, progress=progress, remark=remark)
    plan = plan_prune(source, heads=heads, keep_fraction=keep_fraction, budget=budget, scores=scores, zero=zero)
    return write_pruned(plan, destination, proof=proof, progress=progress, remark=remark)


def write_pruned(
    plan: Pruning,
    destination: str | os.PathLike[str],
    *,
    proof: Proof | None = PLAIN,
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[Path], str] | None = None,
) -> dict[str, Any]:
    """Write a plan of `plan_prune` or of `reconstruct`; arguments, result and errors are those of `prune`."""
    check_kind(Pruning, "plan_prune", plan=plan)
    check_writing(destination, proof, progress=progress, remark=remark)
    source, facts = plan.source, plan.facts()
    note = {README: readme("Zeroed heads", ZEROED)} if plan.zero else {PLAN: as_json(plan.heads_plan())}
    if not plan.zero and base_type(plan.target.model_type):
        note[README] = readme("Heads pruned", BY_LAYER)
    write(
        destination,
        config=plan.target.config,
        tensors=plan.tensors(),
        source=source,
        extra=note,
        check=proved(facts, source, proof, plan.gates(), same=not plan.solved, remark=remark),
        progress=progress,
    )
    return facts
