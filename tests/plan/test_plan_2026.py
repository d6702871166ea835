"""Models of 2026: figures found in public, the experts that a batch reads, sparse attention, and shared keys."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_models import build, config_of, parameters_of, random_config

from headwise import plan
from headwise.plan.config.fields import architectures
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import model_of
from headwise.plan.model.parts import distinct_experts
from headwise.plan.model.sparse import Compressor, Indexer

pytestmark = pytest.mark.unchecked
NEW = (
    "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
    "minimax_m2", "glm_moe_dsa", "deepseek_v32", "kimi_linear", "kimi_k25", "nemotron_h", "granitemoehybrid",
    "deepseek_v4", "lfm2_moe", "olmo_hybrid", "glm4_moe_lite", "mistral4", "solar_open", "exaone_moe",
)  # fmt: skip


def test_at_least_fifteen_types_are_known() -> None:
    assert set(NEW) <= set(architectures()) and len(NEW) >= 15


# --- figures found in public ------------------------------------------------------------------------------------------


def test_qwen_3_6_27b_holds_16384_mib_at_262144() -> None:
    """As engines report it: 16 layers of 64, 4 key-value heads of 256. The states of the other 48 are apart."""
    cost = plan.of("qwen3.6-27b", context=262144).contexts[0]
    assert cost.cache_bytes == 16384 * 2**20
    assert cost.state_bytes == 48 * (48 * 128 * 128 * 4 + (2 * 16 + 48) * 128 * 4 * 2)


def test_gemma_4_26b_holds_3_00_gb_at_128k() -> None:
    """As llama.cpp allocates it: a window's layers get the window and one batch of 512 tokens more."""
    found = plan.of("gemma-4-26b-a4b", context=131072)
    model = found.model
    full = replace(model, layers=tuple(layer for layer in model.layers if layer.window is None))
    wider = tuple(replace(layer, window=1024 + 512) for layer in model.layers if layer.window is not None)
    assert (len(full.layers), len(wider)) == (5, 25)
    allocated = sum(costs.cache_bytes(replace(model, layers=layers), 131072, 2) for layers in (full.layers, wider))
    assert f"{allocated / 1e9:.2f}" == "3.00"
    assert found.contexts[0].cache_bytes == allocated - 25 * 512 * 2 * 8 * 256 * 2
    assert round(found.parameters()["total"] / 1e9, 1) == 25.2  # its model card


def test_kimi_linear_and_deepseek_v32_have_the_sizes_of_their_names() -> None:
    assert plan.of("kimi-linear-48b-a3b").parameters()["total"] // 10**9 == 49
    v3, v32 = (plan.of(name).parameters() for name in ("deepseek-v3", "deepseek-v3.2"))
    assert v32["total"] - v3["total"] == 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)


# --- the experts of a batch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "used", "tokens"), [(7, 2, 1), (7, 2, 5), (11, 3, 4), (5, 5, 3), (256, 8, 31)])
def test_distinct_experts_are_those_of_many_draws(experts: int, used: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(1)
    chosen = torch.rand(4000, tokens, experts, generator=draw).topk(used).indices.flatten(1)
    seen = torch.zeros(4000, experts).scatter_(1, chosen, 1.0).sum(1)
    error = 5 * float(seen.std()) / 4000**0.5
    assert abs(float(seen.mean()) - distinct_experts(experts, used, tokens)) <= error + 1e-4


def test_deepseek_v3_at_batch_256_is_bound_by_its_weights() -> None:
    """Almost all 256 experts are read; with one token's 8 the cache would seem to bind from batch 256 on."""
    model = plan.of("deepseek-v3").model
    floors = {floor.batch: floor for floor in costs.floors(model, 8192, 2, bandwidth=1e12)}
    assert floors[256].binds == "weights" and round(floors[256].experts or 0, 1) == 255.9
    one, all_of_them = costs.weight_bytes_read(model), model.stored_bytes()
    cache = 256 * costs.cache_bytes(model, 8192, 2)
    assert one < cache < costs.weight_bytes_read(model, 256) < all_of_them
    experts = [part for part in model.others if part.name == "experts"]
    for batch in (2, 32):
        more = costs.weight_bytes_read(model, batch) - one
        share = (distinct_experts(256, 8, batch) - 8) / 256
        assert more == pytest.approx(share * sum(map(model.part_bytes, experts)), rel=1e-9)


def test_the_table_says_which_number_is_for_which_batch() -> None:
    text = str(plan.of("mixtral-8x7b", context=512, bandwidth="1TB/s"))
    rows = [line for line in text.splitlines() if "experts read" in line and "batch" in line]
    assert rows
    for batch in costs.BATCHES:
        number = f"{distinct_experts(8, 2, batch):.4g}"
        assert any(number in line and f"│ {batch:>5} " in line for line in text.splitlines()), batch
    assert "experts read" not in str(plan.of("llama-3-8b", context=512))


# --- sparse attention -------------------------------------------------------------------------------------------------


def test_an_indexer_has_its_own_cost() -> None:
    """By hand: index keys in the cache, scores over all earlier tokens, attention over the chosen ones."""
    context, top_k, layers = 131072, 2048, 61
    sparse, dense = (plan.of(name, context=context) for name in ("deepseek-v3.2", "deepseek-v3"))
    assert sparse.bytes_per_token - dense.bytes_per_token == layers * 128 * 2
    one, other = sparse.contexts[0], dense.contexts[0]
    assert one.decode is not None and other.decode is not None
    assert one.decode.indexer == 2 * layers * context * (64 * 128 + 64) and other.decode.indexer == 0
    assert one.decode.attention * context == other.decode.attention * top_k
    assert one.prefill.indexer == layers * context * (context + 1) * (64 * 128 + 64)
    read = costs.cache_bytes_read(sparse.model, context, 2)
    assert read == layers * 2 * (top_k * 576 + context * 128)
    assert costs.cache_bytes_read(dense.model, context, 2) == other.cache_bytes
    assert "indexers" in str(sparse) and "indexers" not in str(dense)


def test_a_layer_that_shares_the_chosen_keys_has_no_indexer() -> None:
    fields = random_config("glm_moe_dsa", random.Random(7), runs=True) | {
        "num_hidden_layers": 3,
        "mlp_layer_types": None,
    }
    sizes = [
        model_of({**fields, "indexer_types": kinds, "model_type": "glm_moe_dsa"})
        for kinds in (["full"] * 3, ["full", "shared", "full"])
    ]
    saved = costs.bytes_per_token(sizes[0], 2) - costs.bytes_per_token(sizes[1], 2)
    assert saved == 2 * fields["index_head_dim"]
    assert costs.prefill(sizes[1], 13).indexer * 3 == costs.prefill(sizes[0], 13).indexer * 2
    with pytest.raises(ValueError, match="no earlier layer to share with"):
        model_of({**fields, "indexer_types": ["shared", "full", "full"], "model_type": "glm_moe_dsa"})


# --- compressed keys --------------------------------------------------------------------------------------------------


def test_deepseek_v4_flash_has_the_size_of_its_model_card() -> None:
    found = plan.of("deepseek-v4-flash")
    assert round(found.parameters()["total"] / 1e9) == 284 and found.model.active_parameters() // 10**9 == 13


def test_compressed_keys_by_hand() -> None:
    """A window of 128, and one key for 4 tokens with its index key (20 layers) or one for 128 tokens (23 layers)."""
    context, dim, index = 2**20, 512, 128
    found = plan.of("deepseek-v4-flash", context=context)
    cost, model = found.contexts[0], found.model
    fours, many = context // 4, context // 128
    assert cost.cache_bytes == 2 * (43 * 128 * dim + 20 * fours * (dim + index) + 23 * many * dim)
    assert found.bytes_per_token == 2 * (43 * dim + 20 * (dim + index) // 4 + 23 * dim // 128)
    read = 43 * 128 * dim + 20 * (512 * dim + fours * index) + 23 * many * dim
    assert costs.cache_bytes_read(model, context, 2) == 2 * read
    assert cost.decode is not None
    assert cost.decode.attention == 2 * 64 * 2 * dim * (43 * 128 + 20 * 512 + 23 * many)
    assert cost.decode.indexer == 2 * 20 * fours * (64 * index + 64)
    text = str(found)
    assert "a key for 4 tokens" in text and "512 per query" in text and "all attended" in text
    plain = costs.as_kv_heads(model, 1)
    assert plain is not None and [layer.window for layer in plain.layers] == [None] * 43


def test_pairs_of_compressed_keys_are_those_of_a_loop() -> None:
    dice = random.Random(2)
    for _ in range(300):
        rate, top_k, first = dice.randint(1, 9), dice.randint(1, 6), dice.randint(0, 40)
        stop = first + dice.randint(0, 60)
        ends = [(i + 1) // rate for i in range(first, stop)]
        chooses = Compressor(rate, True, Indexer(2, 8, top_k))
        assert chooses.pairs(first, stop) == sum(min(top_k, n) for n in ends)
        assert chooses.pairs(first, stop, chosen=False) == Compressor(rate, False).pairs(first, stop) == sum(ends)
        assert [chooses.attended(n) for n in (stop, 99)] == [min(top_k, n // rate) for n in (stop, 99)]


def test_layers_of_older_configs() -> None:
    ours = [
        model_of({"model_type": "deepseek_v4", "num_hidden_layers": 3, **fields}).layers
        for fields in (
            {"compress_ratios": [0, 4, 128, 4], "compress_rate_csa": 5},
            {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
             "compress_rates": {"compressed_sparse_attention": 5, "heavily_compressed_attention": 128}},
        )
    ]  # fmt: skip
    assert ours[0] == ours[1]
    assert [layer.compressor and layer.compressor.rate for layer in ours[0]] == [None, 5, 128]


# --- keys of other layers ---------------------------------------------------------------------------------------------


def test_layers_without_keys_of_their_own_cache_nothing_and_read_those_of_others() -> None:
    model = model_of({"model_type": "gemma3n_text"})
    readers = [layer for layer in model.layers if layer.keys_of is not None]
    assert len(readers) == 15 and all(layer.cached_numbers() == 0 for layer in readers)
    for layer in readers:
        owner = model.layers[layer.keys_of or 0]
        assert owner.keys_of is None and owner.window == layer.window
        assert not {"k_proj", "v_proj"} & layer.parameter_counts().keys()
    assert costs.cache_bytes_read(model, 4096, 2) > costs.cache_bytes(model, 4096, 2)
    assert "read the cache of earlier layers" in str(plan.of({"model_type": "gemma3n_text"}))
    with pytest.raises(ValueError, match="layers read the keys of other layers"):
        plan.of({"model_type": "gemma3n_text"}, heads_plan={"layers": {"0": {"keep": [0, 1, 2, 3]}}})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "all read": ({"model_type": "gemma3n_text", "num_kv_shared_layers": 35}, "leaves none of 35 layers"),
    "no full layer before": (
        {"model_type": "gemma3n_text", "num_kv_shared_layers": 31},
        "no earlier layer has the keys",
    ),
    "other heads in some layers": (
        {"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": 64}}},
        "all layers without a window the same heads",
    ),
    "both ways": (
        {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
        "changes the model in a way that is not supported",
    ),
    "letters": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*X"},
        "hybrid_override_pattern has the letters",
    ),
    "no attention": ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M"}, "no layer has attention"),
    "a layer twice": (
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 2,
            "linear_attn_config": {"full_attn_layers": [1, 2], "kda_layers": [2]},
        },
        "names each of the layers 1 to 2 once",
    ),
    "an unknown rate": (
        {"model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [4, 8]},
        "compress_ratios has 0, 4 or 128 for each of 2 layers",
    ),
    "a rate that is a list": (
        {"model_type": "deepseek_v4", "num_hidden_layers": 1, "compress_ratios": [[4]]},
        "compress_ratios has 0, 4 or 128 for each of 1 layers",
    ),
    "a rate of no tokens": (
        {"model_type": "deepseek_v4", "compress_rates": {"compressed_sparse_attention": 0}},
        "a whole number from 1 to 1,000,000 for compressed_sparse_attention; got 0",
    ),
    "rates as a list": ({"model_type": "deepseek_v4", "compress_rates": [4]}, "compress_rates is an object"),
    "groups of heads": ({"model_type": "deepseek_v4", "o_groups": 7}, "o_groups = 7 does not divide"),
    "no window": ({"model_type": "deepseek_v4", "sliding_window": None}, "sliding_window is null"),
    "keys of more heads": (
        {"model_type": "deepseek_v4", "num_key_value_heads": 2},
        "changes the model in a way that is not supported",
    ),
    "small index heads": (
        {"model_type": "deepseek_v32", "index_head_dim": 32},
        "is less than qk_rope_head_dim",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_model_has_is_refused_in_one_line(name: str) -> None:
    config, message = WRONG[name]
    with pytest.raises(ValueError, match=message) as raised:
        plan.of(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4-flash", "gemma3n"])
def test_over_several_ranks_such_models_are_refused(name: str) -> None:
    config = name if "-" in name else {"model_type": "gemma3n_text"}
    with pytest.raises(ValueError, match="over several ranks"):
        plan.over(config, "50GB/s,2us", ranks=2)


# --- other spellings --------------------------------------------------------------------------------------------------


def test_older_spellings_are_read_as_transformers_reads_them() -> None:
    """Kinds by their older names, one letter per layer, and a part of the config counted from 1."""
    sizes = random_config("granitemoehybrid", random.Random(2)) | {"num_hidden_layers": 3}
    assert model_of({**sizes, "layer_types": ["mamba", "attention", "mamba"], "model_type": "granitemoehybrid"}) == (
        model_of(
            {
                **sizes,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "model_type": "granitemoehybrid",
            }
        )
    )
    blocks = random_config("nemotron_h", random.Random(2))
    del blocks["layers_block_type"]
    letters = model_of({**blocks, "hybrid_override_pattern": "ME*-", "model_type": "nemotron_h"})
    made = config_of("nemotron_h", {**blocks, "hybrid_override_pattern": "ME*-"})
    assert letters.total_parameters() == sum(p.numel() for p in build("nemotron_h", made).parameters())
    kimi = random_config("kimi_linear", random.Random(2)) | {"num_hidden_layers": 3, "layer_types": None}
    kimi |= {"mlp_layer_types": None}
    inside = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 6, "num_heads": 5, "short_conv_kernel_size": 3}
    found = model_of({**kimi, "linear_attn_config": inside, "model_type": "kimi_linear"})
    assert [layer.index for layer in found.layers] == [1]
    assert found.total_parameters() == parameters_of(
        "kimi_linear", config_of("kimi_linear", {**kimi, "linear_attn_config": inside})
    )


def test_gemma_3n_with_its_encoders_says_what_is_not_counted() -> None:
    text = random_config("gemma3n_text", random.Random(2)) | {"tie_word_embeddings": True}
    whole = plan.of({"model_type": "gemma3n", "text_config": {**text, "model_type": "gemma3n_text"}})
    alone = plan.of({**text, "model_type": "gemma3n_text"})
    assert whole.parameters()["total"] == alone.parameters()["total"]
    assert any("encoders" in note for note in whole.notes) and not whole.exact
