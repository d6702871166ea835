"""The plan's limits at their last step: what is the largest that is read, and the first that is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headwise import plan
from headwise.files.hub_cache import cached_snapshot
from headwise.plan import read_config
from headwise.plan.config import fields
from headwise.plan.config import reader as configs
from headwise.plan.model.model import model_of
from headwise.plan.shape import short

pytestmark = pytest.mark.unchecked
SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 50}  # fmt: skip


def refused(config: Any, text: str, **how: Any) -> None:
    with pytest.raises(ValueError) as caught:
        plan.of(config, **how)
    assert text in str(caught.value), str(caught.value)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_as_many_bytes_as_are_read(tmp_path: Path) -> None:
    start, end = json.dumps({**SMALL, "architectures": None})[:-1] + ', "dtype": "', '"}'
    path = tmp_path / "config.json"
    for more, fits in ((0, True), (1, False)):
        path.write_text(start + "x" * (configs.MAX_BYTES + more - len(start) - len(end)) + end)
        assert path.stat().st_size == configs.MAX_BYTES + more
        if fits:
            assert plan.of(path).exact and read_config(path).num_heads == 8
        else:
            refused(path, "is larger than 1000000 bytes, so it is not the config.json of a model")


def test_devices_are_no_configs() -> None:
    for device in ("/dev/null", "/dev/zero", "/dev/full"):
        refused(device, f"'{device}': is not a regular file")


def test_names_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "model.v2.json"):
        (tmp_path / name).write_text(json.dumps(SMALL))
    assert plan.of("config.json").name == "config.json" and plan.of(Path("model.v2.json")).name == "model.v2"
    assert plan.of(tmp_path / "config.json").name == plan.of(tmp_path).name == tmp_path.name
    assert plan.of({**SMALL, "model_type": "llama"}).name == "llama"


def test_where_the_hub_s_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_CACHE before HF_HOME, that before XDG_CACHE_HOME, that before the home folder."""
    places = {
        "HF_HUB_CACHE": (tmp_path / "a", ""),
        "HF_HOME": (tmp_path / "b", "hub"),
        "XDG_CACHE_HOME": (tmp_path / "c", "huggingface/hub"),
        "HOME": (tmp_path / "d", ".cache/huggingface/hub"),
    }
    commit = "0123456789abcdef" * 2 + "01234567"
    for layers, (variable, (folder, below)) in enumerate(places.items(), 1):
        model = folder / below / "models--some--model"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(commit)
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text(json.dumps({**SMALL, "num_hidden_layers": layers}))
        monkeypatch.setenv(variable, str(folder))
    for layers, variable in enumerate(places, 1):
        assert len(plan.of("some/model").model.layers) == layers, variable
        monkeypatch.delenv(variable)


def test_only_a_commit_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    for name in ("0" * 39, "0" * 40, "0" * 41, "g" * 40, ".."):
        (model / "snapshots" / name).mkdir(parents=True, exist_ok=True)
        (model / "snapshots" / name / "config.json").write_text(json.dumps(SMALL))
    for name, followed in (("0" * 40, True), ("0" * 39, False), ("0" * 41, False), ("g" * 40, False), ("..", False)):
        (model / "refs" / "main").write_text(name)
        if followed:
            assert plan.of("some/model").exact
        else:
            refused("some/model", "no such file or folder, no card and no model in the hub's local cache")
    (tmp_path / "models--a..b" / "refs").mkdir(parents=True)
    assert not cached_snapshot("a..b")


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "most"),
    [("num_attention_heads", 10_000), ("num_hidden_layers", 10_000), ("hidden_size", 1_000_000),
     ("intermediate_size", 10_000_000), ("vocab_size", 10_000_000), ("head_dim", 10_000_000)],
)  # fmt: skip
def test_the_largest_field_that_is_planned(field: str, most: int) -> None:
    plain = {**SMALL, "num_hidden_layers": 1, "head_dim": 8, "num_key_value_heads": None}
    assert model_of({**plain, field: most}).total_parameters() > most
    with pytest.raises(ValueError, match=f"{field} is between 1 and {most}; got {most + 1}"):
        model_of({**plain, field: most + 1})


def test_values_are_shown_up_to_a_length() -> None:
    assert short("x" * 38) == repr("x" * 38) and short("x" * 39) == "'" + "x" * 36 + "..."
    assert short(10**20 - 1) == "9" * 20 and short(10**20) == "a number of more than 20 digits"
    assert short(-(10**20)) == "a number of more than 20 digits"


# --- fields -----------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v3", "moe_layer_freq": True}, "moe_layer_freq = True changes the model in a way"),
    ({"model_type": "t5", "feed_forward_proj": "gated-xielu"}, "has learned parameters"),
    ({"model_type": "t5", "feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj is an activation or gated-"),
    ({"model_type": "t5", "feed_forward_proj": "relu", "is_gated_act": True}, "contradicts itself: is_gated_act"),
    ({"model_type": "gpt2", "n_embd": 48, "hidden_size": 49, "n_head": 2}, "contradicts itself: n_embd = 48, hidden_"),
    ({"model_type": "gpt_bigcode", "multi_query": True, "num_key_value_heads": 2}, "num_key_value_heads = 2, but"),
    ({"model_type": "qwen2_moe", "mlp_only_layers": [True]}, "mlp_only_layers is a list of whole numbers; got [True]"),
    ({"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1]}, "no_rope_layers is a list of 3 whole"),
    ({"model_type": "qwen2_moe", "mlp_only_layers": [-1]}, "mlp_only_layers is a list of whole numbers; got [-1]"),
    ({"model_type": "qwen2", "use_sliding_window": False, "layer_types": ["sliding_attention"] * 32},
     "layer_types has sliding_attention, but use_sliding_window is off, so the window is not defined"),
    ({"model_type": "ministral", "sliding_window": None, "layer_types": ["sliding_attention"] * 32},
     "sliding_window is null, and some layers are sliding_attention"),
    ({"model_type": "llama", "layer_types": ["full_attention"] * 31}, "layer_types = ['full_attention', 'full_attent"),
    ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 3]]}, "attention_types names global"),
    ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 2]],
      "attention_layers": ["local", "local"]},
     "attention_layers contradicts attention_types; got ['local', 'local']"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9, "num_local_experts": 8}, "num_experts_per_tok = 9 is more"),
    ({"model_type": "kimi_linear", "linear_attn_config": [4]}, "linear_attn_config is an object; got [4]"),
    ({"model_type": "kimi_linear", "layer_types": ["full_attention"] * 26 + ["linear_attention"],
      "linear_attn_config": "x"}, "linear_attn_config is an object; got 'x'"),
    ({"model_type": "jamba", "attn_layer_period": 3, "attn_layer_offset": 3},
     "attn_layer_offset = 3 is not below attn_layer_period = 3"),
    ({"model_type": "qwen3_next", "linear_num_key_heads": 3, "linear_num_value_heads": 5},
     "linear_num_value_heads = 5 is not a multiple of linear_num_key_heads = 3"),
    ({"model_type": "bamba", "attn_layer_indices": [0], "hidden_size": 4096, "mamba_n_heads": 7},
     "mamba_n_heads = 7 does not divide the 8192 channels"),
    ({"model_type": "bamba", "attn_layer_indices": [0], "mamba_n_heads": 128, "mamba_d_head": 65},
     "mamba_d_head = 65 times mamba_n_heads = 128 is not 8192, the channels"),
    ({"model_type": "gemma4_text", "per_layer_config": [64]}, "per_layer_config is an object; got [64]"),
    ({"model_type": "glm_moe_dsa", "q_lora_rank": None}, "the indexer reads the latent of the queries: give its width"),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "index_topk_pattern": "FXF"},
     "index_topk_pattern has F or S for each of 3 layers; got 'FXF'"),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "index_topk_pattern": "FS"}, "of 3 layers; got 'FS'"),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 2, "index_topk_pattern": [["full"], "full"]},
     "index_topk_pattern has F or S for each of 2 layers; got [['full'], 'full']"),
    ({"model_type": "glm_moe_dsa", "num_hidden_layers": 2, "index_topk_pattern": 2}, "of 2 layers; got 2"),
    ({"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": "c2p|p2p"},
     "pos_att_type names c2p or p2c; got ['c2p', 'p2p']"),
    ({"model_type": "deberta-v2", "hidden_size": 1536, "conv_kernel_size": 3, "conv_groups": 5},
     "conv_groups = 5 does not divide hidden_size = 1536"),
    ({"model_type": "gemma3n_text", "num_hidden_layers": 35, "intermediate_size": [64] * 34 + [0]},
     "intermediate_size is at least 1 in every layer; got [64, "),
    ({"model_type": "lfm2", "block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier is a number above 0; got 0"),
    ({"model_type": "lfm2", "block_ffn_dim_multiplier": True}, "block_ffn_dim_multiplier is a number above 0; got Tr"),
    ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": 5}, "attention_types names global or local"),
    ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 1]]}, "for each of 2 layers; got [[["),
    ({"model_type": "gpt_neo", "num_layers": 1, "attention_types": [[["near"], 1]]}, "for each of 1 layers; got [[["),
    ({"model_type": "mpt", "attn_config": [1]}, "attn_config is an object; got [1]"),
    ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, "attn_config.qk_ln = True changes the model in a way"),
    ({"model_type": "t5", "feed_forward_proj": 5}, "feed_forward_proj is a string; got 5"),
    ({"model_type": ["llama"]}, "model_type is a string; got ['llama']"),
    ({"hidden_size": 96}, "has no model_type, so its architecture is not known"),
    ({"model_type": "llava", "text_config": {"model_type": ["llama"]}},
     "text_config has the architecture ['llama']; only text models are supported"),
    ({"model_type": "llama4", "vision_config": {"model_type": {}}}, "vision_config has the architecture {}; supp"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "text"), WRONG, ids=[text[:40] for _, text in WRONG])
def test_wrong_fields(config: dict[str, Any], text: str) -> None:
    refused(config, text)


def test_fields_at_the_edge_of_what_is_right() -> None:
    assert model_of({"model_type": "mixtral", "num_experts_per_tok": 8, "num_local_experts": 8}).layers
    assert model_of({"model_type": "llama", "layer_types": ["full_attention"] * 32}).layers
    types = {"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2}
    assert len(model_of({"model_type": "gpt_neo", "num_layers": 2, **types}).layers) == 2
    assert model_of({"model_type": "gpt2", "head_dim": 64}).layers[0].head_dim == 64
    assert model_of({"model_type": "gpt_bigcode", "multi_query": True, "num_key_value_heads": 1}).layers
    assert model_of({"model_type": "qwen2_moe", "mlp_only_layers": [0]}).layers
    dense = model_of({"model_type": "qwen2_moe", "mlp_only_layers": [0], "num_hidden_layers": 2}).others
    assert [part.name for part in dense if part.name in ("mlp", "experts")] == ["mlp", "experts"]


def test_letters_for_layers_with_an_indexer_of_their_own() -> None:
    base = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4}
    for pattern in ("FSFS", list("FSFS"), ["full", "shared", "full", "shared"]):
        layers = model_of({**base, "index_topk_pattern": pattern}).layers
        assert [layer.indexer is not None and layer.indexer.shared for layer in layers] == [False, True, False, True]
    layers = model_of({**base, "index_topk_pattern": "FFFF", "indexer_types": ["full", "shared"] * 2}).layers
    assert [layer.indexer is not None and layer.indexer.shared for layer in layers] == [False, True, False, True]


def test_a_kimi_config_without_a_list_of_layers_has_attention_in_every_fourth() -> None:
    for inside in ({}, {"full_attn_layers": None, "kda_layers": [1]}):
        model = model_of({"model_type": "kimi_linear", "num_hidden_layers": 10, "linear_attn_config": inside})
        assert [layer.index for layer in model.layers] == [4, 8]
        assert [state.index for state in model.states] == [0, 1, 2, 3, 5, 6, 7, 9]


def test_a_feed_forward_width_without_a_factor_is_two_thirds_and_not_rounded_up() -> None:
    sizes = {"model_type": "lfm2", "hidden_size": 64, "intermediate_size": 155, "num_attention_heads": 2,
             "num_key_value_heads": 1, "num_hidden_layers": 1, "block_multiple_of": 7}  # fmt: skip
    for factor, width in ((None, 103), (1.0, 105), (0.5, 56)):  # 2 * 155 / 3 = 103.3, 0.5 * 103 = 51.5
        others = model_of({**sizes, "block_ffn_dim_multiplier": factor}).others
        assert sum(part.parameters for part in others if part.name == "mlp") == 3 * 64 * width


def test_tied_heads_that_are_marked() -> None:
    """A head that a config unties is marked where transformers' class ties it all the same."""
    for name in ("t5", "bert"):
        notes = [model_of({"model_type": name, "tie_word_embeddings": tied}).notes for tied in (True, False)]
        assert notes[0] == () and ("tie_word_embeddings is off" in str(notes[1])) is (name == "t5")


@pytest.mark.parametrize("layers", [["full_attention"] * 2 + ["sliding_attention"], None])
def test_the_layers_a_window_begins_at(layers: list[str] | None) -> None:
    sizes = {"model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5}
    model = model_of({**sizes, "max_window_layers": 2, "layer_types": layers})
    assert [layer.window for layer in model.layers] == [None, None, 5]
    odd = model_of({**sizes, "model_type": "qwen2_moe", "num_hidden_layers": 5, "max_window_layers": 4})
    assert [layer.window for layer in odd.layers] == [5, None, 5, None, None]
    every = model_of({"model_type": "gemma2", "sliding_window": None, "num_hidden_layers": 4})
    assert [layer.window for layer in every.layers] == [None] * 4


def test_fields_know_their_names() -> None:
    reader = fields.Fields({"hidden_size": 3, "n_embd": 3}, fields.architectures()["gpt2"])
    assert reader.raw("hidden_size") == ("n_embd", 3) and reader.raw("n_layer") == ("n_layer", 12)
    with pytest.raises(ValueError, match="n_layer is null, and a whole number is needed"):
        fields.Fields({"n_layer": None}, fields.architectures()["gpt2"]).size("num_hidden_layers")


# --- heads plans ------------------------------------------------------------------------------------------------------

HEADS: list[tuple[Any, Any, str]] = [
    ("deepseek-v2-lite", {"layers": {"0": {"kv_heads": 4}}}, "latent attention has no key-value heads to merge"),
    (SMALL, {"layers": {"0": {"kv_heads": True}}}, "kv_heads divides the number of key-value heads, 4; got True"),
    (SMALL, {"layers": {"0": {"kv_heads": 2.0}}}, "kv_heads divides the number of key-value heads, 4; got 2.0"),
    ({"model_type": "bitnet", "num_hidden_layers": 1}, {"layers": {"0": {"keep": [0]}}}, "so no head can be removed"),
    ("bert-base", {"layers": {"encoder.0": {"keep": [0]}}}, "no layer 'encoder.0'; the layers are 0 to 11"),
    ("t5-small", {"layers": {"encoder.6": {"keep": [0]}}}, "no layer 'encoder.6'; the layers are encoder.0 to cross.5"),
]


@pytest.mark.parametrize(("config", "heads", "text"), HEADS, ids=[text[:30] for *_, text in HEADS])
def test_heads_plans_of_other_kinds(config: Any, heads: Any, text: str) -> None:
    refused(config, text, heads_plan=heads)


def test_models_whose_projection_is_as_wide_as_the_model_keep_their_heads() -> None:
    for name, about in fields.architectures().items():
        if "square_o" in about or "sub_norms" in about:
            layer = model_of({"model_type": name}).layers[0]
            if layer.out_width is not None or layer.sub_norm:
                refused({"model_type": name}, "so no head can be removed", heads_plan={"layers": {"*": {"keep": [0]}}})


def test_a_named_layer_comes_before_the_star() -> None:
    after = plan.of(
        SMALL, heads_plan={"layers": {"*": {"kv_heads": 1}, "1": {"keep": [0]}}}, batch=3, context=7
    ).planned
    assert after is not None and after.batch == 3
    assert [(layer.num_heads, layer.num_kv_heads) for layer in after.model.layers] == [(8, 1), (1, 1), (8, 1)]
    assert after.contexts[0].cache_bytes == 3 * 7 * 3 * 16 * 2
    encoder = plan.of("bert-base", heads_plan={"layers": {"11": {"keep": [0]}}}).planned
    assert encoder is not None and [layer.num_heads for layer in encoder.model.layers] == [12] * 11 + [1]
    assert os.path.basename(encoder.name) == "bert-base"
