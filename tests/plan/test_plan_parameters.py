"""Parameters: equal to the model that transformers builds, for every architecture; no field escapes.

Here a few random configs of each; `scripts/plan_exactness.py` runs hundreds and prints the table of `docs/plan.md`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from plan_models import (
    SINGLE,
    build,
    config_of,
    parameters_of,
    random_config,
    silently_wrong,
    strange_and_wrong,
)

from headwise import plan
from headwise.plan.config.fields import Fields, architectures, everywhere
from headwise.plan.model import model as models
from headwise.plan.model.model import model_of
from headwise.plan.model.parts import parameters

pytestmark = pytest.mark.unchecked
SAMPLE = 3


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", SINGLE)
def test_parameters_are_those_of_the_model_transformers_builds(name: str) -> None:
    for seed in range(SAMPLE):
        fields = random_config(name, random.Random(seed))
        config = config_of(name, fields)
        ours = model_of({**fields, "model_type": name})
        assert ours.total_parameters() == parameters_of(name, config), fields
        classes = architectures()[name]["classes"]
        bare = model_of({**fields, "model_type": name, "architectures": [classes["base"]]})
        assert bare.total_parameters() == parameters_of(name, config, head=False), fields


SMALL: dict[str, Any] = {"vocab_size": 41, "hidden_size": 24, "intermediate_size": 14, "num_hidden_layers": 2,
                         "num_attention_heads": 4}  # fmt: skip
CORNERS: dict[str, list[dict[str, Any]]] = {
    "falcon": [
        {"new_decoder_architecture": new, "parallel_attn": side, "multi_query": one, "num_ln_in_parallel_attn": norms,
         "num_kv_heads": kv_heads, "ffn_hidden_size": 14}
        for new in (True, False) for side in (True, False) for one in (True, False) for norms in (None, 1, 2)
        for kv_heads in (None, 2)
    ],
    "jamba": [{"num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": rank,
               "num_experts": experts} for rank in ("auto", 3) for experts in (1, 2)],
    "lfm2": [{"num_key_value_heads": 2, "full_attn_idxs": [1], "block_multiple_of": n, "intermediate_size": 100}
             for n in (1, 7, 66, 67)],
    "deberta": [{"legacy": legacy, "tie_word_embeddings": tied} for legacy in (True, False) for tied in (True, False)],
    "deepseek_v3": [{"num_key_value_heads": 4, "attention_bias": bias, "q_lora_rank": rank, "kv_lora_rank": 6,
                     "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 5, "moe_intermediate_size": 7,
                     "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
                    for bias in (True, False) for rank in (None, 10)],
    "llama4_text": [{"num_key_value_heads": 2, "moe_layers": moe} for moe in (None, [], [0], [0, 1])],
}  # fmt: skip


@pytest.mark.parametrize("name", CORNERS)
def test_corners_that_few_draws_may_miss(name: str) -> None:
    for fields in CORNERS[name]:
        fields = {
            key: value for key, value in {**SMALL, **fields}.items() if (name, key) != ("falcon", "intermediate_size")
        }
        ours = model_of({**fields, "model_type": name}).total_parameters()
        assert ours == parameters_of(name, config_of(name, fields)), fields


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "deepseek_v3", "t5", "whisper", "bert"])
def test_attention_s_share_is_that_of_the_attention_modules(name: str) -> None:
    fields = random_config(name, random.Random(5))
    model = build(name, config_of(name, fields))
    inside = ("attn.", "attention.self.", "attention.output.dense", "Attention.", "encoder_attn.")
    expected = sum(
        p.numel()
        for key, p in model.named_parameters()
        if any(part in key for part in inside) and "relative" not in key
    )
    assert model_of({**fields, "model_type": name}).attention_parameters() == expected


def test_there_are_enough_architectures() -> None:
    assert len(SINGLE) >= 40


# --- no field escapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
def test_every_field_of_the_config_class_is_counted_neutral_or_refused(name: str) -> None:
    """A field that transformers adds to a class shows here before it can change a count unseen."""
    config = config_of(name, random_config(name, random.Random(0)))
    reader = Fields({field.name: None for field in dataclasses.fields(config)}, architectures()[name])
    assert reader.unknown() == []


CANNOT_BE_BUILT = ("ministral", "nemotron", "hunyuan_v1_dense")  # transformers' own defaults leave a size None
REFUSED_DEFAULTS = (
    "glm4_moe",
    "deepseek_v2",
    "bamba",
    "granitemoehybrid",
    "lfm2_moe",
)  # 4096 / 96 heads; null experts a token; no attention layer


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", sorted({*SINGLE} - {*CANNOT_BE_BUILT, *REFUSED_DEFAULTS}))
def test_defaults_are_those_of_the_config_class(name: str) -> None:
    """A field that a config.json leaves out has transformers' value."""
    assert model_of({"model_type": name}).total_parameters() == parameters_of(name, type(_config(name))())


@pytest.mark.parametrize("name", REFUSED_DEFAULTS)
def test_defaults_that_leave_a_size_open_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"whole number is needed|must be a multiple|no layer has attention"):
        model_of({"model_type": name})


@pytest.mark.parametrize("name", CANNOT_BE_BUILT)
def test_what_transformers_cannot_build_is_known(name: str) -> None:
    with pytest.raises(TypeError):
        build(name, type(_config(name))())


def _config(name: str) -> Any:
    return config_of(name, random_config(name, random.Random(0)))


OTHER: dict[type, Any] = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v / 2 + 0.01}
NOT_FREE = {"rope_parameters", "chunk_size_feed_forward", "n_group", "topk_group", "return_dict", "is_encoder_decoder"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", SINGLE)
def test_neutral_fields_change_no_count(name: str) -> None:
    """All fields called neutral are changed at once (those with a number or a bool): the model stays as large."""
    fields = random_config(name, random.Random(1))
    config = config_of(name, fields)
    about = architectures()[name]
    neutral = everywhere()["fields"] | set(about.get("neutral", ()))
    counted = {*about["defaults"], *about.get("must", {}), *about.get("names", {}), "is_decoder"}
    before = {f.name: getattr(config, f.name, None) for f in dataclasses.fields(config)}
    changed = {
        key: OTHER[type(value)](value)
        for key, value in before.items()
        if key in neutral - counted - NOT_FREE and type(value) in OTHER and "token" not in key and "dropout" not in key
    }
    assert parameters_of(name, config_of(name, {**fields, **changed})) == parameters_of(name, config)


@pytest.mark.parametrize("name", SINGLE)
def test_saved_configs_are_read_as_they_were_made(name: str) -> None:
    """What transformers writes has derived fields and other names: nothing there is unknown, nothing read otherwise."""
    fields = random_config(name, random.Random(3))
    made, saved = plan.of({**fields, "model_type": name}), plan.of(config_of(name, fields))
    assert (saved.model.layers, saved.model.others) == (made.model.layers, made.model.others)
    assert not any("not known" in note for note in saved.notes)


ALL_MIXED = {"first_k_dense_replace": 0, "num_dense_layers": 0, "mlp_layer_types": None}  # no layer without experts


def aliases() -> list[tuple[str, str, str]]:
    return [
        (name, alias, field)
        for name in SINGLE
        for alias, field in architectures()[name].get("aliases", {}).items()
        if field in architectures()[name]["defaults"]
    ]


@pytest.mark.parametrize(("name", "alias", "field"), aliases())
def test_other_names_of_a_field_count_the_same(name: str, alias: str, field: str) -> None:
    fields = random_config(name, random.Random(2)) | (ALL_MIXED if "expert" in alias else {})
    renamed = {alias if key == field else key: value for key, value in fields.items()}
    assert model_of({**renamed, "model_type": name}).layers == model_of({**fields, "model_type": name}).layers
    other = fields[field][:-1] if isinstance(fields[field], list) else fields[field] + 1
    with pytest.raises(ValueError, match="contradicts itself"):
        model_of({**fields, alias: other, "model_type": name})


LOOKS_FOR_MORE = ["llama", "qwen2", "gpt_neox", "bloom", "stablelm", "olmoe", "phi", "deepseek_v3", "bart"]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", LOOKS_FOR_MORE)
def test_fields_of_other_architectures_change_nothing_unseen(name: str) -> None:
    """The script does it for all; here those whose code looks for fields that their config class does not have."""
    fields = random_config(name, random.Random(4))
    size = parameters_of(name, config_of(name, fields))
    assert strange_and_wrong(name, fields, size) == []


def test_a_field_that_is_guessed_over_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the planner forgets that head_dim counts."""
    fields = random_config("qwen2", random.Random(4))
    del fields["head_dim"]
    size = parameters_of("qwen2", config_of("qwen2", fields))
    assert not silently_wrong("qwen2", fields, {"head_dim": 22}, size)
    monkeypatch.setattr(Fields, "optional", _without_head_dim(Fields.optional))
    assert silently_wrong("qwen2", fields, {"head_dim": 22}, size)
    assert {"head_dim": 3} in strange_and_wrong("qwen2", fields, size)


def _without_head_dim(real: Any) -> Any:
    return lambda self, name, **least: None if name == "head_dim" else real(self, name, **least)


def test_a_counting_field_called_neutral_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = random_config("llama", random.Random(1))
    more = {**fields, "intermediate_size": fields["intermediate_size"] + 1}
    assert parameters_of("llama", config_of("llama", more)) != parameters_of("llama", config_of("llama", fields))


# --- what is not supported --------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "has no model_type, so its architecture is not known"),
    ({"model_type": "llamma"}, "architecture 'llamma' is not known; did you mean llama?"),
    ({"model_type": "mamba"}, "architecture 'mamba' is not known"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention = True changes the model in a way that"),
    ({"model_type": "bert", "is_decoder": True}, "is_decoder = True changes the model in a way that is not supported"),
    ({"model_type": "albert", "num_hidden_groups": 2}, "num_hidden_groups = 2 changes the model in a way that is not"),
    ({"model_type": "llama", "hidden_act": "xielu"}, "hidden_act = 'xielu' has learned parameters, and that"),
    ({"model_type": "llama", "sliding_window": 4096}, "sliding_window = 4096 is not supported for this architecture"),
    ({"model_type": "llama", "pruned_heads": {"0": [1]}}, "pruned_heads = {'0': [1]} changes the model in a way that"),
    (
        {"model_type": "gpt2", "head_dim": 48},
        "head_dim = 48 is not supported for this architecture; only d_model / num",
    ),
    (
        {"model_type": "qwen2", "layer_types": ["linear_attention"] * 32},
        "layer_types has 'linear_attention'; only full",
    ),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types is a list of 32 names; got ["),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is on, and"),
    (
        {"model_type": "deepseek_v3", "num_key_value_heads": 8},
        "num_key_value_heads = 8, but in latent attention each of the 128",
    ),
    ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, "moe_layer_freq = 2 changes the model in a way that is not"),
    (
        {"model_type": "mixtral", "num_experts_per_tok": 9},
        "num_experts_per_tok = 9 is more than the number of experts, 8",
    ),
    (
        {"model_type": "marian", "decoder_vocab_size": 7},
        "decoder_vocab_size = 7 differs from vocab_size, and that is not",
    ),
    ({"model_type": "t5", "feed_forward_proj": "twice-gelu"}, "feed_forward_proj is an activation or gated-activation"),
    ({"model_type": "gpt_neo", "attention_types": [[["global"], 9**9]]}, "attention_types names global or local for"),
    ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "text_config has the architecture 'llama'; "),
]


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_what_is_not_modelled_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        model_of(config)
    assert str(caught.value).startswith(text) and str(caught.value).isprintable()


MARKED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "brand_new": 1}, "unknown fields, which are assumed to change no count: 'brand_new'"),
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "the head of 'LlamaForSequence"),
    ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "layers that predict further tokens"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "odd"}}, "the checkpoint is quantised by 'odd'"),
    ({"model_type": "t5", "tie_word_embeddings": False}, "tie_word_embeddings is off: the checkpoint has a head of"),
]


@pytest.mark.parametrize(("config", "text"), MARKED, ids=[text[:40] for _, text in MARKED])
def test_what_is_left_out_is_marked(config: dict[str, Any], text: str) -> None:
    result = plan.of(config)
    assert not result.exact and result.notes[0].startswith(text)
    assert plan.of({"model_type": config["model_type"]}).exact


# --- the cards --------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096, "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344, "llama-7b": 6_738_415_616, "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "mistral-7b": 7_241_732_096, "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512, "qwen2-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320, "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552, "phi-3-medium": 13_960_238_080, "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "falcon-40b": 41_303_293_952, "mpt-7b": 6_649_286_656, "llama-4-scout": 108_641_793_536,
    "qwen2.5-vl-7b": 8_292_166_656, "jamba-v0.1": 51_570_323_328, "lfm2-1.2b": 1_170_340_608,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512,
    "whisper-tiny": 37_760_640, "whisper-large-v3": 1_543_490_560,
}  # fmt: skip
"""What the safetensors files of the published checkpoints hold."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_cards_have_the_parameters_of_the_published_checkpoints(name: str) -> None:
    assert plan.of(name).model.total_parameters() == PUBLISHED[name]


def test_bloom_is_counted_from_its_published_config() -> None:
    """Its files say n_embed, which transformers takes for hidden_size; without it the default of 64 would count."""
    published = {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_embed": 1024, "n_layer": 24,
        "num_attention_heads": 16, "vocab_size": 250880, "n_inner": None, "offset_alibi": 100, "seq_length": 2048,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "pretraining_tp": 1, "use_cache": True,
    }  # fmt: skip
    bloom = plan.of(published)
    assert bloom.model.total_parameters() == 559_214_592 and bloom.exact
    assert bloom.bytes_per_token == 24 * 2 * 1024 * 2


def test_what_published_configs_say_beside_the_counts_is_known() -> None:
    """Fields of old versions, which transformers reads no more: a note about each would make every count look vague."""
    for name, beside in {
        "t5": {"n_positions": 512},
        "mt5": {"n_positions": 512},
        "gptj": {"rotary": True},
        "phi3": {"attention_bias": False},
        "qwen3_moe": {"max_window_layers": 48},
        "whisper": {"forced_decoder_ids": [[1, 50259]]},
        "cohere": {"model_max_length": 131072},
    }.items():
        assert plan.of({"model_type": name, **beside}, context=100).notes == (), name


@pytest.mark.parametrize("name", plan.cards())
def test_cards_are_exact_and_their_configs_valid(name: str) -> None:
    card = plan.of(name, context=100)
    noted = ("gpt-3", "falcon-40b", "llama-4-scout")  # transformers computes or keeps more than is counted
    assert card.exact is (name not in noted) and set(plan.cards()[name]) <= {"title", "config", "note", "left_out"}
    assert json.loads(json.dumps(card.to_dict()))["name"] == name


def test_the_cards_tell_the_truth_where_common_texts_do_not() -> None:
    eight = plan.of("llama-3-8b")
    layer = eight.model.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.parameter_count()) == (32, 8, 41_943_040)
    assert eight.kind == "GQA, 8 KV heads (4 query heads each)" and 4 * 4096**2 == 67_108_864
    deep = plan.of("deepseek-v3")
    assert (deep.kind, deep.bytes_per_token) == ("MLA", 70_272)
    three = plan.of("gpt-3")
    assert three.model.layers[0].head_dim == 128 and three.attention_computations == 96 * 96
    gemma = plan.of("gemma-3-27b", context=131072).contexts[0]
    assert round(gemma.cache_bytes / 2**30, 2) == 10.41 and round(gemma.reserved_bytes / 2**30) == 62
    assert plan.of("qwen3-0.6b").bytes_per_token == 114_688


def test_a_wrong_count_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: norms forgotten."""
    real = models.build.other_parts

    def without_norms(fields: Any, *, with_head: bool) -> Any:
        return (part for part in real(fields, with_head=with_head) if part.room != "norm")

    monkeypatch.setattr(models.build, "other_parts", without_norms)
    fields = random_config("llama", random.Random(0))
    ours = model_of({**fields, "model_type": "llama"})
    assert ours.total_parameters() != parameters_of("llama", config_of("llama", fields))
    assert parameters(ours.others, "norm") == 0
