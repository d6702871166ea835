"""A heads plan, as JSON: the heads to keep, or the number of key-value heads to merge into, for each layer.

    {"layers": {"0": {"keep": [0, 1, 5]}, "1": {"kv_heads": 2}, "*": {"keep": [0, 2, 1, 3], "kv_heads": 2}}}

``keep`` lists the query heads to keep; a key-value head is kept if one of its query heads is. ``kv_heads`` is the
number of key-value heads after merging groups of them; with ``keep`` it applies to the heads that are kept, in the
order in which they share. ``*`` stands for every other layer. In an encoder-decoder model, plain numbers are the
decoder's self-attention layers; the others are ``encoder.0`` and ``cross.0``. A table of position biases shared by
layers keeps one column for each head of the layer with the most heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..shape import short
from .layer import AttentionLayer
from .model import Model
from .parts import BIASES, Part, table

OTHERS = "*"


def apply_heads(model: Model, plan: Mapping[str, Any]) -> Model:
    """Return the model after the heads plan.

    Raises:
        ValueError: a one-line message for a plan that does not fit the model: a missing layer or head, groups that are
            not divisible, or other keys than ``keep`` and ``kv_heads``.
    """
    entries = plan.get("layers")
    if set(plan) != {"layers"} or not isinstance(entries, Mapping) or not entries:
        raise ValueError('a heads plan is {"layers": {"0": {"keep": [0, 1]}, "1": {"kv_heads": 2}}}')
    alone = model.is_encoder  # there is only one kind of attention layer
    keys = [
        str(layer.index) if alone or layer.role == "self" else f"{layer.role}.{layer.index}" for layer in model.layers
    ]
    for key in entries:
        if key != OTHERS and key not in keys:
            raise ValueError(f"heads plan: there is no layer {short(key)}; the layers are {keys[0]} to {keys[-1]}")
    changed = []
    for key, layer in zip(keys, model.layers, strict=True):
        entry = entries.get(key, entries.get(OTHERS))
        try:
            changed.append(layer if entry is None else _changed(layer, entry))
        except ValueError as wrong:
            raise ValueError(f"heads plan: layer {key}: {wrong}") from None
    if any(layer.keys_of is not None for layer in changed) and tuple(changed) != model.layers:
        raise ValueError("heads plan: in this model layers read the keys of other layers, so their heads cannot change")
    if any(layer.shared for layer in changed) and len({(one.num_heads, one.num_kv_heads) for one in changed}) > 1:
        raise ValueError(
            f"heads plan: all layers of this architecture share their weights, and so their heads; use {OTHERS!r}"
        )
    return replace(model, layers=tuple(changed), others=tuple(_others(model, changed)))


def _others(model: Model, changed: Sequence[AttentionLayer]) -> Iterator[Part]:
    """Yield the parts except attention; a table of position biases that layers share has one column per head."""
    heads = {"encoder": [0], "decoder": [0]}
    for layer in changed:
        if layer.role != "cross":
            heads["encoder" if layer.role == "encoder" else "decoder"].append(layer.num_heads)
    before = {layer.role: layer.num_heads for layer in model.layers}
    for part in model.others:
        if part.name == BIASES:
            rows = part.parameters // before["encoder" if part.stream == "encoder" else "self"]
            part = table(part.name, rows, max(heads[part.stream]), stream=part.stream)
        yield part


def _changed(layer: AttentionLayer, entry: object) -> AttentionLayer:
    if not isinstance(entry, Mapping) or not entry or not set(entry) <= {"keep", "kv_heads"}:
        raise ValueError(f"give keep, kv_heads or both; got {short(entry)}")
    if "keep" in entry:
        layer = kept(layer, entry["keep"])
    return regrouped(layer, entry["kv_heads"]) if "kv_heads" in entry else layer


def kept(layer: AttentionLayer, heads: object) -> AttentionLayer:
    """Return the layer with only these query heads and the key-value heads that they read (head h reads h // G).

    Example:
        >>> layer = AttentionLayer("self", 0, 64, 8, 4, 8, 8)
        >>> pruned = kept(layer, [0, 1, 3])
        >>> pruned.num_heads, pruned.num_kv_heads
        (3, 2)
    """
    whole = isinstance(heads, list) and all(type(head) is int and 0 <= head < layer.num_heads for head in heads)
    if not isinstance(heads, list) or not whole or not heads or len(set(heads)) != len(heads):
        raise ValueError(
            f"keep is a list of distinct heads from 0 to {layer.num_heads - 1}, at least one; got {short(heads)}"
        )
    if layer.out_width is not None or layer.sub_norm:
        raise ValueError("in this architecture the input of o_proj is as wide as the model, so no head can be removed")
    group = layer.num_heads // layer.num_kv_heads
    return replace(layer, num_heads=len(heads), num_kv_heads=len({head // group for head in heads}))


def regrouped(layer: AttentionLayer, kv_heads: object) -> AttentionLayer:
    """Return the layer with its key-value heads merged into fewer heads, in groups of equal size."""
    if layer.latent is not None:
        raise ValueError("latent attention has no key-value heads to merge")
    if type(kv_heads) is not int or not 1 <= kv_heads <= layer.num_kv_heads or layer.num_kv_heads % kv_heads:
        raise ValueError(f"kv_heads divides the number of key-value heads, {layer.num_kv_heads}; got {short(kv_heads)}")
    return replace(layer, num_kv_heads=kv_heads)
