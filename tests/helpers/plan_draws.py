"""What random configs draw: ranges of sizes, and the fields of indexers, shared keys, blocks and layer inputs."""

from __future__ import annotations

import random
from typing import Any

NO_DEFAULT = ("granitemoehybrid", "lfm2_moe")  # without a list of kinds no layer has attention

RANGES = {
    "vocab_size": (30, 99),
    "max_position_embeddings": (24, 40),
    "max_target_positions": (24, 40),
    "encoder_layers": (1, 3),
    "decoder_layers": (1, 3),
    "n_routed_experts": (2, 6),
    "num_experts": (2, 6),
    "num_local_experts": (2, 6),
    "relative_attention_num_buckets": (32, 40),
    "first_k_dense_replace": (0, 3),
    "decoder_sparse_step": (1, 3),
    "sliding_window_pattern": (2, 4),
    "global_attn_every_n_layers": (2, 4),
    "sliding_window": (2, 9),
    "attention_chunk_size": (2, 9),
    "interleave_moe_layer_step": (1, 3),
    "no_rope_layer_interval": (2, 4),
    "local_attention": (2, 9),
}


def values(field: str, about: dict[str, Any], sizes: dict[str, int], dice: random.Random) -> dict[str, Any]:
    """The value of a field by its name, if it is one of these."""
    layers, heads = sizes["layers"], sizes["heads"]
    drawn: dict[str, Any] = {
        "layers_block_type": lambda: dice.sample(
            ["full_attention", *dice.choices(["full_attention", "linear_attention", "mlp", "moe"], k=3)], k=4
        ),
        "mlp_layer_types": lambda: dice.choice([None, dice.choices(["dense", "sparse"], k=layers)]),
        "indexer_types": lambda: dice.choice([None, ["full", *dice.choices(["full", "shared"], k=layers - 1)]]),
        "index_topk_freq": lambda: dice.randint(1, 3),
        "index_skip_topk_offset": lambda: dice.randint(1, 3),
        "index_topk": lambda: dice.randint(2, 9),
        "index_head_dim": lambda: dice.choice([10, 12, 14]),
        "index_n_heads": lambda: dice.randint(2, 4),
        "global_head_dim": lambda: sizes["step"] * dice.randint(1, 5),
        "num_global_key_value_heads": lambda: dice.choice([None, *[k for k in range(1, heads + 1) if heads % k == 0]]),
        "num_kv_shared_layers": lambda: dice.randint(0, layers - 1),
        "hidden_size_per_layer_input": lambda: dice.choice([0, 5, 7] if "full_layers" in about else [5, 7]),
        "vocab_size_per_layer_input": lambda: dice.randint(99, 120),
        "top_k_experts": lambda: dice.randint(1, 2),
        "num_experts_per_token": lambda: dice.randint(1, 2),
        "altup_num_inputs": lambda: dice.randint(2, 4),
        "mamba_num_heads": lambda: dice.choice([2, 4]),
        "mamba_head_dim": lambda: dice.choice([2, 3, 5]),
        "n_groups": lambda: dice.choice([1, 2]),
        "conv_kernel": lambda: dice.randint(2, 5),
        "moe_latent_size": lambda: dice.choice([None, 6, 11]),
    }
    if "shared_key" in about:
        kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
        drawn |= {
            "layer_types": lambda: dice.choice([None, dice.choices(kinds, k=layers)]),
            "compress_rates": lambda: dict(zip(kinds[1:], (dice.randint(2, 4), dice.randint(3, 6)), strict=True)),
            "num_key_value_heads": lambda: 1,
            "head_dim": lambda: dice.choice([8, 12, 16, 20]),
            "o_groups": lambda: dice.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        }
    return {field: drawn[field]()} if field in drawn else {}


def possible(name: str, about: dict[str, Any], config: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """The config with what transformers cannot build put right: kinds of layers that must occur, or come earlier."""
    layers, kinds = config.get("num_hidden_layers", 0), config.get("layer_types")
    if name in NO_DEFAULT and kinds is None:
        kinds = config["layer_types"] = ["full_attention"] * layers
    if name == "olmo_hybrid":
        config["num_hidden_layers"] = layers = max(2, layers)
        if kinds is not None:
            config["layer_types"] = ["linear_attention", *["full_attention"] * (layers - 1)]
    if name == "kimi_linear" and kinds is None and layers < 5:
        config["layer_types"] = ["full_attention"] * layers
    if "shared_key" in about:
        config["partial_rotary_factor"] = 0.5
    if about.get("inner_by_layer") and dice.random() < 0.5:
        config["intermediate_size"] = [dice.randint(2, 30) for _ in range(layers)]
    if not config.get("hidden_size_per_layer_input", 1):  # transformers slices these inputs where keys are shared
        config["num_kv_shared_layers"] = 0
    if config.get("num_kv_shared_layers"):
        kinds = kinds or [
            "full_attention" if (i + 1) % about["windows"]["every"] == 0 else "sliding_attention" for i in range(layers)
        ]
        if about["windows"].get("last_full"):
            kinds = [*kinds[:-1], "full_attention"]
        while config["num_kv_shared_layers"] and set(kinds[: layers - config["num_kv_shared_layers"]]) != set(kinds):
            config["num_kv_shared_layers"] -= 1
    return config
