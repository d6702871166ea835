"""Lookup of a config by file, folder, card, or hub name in the local cache."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files.hub_cache import cached_snapshot
from ..files.text import visible
from .config.fields import architectures
from .config.reader import parse
from .model.layer import Biases
from .model.model import Model, model_of
from .shape import AttentionShape, BiasOption

PLANNED = {"model_type", "attention_computations", "bytes_per_token", "contexts"}
"""Keys of `AttentionPlan.to_dict` that no config has."""
BIAS: dict[Biases, BiasOption] = {
    Biases(): False,
    Biases(q=True, k=True, v=True): "qkv",
    Biases(q=True, k=True, v=True, o=True): True,
}
"""The biases that `AttentionShape` can express."""


@functools.cache
def cards() -> dict[str, dict[str, Any]]:
    """Return the built-in cards by name, each with title, config and note.

    >>> sorted(cards()["gpt-3"])
    ['config', 'left_out', 'note', 'title']
    """
    return json.loads((Path(__file__).parent / "cards.json").read_bytes())


def known() -> dict[str, Any]:
    """Return what `of` supports: ``cards`` by name, and ``architectures``, the model_type of configs.

    >>> sorted(known()), len(known()["cards"]) > 50
    (['architectures', 'cards'], True)
    """
    return {"cards": cards(), "architectures": sorted(architectures())}


def read_config(config: Any) -> AttentionShape:
    """Return the attention shape that a config describes: its first self-attention layer (or first layer), with biases.

    Args:
        config: As in `headwise.plan.of`: a config.json, the folder that contains one, a card, a hub name in the local
            cache, a dict or a config object.

    Raises:
        TypeError: neither a name nor a config.
        ValueError: a one-line message that names the config: as for `headwise.plan.of`, or attention that has no such
            shape (latent attention, keys that are values, biases of single projections).

    Example:
        >>> read_config("gpt-3").num_heads
        96
        >>> read_config(cards()["gpt-3"]["config"]).head_dim
        128
    """
    name, model, _ = find_model(config)
    one = next((layer for layer in model.layers if layer.role == "self"), model.layers[0])
    whole = one.latent is None and one.shared_key is None
    if not whole or one.bias not in BIAS:
        what = "attention with biases on some of q_proj, k_proj and v_proj"
        if not whole:
            what = "latent attention" if one.latent is not None else "attention whose keys are its values"
        raise ValueError(f"{name!r}: {what} cannot be described by these sizes; give the sizes yourself")
    count = sum(layer.role == one.role for layer in model.layers)
    sizes = (one.d_model, one.num_heads, one.num_kv_heads, one.head_dim, one.value_dim)
    return AttentionShape(*sizes, BIAS[one.bias], count)


def find_model(what: Any) -> tuple[str, Model, dict[str, Any]]:
    """Return (name, model, card) of a file, a folder, a card, a name in the hub's cache, or a config.

    The disk is searched first, then the cards, then the cache; nothing is downloaded.

    Raises:
        ValueError: a one-line message: not found, a file that is not a config, a plan instead of a config, an unknown
            architecture, or a field that is not supported.
        TypeError: neither a name nor a config.
    """
    name, config, card = _find_config(what)
    if config.keys() >= PLANNED:  # the sizes of a plan have other names, so the defaults would be used for all
        raise ValueError(f"{name!r} is a plan, not a config; give the config of the model")
    try:
        return name, model_of(config, name, left_out=tuple(card.get("left_out", ()))), card
    except ValueError as wrong:
        raise ValueError(f"{name!r}: {wrong}") from None


def _find_config(what: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return (name, config, card); the config may be any JSON object."""
    if not isinstance(what, str | Path):
        config = what.to_dict() if hasattr(what, "to_dict") else what
        if not isinstance(config, Mapping):
            raise TypeError(
                f"a config is a path, a name, a dict or an object with to_dict(); got {type(what).__name__}"
            )
        return visible(str(config.get("model_type", "config")), limit=100), dict(config), {}
    if what == "":  # Path("") would be the current folder.
        raise ValueError("the config's name is empty; give a config.json, a checkpoint folder, a card or a hub name")
    if "\0" not in str(what) and os.path.lexists(what):
        path = Path(what)
        path = path / "config.json" if path.is_dir() else path
        own = (path.parent.name or str(what)) if path.name == "config.json" else path.stem
        return visible(own, limit=100), _read(path), {}
    name = str(what)
    card = cards().get(name.lower())
    if card is not None:
        return name.lower(), card["config"], card
    cached = cached_snapshot(name)
    if cached is not None:
        return name, _read(cached / "config.json"), {}
    near = _near(name)
    hint = f"cards like it: {', '.join(near)}" if near else "headwise plan --list shows the cards"
    raise ValueError(
        f"'{visible(name, limit=100)}': no such file or folder, no card and no model in the hub's local cache; {hint}"
    )


def _near(name: str) -> list[str]:
    """Return similar card names: those with nearly the same spelling, or of the family whose name it starts with."""
    own = name.lower().rstrip("/").rpartition("/")[2][:80]
    plain = {card: re.sub(r"[-_.]", "", card) for card in cards()}
    stem = re.sub(r"[-_.]", "", own)
    family = [card for card, letters in plain.items() if len(stem) > 1 and letters.startswith(stem)]
    alike = difflib.get_close_matches(own, cards(), n=3, cutoff=0.65)
    return list(dict.fromkeys([*alike, *family]))[:3]


def _read(path: Path) -> dict[str, Any]:
    try:
        return parse(path)
    except ValueError as wrong:
        raise ValueError(f"{str(path)!r}: {wrong}") from None
