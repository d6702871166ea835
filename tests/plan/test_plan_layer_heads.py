"""Heads that a config gives to single layers: counted where all full layers have the same, refused everywhere else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headwise import plan

pytestmark = pytest.mark.unchecked
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 5, "intermediate_size": 32, "vocab_size": 50,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
FULL = [kind == "full_attention" for kind in GEMMA["layer_types"]]
ENTRIES: list[Any] = [
    {"head_dim": 64},
    {"head_dim": 48},
    {"num_key_value_heads": 2},
    {"head_dim": 64, "num_key_value_heads": 2},
]


def expected(entries: dict[str, Any]) -> list[tuple[int, int]] | None:
    """Key-value heads and head dim of each layer; None where the config must be refused."""
    own = [entries.get(str(n)) for n in range(len(FULL))]
    full = [entry for entry, is_full in zip(own, FULL, strict=True) if is_full]
    if any(entry for entry, is_full in zip(own, FULL, strict=True) if not is_full):
        return None
    if full[0] is None or any(
        entry != full[0] or not {*entry} <= {"head_dim", "num_key_value_heads"} for entry in full
    ):
        return None
    heads = full[0].get("num_key_value_heads", 4), full[0].get("head_dim", 16)
    return [heads if is_full else (4, 16) for is_full in FULL]


@pytest.mark.parametrize("seed", range(4))
def test_heads_of_single_layers(seed: int) -> None:
    make, taken = random.Random(seed), 0
    for number in range(60):
        entry = make.choice(ENTRIES)
        entries = {"1": entry, "3": dict(entry)}
        if number % 3 == 0:
            entries[str(make.randrange(4))] = make.choice([*ENTRIES, {}, {"head_dim": 64, "sliding_window": 3}])
        if number % 3 == 1 and make.random() < 0.4:
            del entries[make.choice(["1", "3"])]
        wanted = expected(entries)
        config = {**GEMMA, "per_layer_config": entries}
        if wanted is None:
            with pytest.raises(ValueError, match="per_layer_config gives all layers without a window the same heads"):
                plan.of(config)
        else:
            layers = plan.of(config).model.layers
            assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == wanted, entries
            taken += 1
    assert 20 <= taken < 60
