"""Checkpoints with ``pruned_heads`` in their config, which transformers 5 no longer reads, become ones that load.

Up to transformers 4 a pruned layer kept smaller matrices than its config said, and ``pruned_heads`` told which heads
were missing. Where all layers lost as many and a class loads that, the config is rewritten; else the missing heads come
back as zeros, which compute the same at the size of the original.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from . import choose
from .arguments import check_writing
from .axes import KeptHeads, TensorRuns
from .classes import refusal
from .layout import Family, Layer, family_of, with_heads
from .proof import PLAIN, Proof, planned
from .prune import Known, changed
from .report import README, proved, readme
from .select import bytes_of, counts_of
from .source import CheckpointSource, check_source, pruned_heads
from .write import Planned, kept, write

FILLED = (
    "Heads that had been pruned came back as zeros, for no class of transformers has layers of such sizes: the outputs "
    "are those of the pruned model, size and speed those of the model before it was pruned."
)


@dataclass(frozen=True)
class Migration:
    """What migrating a checkpoint would change.

    Attributes:
        source: The checkpoint.
        family: Its architecture and layers, as large as its config says.
        kept: The heads that each layer has.
        config: The new config.json.
        filled: Whether missing heads come back as zeros.
    """

    source: CheckpointSource
    family: Family
    kept: Mapping[str, KeptHeads]
    config: Mapping[str, Any]
    filled: bool

    def tensors(self) -> list[Planned]:
        """Every tensor of the result."""
        where = {name: (layer, form) for layer in self.family.layers for name, form in layer.tensors.items()}
        return [self._tensor(kept(self.source, name), *where.get(name, (None, None))) for name in self.source.tensors]

    def facts(self, context: int = 8192) -> dict[str, Any]:
        """What changes, as plain data."""
        gone = {
            layer.key: sorted(set(range(layer.sizes.H)) - set(self.kept[layer.key].query))
            for layer in self.family.layers
        }
        first = {field: layers[0] for field, layers in self.family.counts.items()}
        left = f"pruned_heads in config.json counted {sum(map(len, gone.values()))} heads out"
        return {
            "done": "An old pruned checkpoint, migrated",
            "change": "zeroed" if self.filled else "missing",
            "notes": [left, FILLED if self.filled else "every layer lost as many, so the config counts what is left"],
            "gone": {key: heads for key, heads in gone.items() if heads},
            "counts": {
                self.family.field_name(field): [
                    layer.sizes.H,
                    layer.sizes.H if self.filled else len(self.kept[layer.key].query),
                ]
                for field, layer in first.items()
            },
            "model_type": [self.family.model_type] * 2,
            "weight_bytes": [bytes_of(self.source.tensors.values()), bytes_of(self.tensors())],
            "context": context,
            "plan": [None, planned(self.config, context)],
        }

    def _tensor(self, stored: Planned, layer: Layer | None, form: TensorRuns | None) -> Planned:
        if layer is None or form is None:
            return stored
        some, make = self.kept[layer.key], stored.make
        whole = form.fits(stored.shape, layer.sizes)
        if not self.filled:
            return changed(stored, form, layer.sizes, some, zero=False) if whole else stored
        if whole:
            return changed(stored, form, layer.sizes, some, zero=True)
        shape = form.full(stored.shape, layer.sizes)
        return replace(stored, shape=shape, make=lambda: form.spread(make(), layer.sizes, some))


def plan_migrate(source: Known) -> Migration:
    """What `migrate` would change.

    Raises:
        TypeError: source is no open checkpoint.
        ValueError: in one line: no ``pruned_heads``, such as do not fit the tensors, an architecture that is not known.
    """
    check_source(source)
    pruned = pruned_heads(source.config)
    if not pruned:
        raise ValueError(
            f"{source.folder}: config.json has no pruned_heads, so there is nothing to migrate; use the folder as it is"
        )
    config = {name: value for name, value in source.config.items() if name != "pruned_heads"}
    family = family_of(config, source.tensors, source.layouts)
    gone = choose.named(family, {str(layer): heads for layer, heads in pruned.items()})
    some = {layer.key: _kept(layer, gone[layer.key]) for layer in family.layers}
    for layer in family.layers:
        _check(source, layer, some[layer.key])
    filled = not _even(family, some)
    new = family.config if filled else with_heads(family, counts_of(family, some))
    return Migration(source, family, some, family.whole(new), filled)


def _kept(layer: Layer, gone: set[int]) -> KeptHeads:
    """The heads that a layer has; each had its own keys and values."""
    if layer.sizes.group != 1:
        raise ValueError(f"pruned_heads beside shared key-value heads (layer {layer.key}): no such checkpoint is known")
    heads = tuple(head for head in range(layer.sizes.H) if head not in gone)
    if not heads:
        raise ValueError(f"pruned_heads leaves layer {layer.key} none of its {layer.sizes.H} heads")
    return KeptHeads(heads, heads)


def _check(source: CheckpointSource, layer: Layer, some: KeptHeads) -> None:
    """Every tensor has the size of the heads that are left, or of all."""
    for name, form in layer.tensors.items():
        shape = source.tensors[name].shape
        if not form.fits(shape, some.sizes(layer.sizes)) and not form.fits(shape, layer.sizes):
            raise ValueError(
                f"{name} is {tuple(shape)}: neither of {layer.sizes.H} heads of {layer.sizes.D} numbers, nor of the "
                f"{len(some.query)} that pruned_heads leaves; config and weights do not belong together"
            )


def _even(family: Family, some: Mapping[str, KeptHeads]) -> bool:
    """Whether one config counts what is left, and the class itself loads it."""
    for layers in family.counts.values():
        if len({len(some[layer.key].query) for layer in layers}) > 1:
            return False
        for role in family.same_heads:
            if len({some[layer.key] for layer in layers if layer.role == role}) > 1:
                return False
    return not refusal(family, counts_of(family, some))


def migrate(
    source: Known,
    destination: str | os.PathLike[str],
    *,
    proof: Proof | None = PLAIN,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes an old checkpoint with ``pruned_heads`` as one that stock transformers loads: whole, or not at all.

    Args:
        source: What `headwise.hf.checkpoint` opens; it is only read.
        destination: The folder to write; it must not exist.
        proof: With what to prove that the result loads; None: unproved.
        progress: Called with the bytes done and the bytes in all.

    Returns:
        What changed and what was proved, as plain data; RESHAPE.md in the folder tells the same.

    Raises:
        TypeError, ValueError, OSError: in one line, what is wrong; then nothing was written.
    """
    check_writing(destination, proof, progress=progress)
    plan = plan_migrate(source)
    facts = plan.facts()
    prove = None if proof is None else partial(source.prove, request=proof.request(None), compare=False)
    note = {README: readme("A pruned model, with zeros for its missing heads", FILLED)} if plan.filled else {}
    write(
        destination,
        config=plan.config,
        tensors=plan.tensors(),
        source=source,
        extra=note,
        check=proved(facts, source, prove),
        progress=progress,
    )
    return facts
