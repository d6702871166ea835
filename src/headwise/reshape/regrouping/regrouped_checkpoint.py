"""Regroup a checkpoint: merge its key-value heads, write the folder, and prove it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...shapes.arguments import check_counts
from ..arguments import check_groups_by_layer, check_kind, check_models, check_rows, check_told, check_writing
from ..layout.families import CheckpointLayout, Layer, check_shapes, family_of
from ..layout.head_axes import KeptHeads
from ..layout.head_weights import HeadWeights
from ..layout.layer_weights import head_weights, layer_tensors
from ..layout.protocol import ReshapableCheckpoint, check_source, check_unpruned
from ..layout.target_class import Target, target
from ..pruning.budget import size_facts
from ..pruning.pruned_checkpoint import as_stored
from ..repair.calibration import family_in_memory, read_moments
from ..repair.paired_models import batches_of
from ..write.readme import PLAN, proved
from ..write.shards import as_json
from ..write.verify import PLAIN, Proof
from ..write.writer import Planned, kept, write
from .merge import METHODS, Merge, Method, check_method, merge

OnLayer = Callable[[str, int, int], None] | None


@dataclass(frozen=True)
class Regrouping:
    """A plan to regroup a checkpoint; nothing is written yet.

    Attributes:
        source: The checkpoint.
        family: Its architecture and layers.
        num_kv_heads: The number of key-value heads that are left.
        method: The method of `merge`.
        merges: The heads that share, and their maps, by layer.
        target: The class that loads the result, and its config.
        reconstructed: The weights that replace the merged ones, by layer (see `headwise.reshape.reconstruct`).
        measured: Losses and errors of the reconstruction, as plain data.
    """

    source: ReshapableCheckpoint
    family: CheckpointLayout
    num_kv_heads: int
    method: Method
    merges: Mapping[str, Merge]
    target: Target
    reconstructed: Mapping[str, Mapping[str, Tensor]]
    measured: Mapping[str, Any]

    def tensors(self) -> list[Planned]:
        """Return every tensor of the result; all tensors of a layer are computed when its first one is needed."""
        layer_of = {name: layer for layer in self.family.layers for name in layer.tensors}
        maker = _Maker(self)
        made = []
        for name in self.source.tensors:
            planned = kept(self.source, name)
            if name in layer_of:
                planned = maker.planned(planned, layer_of[name])
            made.append(as_stored(planned, self.target))
        return made

    def heads_plan(self) -> dict[str, Any]:
        """Return, by layer, the new order of the query heads if it changed, and the number of key-value heads."""
        layers: dict[str, Any] = {}
        for layer in self.family.layers:
            sizes = layer.sizes
            heads = list(self.merges[layer.key].heads(sizes.H // sizes.K))
            moved = {"keep": heads} if heads != sorted(heads) else {}
            layers[layer.key] = moved | {"kv_heads": self.num_kv_heads}
        return {"layers": layers}

    def facts(self, context: int = 8192) -> dict[str, Any]:
        """Return the changes as plain data: heads, sizes, class, losses, and `headwise.plan`'s counts at `context`."""
        sizes = self.family.layers[0].sizes
        field = self.family.field_name(next(iter(self.family.counts)))
        notes = [f"{sizes.K} key-value heads became {self.num_kv_heads} in each layer: {METHODS[self.method]}."]
        if self.target.why:
            notes.append(f"written as {self.target.model_type}, which computes the same: {self.target.why}")
        notes.append("lost: what the shared keys and values cannot give of the former, as a share of their squares")
        layers = [
            (key, " ".join("+".join(map(str, group)) for group in one.groups), *(f"{lost:.3f}" for lost in one.lost))
            for key, one in self.merges.items()
        ]
        tables = [(("layer", "heads that share", "keys lost", "values lost"), layers), *_errors(self.measured)]
        return {
            "done": "Heads regrouped",
            "notes": notes,
            "gone": {},
            "tables": tables,
            "groups": {key: one.groups for key, one in self.merges.items()},
            "lost": {key: one.lost for key, one in self.merges.items()},
            "method": self.method,
            **self.measured,
            "counts": {field: [sizes.H, sizes.H], "num_key_value_heads": [sizes.K, self.num_kv_heads]},
            **size_facts(self.source, self.family, self.target, self.tensors(), context),
        }


class _Maker:
    """A cache of one layer's new tensors, kept until another layer's are needed."""

    def __init__(self, plan: Regrouping) -> None:
        self.plan = plan
        self.key, self.made = "", dict[str, Tensor]()

    def planned(self, before: Planned, layer: Layer) -> Planned:
        sizes = layer.sizes
        left = KeptHeads(tuple(range(sizes.H)), tuple(range(self.plan.num_kv_heads)))
        shape = layer.tensors[before.name].shape(before.shape, sizes, left)
        return Planned(before.name, before.dtype, shape, lambda: self.of(layer)[before.name].to(before.dtype))

    def of(self, layer: Layer) -> dict[str, Tensor]:
        if self.key != layer.key:
            self.key, self.made = "", {}
            plan = self.plan
            weights = read_weights(plan.source, plan.family, layer)
            merged = plan.merges[layer.key].apply(weights)
            anew = plan.reconstructed.get(layer.key, {})
            parts: dict[str, Any] = {name: part.to(merged.query) for name, part in anew.items()}
            merged = replace(merged, **parts)
            self.made = layer_tensors(plan.family, layer, merged, plan.source.read)
            self.key = layer.key
        return self.made


def read_weights(source: ReshapableCheckpoint, family: CheckpointLayout, layer: Layer) -> HeadWeights:
    """Return the weights of a layer of a checkpoint, in float32 or wider."""

    def read(name: str) -> Tensor:
        part = source.read(name)
        return part.to(torch.promote_types(part.dtype, torch.float32)) if part.is_floating_point() else part

    return head_weights(family, layer, read)


def plan_regroup(
    source: ReshapableCheckpoint,
    num_kv_heads: int,
    *,
    method: Method = "fitted",
    model: nn.Module | None = None,
    rows: Sequence[Tensor] = (),
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    seed: int = 0,
    progress: OnLayer = None,
) -> Regrouping:
    """Return the changes that `regroup` would make; write nothing. The arguments are those of `regroup`.

    Raises:
        TypeError, ValueError: in one line, what does not fit: an unknown architecture, or a number of heads that does
            not divide, or that no class of transformers loads.
    """
    check_source(source)
    check_counts(seed=seed)
    check_rows(rows, 0)
    check_told(progress=progress)
    if model is not None:
        check_models(model=model)
    family, goal = checked(source, num_kv_heads, method)
    check_groups_by_layer(groups, [layer.key for layer in family.layers])
    known = {}
    if rows and model is not None:
        text = batches_of(rows)[0] if len(rows) > 1 else rows  # keep the rows that `reconstruct` holds out unread
        tell = None if progress is None else lambda done, total: progress("reading the text", done, total)
        known = read_moments(model, family_in_memory(model, source.layouts), text, tell)
    merges = {}
    for n, layer in enumerate(family.layers):
        weights = read_weights(source, family, layer)
        wish: dict[str, Any] = {"method": method, "moments": known.get(layer.key), "seed": seed}
        some = None if groups is None else groups.get(layer.key)
        merges[layer.key] = merge(weights, num_kv_heads, groups=some, name=f"layer {layer.key}", **wish)
        if progress is not None:
            progress("choosing which heads share", n + 1, len(family.layers))
    return Regrouping(source, family, num_kv_heads, method, merges, goal, {}, {})


def checked(source: ReshapableCheckpoint, num_kv_heads: int, method: Method) -> tuple[CheckpointLayout, Target]:
    """Return the layers and the class that loads the result, without reading weights.

    Raises:
        TypeError, ValueError: as in `plan_regroup`.
    """
    check_counts(1, num_kv_heads=num_kv_heads)
    check_method(method)
    check_unpruned(source.config)
    family = family_of(source.config, source.tensors, source.layouts)
    check_shapes(family, {name: entry.shape for name, entry in source.tensors.items()})
    return family, _target(family, num_kv_heads)


def _target(family: CheckpointLayout, num_kv_heads: int) -> Target:
    """Return the class that loads the result; raise ValueError with the numbers that are possible."""
    counts = {}
    for field, layers in family.counts.items():
        sizes = layers[0].sizes
        if family.is_latent or sizes.K % num_kv_heads:
            divisors = ", ".join(str(n) for n in range(1, sizes.K + 1) if sizes.K % n == 0)
            why = (
                "keys and values come out of one small vector already"
                if family.is_latent
                else f"{sizes.K} key-value heads share {divisors} in equal groups; got num_kv_heads {num_kv_heads}"
            )
            raise ValueError(f"{family.model_type}: {why}")
        counts[field] = (sizes.H, num_kv_heads)
    return target(family, counts)


def _errors(measured: Mapping[str, Any]) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return the table of errors before and after a reconstruction, or no table without one."""
    if not measured:
        return []
    errors = [(name, *(f"{error:.4f}" for error in pair)) for name, pair in measured["errors"].items()]
    return [(("squared error of the attention's output", "regrouped", "recovered"), errors)]


def regroup(
    source: ReshapableCheckpoint,
    destination: str | os.PathLike[str],
    num_kv_heads: int,
    *,
    method: Method = "fitted",
    model: nn.Module | None = None,
    rows: Sequence[Tensor] = (),
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    seed: int = 0,
    proof: Proof | None = PLAIN,
    progress: OnLayer = None,
) -> dict[str, Any]:
    """Merge groups of key-value heads of a checkpoint, and write a checkpoint that unmodified transformers loads.

    Multi-head attention becomes grouped-query or multi-query, and the cache shrinks in proportion. After an error no
    folder is left.

    Args:
        source: An open checkpoint, as `headwise.hf.checkpoint` opens it; it is only read.
        destination: The folder to write; it must not exist.
        num_kv_heads: The number of key-value heads left in each layer, a divisor of the present number.
        method: "first", "mean", "aligned" or "fitted", as in `merge`.
        model: The same model, loaded in float32, to read text.
        rows: Text as ids (B, T), each a batch without padding; every fifth is held out. Without text, heads are
            compared by their weights alone.
        groups: The heads that share, by layer; by default as in `merge`.
        seed: Seed of the search for groups.
        proof: Settings of the proof that runs before the folder gets its name; None for no proof.
        progress: Called as ``progress(what, done, total)``.

    Returns:
        The changes and the measurements, as plain data; RESHAPE.md in the folder states the same. `heads-plan.json` in
        the folder has the new order of the query heads, as `headwise plan` and `headwise look --against` read it.

    Raises:
        TypeError, ValueError, OSError: in one line, what is wrong; then nothing has been written.
    """
    check_writing(destination, proof, progress=progress)
    check_rows(rows, 0)
    plan = plan_regroup(
        source, num_kv_heads, method=method, model=model, rows=rows, groups=groups, seed=seed, progress=progress
    )
    return write_regrouped(plan, destination, proof=proof, progress=progress)


def write_regrouped(
    plan: Regrouping,
    destination: str | os.PathLike[str],
    *,
    proof: Proof | None = PLAIN,
    progress: OnLayer = None,
    remark: Callable[[Path], str] | None = None,
) -> dict[str, Any]:
    """Write a plan of `plan_regroup` or of `reconstruct`; result and errors are those of `regroup`.

    Args:
        plan: The plan.
        destination: The folder to write; it must not exist.
        proof: Settings of the proof that runs before the folder gets its name; None for no proof.
        progress: Called as ``progress("writing", done, total)``.
        remark: Called with the folder after the proof, before it gets its name; its text is appended to RESHAPE.md.
    """
    check_kind(Regrouping, "plan_regroup", plan=plan)
    check_writing(destination, proof, progress=progress, remark=remark)
    facts = plan.facts()
    write(
        destination,
        config=plan.target.config,
        tensors=plan.tensors(),
        source=plan.source,
        extra={PLAN: as_json(plan.heads_plan())},
        check=proved(facts, plan.source, proof, remark=remark),
        progress=None if progress is None else lambda done, total: progress("writing", done, total),
    )
    return facts
