"""The parts of a model on one of the ranks that share its heads and widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..model.layer import AttentionLayer
from ..model.model import Model
from ..model.parts import Part

WHOLE = {"router", "shared_gate"}  # parts of the feed-forward layers that every rank has


def local(layer: AttentionLayer, tensor: int) -> AttentionLayer:
    """Return the layer on one tensor rank: its share of the heads, and at least one key-value head."""
    out = None if layer.out_width is None else layer.out_width // tensor
    kv_heads = max(1, layer.num_kv_heads // tensor)
    return replace(layer, num_heads=layer.num_heads // tensor, num_kv_heads=kv_heads, out_width=out)


def parts_of(model: Model, tensor: int) -> Iterator[tuple[Part, Part]]:
    """Yield each part on one tensor rank and the whole part; attention, feed-forward, (un)embedding are split.

    If the number of ranks does not divide the key-value heads, each rank has their full projections but computes only
    its own heads.
    """
    for layer in model.layers:
        for part, whole in zip(local(layer, tensor).parts(), layer.parts(), strict=True):
            on_all = layer.num_kv_heads % tensor and layer.latent is None and part.name in ("k_proj", "v_proj")
            yield replace(part, parameters=whole.parameters) if on_all else part, whole
    for part in [*model.others, *(part for state in model.states for part in state.parts())]:
        yield _share(part, tensor), part
    for tower in model.towers:
        yield from ((part, part) for part in tower.parts())


def _share(part: Part, tensor: int) -> Part:
    if part.name in ("embeddings", "lm_head"):
        return _divided(part, tensor, 0)
    if part.room == "mlp" and part.name not in WHOLE and part.matrices:
        inside = sum(inputs * outputs * copies for inputs, outputs, copies in part.matrices)
        return _divided(part, tensor, part.parameters - inside)
    return part


def _divided(part: Part, tensor: int, whole: int) -> Part:
    """Return the part with its numbers divided, rounded up; `whole` of its parameters (biases) are on every rank."""

    def share(number: int) -> int:
        return -(-number // tensor)

    return replace(
        part,
        parameters=share(part.parameters - whole) + whole if part.parameters else 0,
        macs=share(part.macs),
        active=share(part.active),
    )


def rank_bytes(model: Model, part: Part, whole: Part) -> int:
    """Return the bytes of a part on a rank: its share of the bytes of the whole part, packed or not."""
    if not whole.parameters:
        return 0
    return -(-model.part_bytes(whole) * part.parameters // whole.parameters)
