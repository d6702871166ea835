"""Quantised weights, and layers that predict further tokens: against transformers and published checkpoints."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from plan_models import config_of, random_config

from headwise import plan
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import model_of
from headwise.plan.model.parts import parameters
from headwise.plan.model.quantization import packing_of

pytestmark = pytest.mark.unchecked
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def test_deepseek_s_numbers_are_those_of_its_files_by_dtype() -> None:
    """680,571,043,840 of F8_E4M3, 3,918,786,560 of BF16, 41,555,600 of F32: the routers' biases of 59 layers, too."""
    card = plan.cards()["deepseek-v3"]["config"]
    model = model_of({**card, "num_nextn_predict_layers": 1, "quantization_config": FP8})
    assert model.packing is not None
    parts = [*model.parts(), *model.further]
    shapes = [shape for part in parts if model.packing.packs(part) for shape in part.matrices]
    assert sum(inputs * outputs * copies for inputs, outputs, copies in shapes) == 680_571_043_840
    scales = sum((model.packing.matrix(i, o) - i * o) // 4 * copies for i, o, copies in shapes)
    assert scales + 59 * 256 == 41_555_600
    copies = 2 * 129280 * 7168  # the file has the table and the head a second time
    everything = model.total_parameters() + parameters(model.further) + copies
    assert everything == 680_571_043_840 + 3_918_786_560


@pytest.mark.parametrize(("card", "size"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_gpt_oss_takes_the_bytes_of_its_files(card: str, size: int) -> None:
    result = plan.of({**plan.cards()[card]["config"], "quantization_config": MXFP4})
    assert result.model.stored_bytes() == size and result.exact
    assert result.to_dict()["packing"] == "mxfp4" and "mxfp4" in str(result)


def test_fp8_is_what_transformers_builds() -> None:
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    for name, seed in (("llama", 1), ("qwen3", 2), ("gemma2", 3)):
        fields = random_config(name, random.Random(seed)) | {"attention_bias": False}  # biases of its class are float32
        settings = {"quant_method": "fp8", "weight_block_size": [3, 5]}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config_of(name, fields), dtype=torch.bfloat16)
            replace_with_fp8_linear(
                model,
                modules_to_not_convert=["lm_head"],
                quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(3, 5)),
                pre_quantized=True,
            )
        theirs = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        ours = model_of({**fields, "model_type": name, "dtype": "bfloat16", "quantization_config": settings})
        assert ours.stored_bytes() == theirs


def test_other_methods_by_hand() -> None:
    """A matrix of 256 inputs and 96 outputs: words, scales, zeros, tables, one by one."""
    inputs, outputs = 256, 96
    group = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}}}}
    row = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}}}
    expected: list[tuple[dict[str, Any], int]] = [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 12288 + 2 * 2 * 96 + 2 * 12 * 4 + 256 * 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 24576 + 2 * 96 + 24 * 4 + 256 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 256 * 12 * 4 + 4 * 12 * 4 + 4 * 2 * 96),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 24576 + 96 * 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 12288 + 384 * 4 + 64),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            12288 + 384 + 2 * 4 + 1024 + 64,
        ),
        ({"quant_method": "compressed-tensors", **group}, 12288 + 16 + 2 * 96 * 4),
        ({"quant_method": "compressed-tensors", **row}, 24576 + 2 * 96),
        ({"quant_method": "fp8"}, 24576 + 4),
        ({"quant_method": "mxfp4"}, 12288 + 96 * 8),
    ]
    for about, size in expected:
        packing, note = packing_of({"quantization_config": about})
        assert packing is not None and note is None
        assert packing.matrix(inputs, outputs) == size, about


def test_a_step_reads_packed_weights() -> None:
    plain, packed = (
        model_of({"model_type": "llama", **more})
        for more in ({}, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
    )
    assert packed.packing is not None
    inside = [part for part in packed.parts() if packed.packing.packs(part)]
    less = sum(2 * part.parameters - packed.part_bytes(part) for part in inside)
    assert costs.weight_bytes_read(plain) - costs.weight_bytes_read(packed) == less > 0
    assert plain.stored_bytes() - packed.stored_bytes() == less
    assert plain.total_parameters() == packed.total_parameters()


def test_what_is_left_unquantised_is_told() -> None:
    about = {"quant_method": "awq", "modules_to_not_convert": ["lm_head", "model.layers.3.mlp.up_proj"]}
    result = plan.of({"model_type": "llama", "quantization_config": about})
    assert result.notes == (
        "weights that the checkpoint leaves unquantised are counted as quantised: 'model.layers.3.mlp.up_proj'",
    )


WRONG: list[tuple[Any, str]] = [
    ("fp8", "quantization_config is an object; got 'fp8'"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config: weight_block_size is two whole numbers;"),
    ({"quant_method": "gptq", "bits": "4"}, "quantization_config: bits is an int; got '4'"),
    ({"quant_method": "awq", "group_size": 0}, "group_size is at least 1; got 0"),
    ({"quant_method": "compressed-tensors"}, "quantization_config: config_groups has no weights in its first group"),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"0": {"weights": {"strategy": "block"}}}},
        "quantization_config: strategy is group, channel or tensor; got 'block'",
    ),
]


@pytest.mark.parametrize(("about", "text"), WRONG, ids=[text[:30] for _, text in WRONG])
def test_a_field_of_a_method_that_is_wrong_is_refused(about: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        model_of({"model_type": "llama", "quantization_config": about})
    assert str(caught.value).startswith(text)


def test_layers_that_predict_further_tokens_are_counted_apart() -> None:
    card = plan.cards()["deepseek-v3"]["config"]
    without, one = plan.of("deepseek-v3"), plan.of({**card, "num_nextn_predict_layers": 1})
    assert one.model.total_parameters() == without.model.total_parameters() and without.further() is None
    extra = one.further()
    assert extra is not None and extra["layers"] == 1 and extra["bytes_per_token"] == 2 * 576
    assert round(extra["parameters"] / 1e9, 1) == 11.6
    two = plan.of({**card, "num_nextn_predict_layers": 2}).further()
    assert two is not None and two == {name: 2 * number for name, number in extra.items()}
    assert f"1: {extra['parameters']:,} more, cache per token 1,152 B" in str(one)
