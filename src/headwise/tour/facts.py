"""Facts that the page cites: shapes of well-known models, reference losses, training curves. No torch is imported."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def read_json(name: str) -> Any:
    """Return one of this folder's JSON files."""
    return json.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def cards() -> list[dict[str, Any]]:
    """Return the attention of well-known models, by `headwise.plan`: a row for each card in ``facts.json``.

    >>> row = next(row for row in cards() if row["heads"] == 32 and row["kv"] == 8)
    >>> row["attention_layer"], row["group"]
    (41943040, 4)
    """
    from headwise import plan

    rows = []
    for name, label in read_json("facts.json")["cards"]:
        planned = plan.of(name, context=[8192]).to_dict()
        layer = planned["layers"][0]
        latent = layer["latent"] is not None
        rows.append(
            {
                "name": label,
                "kind": planned["kind"],
                "d_model": layer["d_model"],
                "layers": len(planned["layers"]),
                "heads": layer["num_heads"],
                "kv": layer["num_kv_heads"],
                "d_k": layer["head_dim"],
                "group": None if latent else layer["num_heads"] // layer["num_kv_heads"],
                "attention_layer": sum(layer["parameters"].values()),
                "parameters": planned["parameters"],
                "share": planned["attention_share"],
                "cache": planned["bytes_per_token"],
            }
        )
    return rows


def formation(curve: dict[str, Any] | None) -> list[list[float]]:
    """Return step, held-out loss and the best heads' previous-token and induction scores from the training curve."""
    keys = ("step", "held_out_loss", "previous", "induction")
    return [
        [point[key] for key in keys] for point in (curve or {}).get("curve", []) if all(key in point for key in keys)
    ]
