"""Models that compute with their attention mask before they attend: to them it is the tensor that eager gets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hf_measure import counted
from hf_models import B, padding, stir, token_ids
from torch import Tensor
from transformers import PreTrainedModel
from transformers import masking_utils as theirs

from headwise.hf.attention.function import headwise_attention
from headwise.hf.attention.mask import StructuralMask, headwise_mask
from headwise.hf.models.architectures import FLOAT_MASKS

WIDTH: dict[str, Any] = dict(hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=4)
IDS: dict[str, Any] = dict(vocab_size=53, pad_token_id=0, bos_token_id=1, eos_token_id=None)
Given = dict[str, Tensor]


def built(name: str, config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = (
            getattr(transformers, name)
            ._from_config(config, attn_implementation="eager", experts_implementation="eager")
            .eval()
        )
        stir(model)
    return model


def deepseek_v4() -> tuple[PreTrainedModel, Given]:
    """Appends the bias of compressed keys to the mask, if that is a tensor."""
    config = transformers.DeepseekV4Config(
        **IDS, hidden_size=24, moe_intermediate_size=7, num_hidden_layers=2, num_attention_heads=4, head_dim=12,
        q_lora_rank=11, num_experts_per_tok=2, n_routed_experts=3, o_groups=2, o_lora_rank=5, hc_mult=2,
        index_n_heads=2, index_head_dim=8, index_topk=4, num_nextn_predict_layers=0, partial_rotary_factor=0.5,
        sliding_window=4,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"heavily_compressed_attention": 4, "compressed_sparse_attention": 2},
    )  # fmt: skip
    return built("DeepseekV4ForCausalLM", config), dict(input_ids=token_ids(), attention_mask=padding("none"))


def bigbird_pegasus() -> tuple[PreTrainedModel, Given]:
    """Its encoder attends in code of its own."""
    config = transformers.BigBirdPegasusConfig(
        **IDS, d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=17, decoder_ffn_dim=17, max_position_embeddings=64, attention_type="original_full",
    )  # fmt: skip
    arguments = dict(input_ids=token_ids(), attention_mask=padding("right"), decoder_input_ids=token_ids(7))
    return built("BigBirdPegasusModel", config), arguments


def t5gemma2() -> tuple[PreTrainedModel, Given]:
    """Joins the masks of self- and cross-attention to one."""
    text = IDS | WIDTH | dict(num_key_value_heads=2, head_dim=6, sliding_window=4, query_pre_attn_scalar=7)
    text["layer_types"] = ["sliding_attention", "full_attention"]
    vision = WIDTH | dict(image_size=8, patch_size=4)
    config = transformers.T5Gemma2Config(encoder=dict(text_config=text, vision_config=vision), decoder=text)
    arguments = dict(input_ids=token_ids(), attention_mask=padding("right"), decoder_input_ids=token_ids(7))
    return built("T5Gemma2Model", config), arguments


def lasr() -> tuple[PreTrainedModel, Given]:
    """Asks the mask which frames are padding, before its convolutions."""
    config = transformers.LasrEncoderConfig(
        **WIDTH, num_mel_bins=5, subsampling_conv_channels=7, conv_kernel_size=3, max_position_embeddings=64
    )
    return built("LasrEncoder", config), dict(input_features=torch.randn(B, 61, 5), attention_mask=padding("right", 61))


def siglip2() -> tuple[PreTrainedModel, Given]:
    """Repeats the mask for the heads of its pooling."""
    model = built("Siglip2VisionModel", transformers.Siglip2VisionConfig(**WIDTH, num_patches=16, patch_size=2))
    shapes = torch.tensor([[4, 4], [3, 2], [2, 2]])
    real = torch.arange(16) < shapes.prod(-1, keepdim=True)
    arguments = dict(pixel_values=torch.randn(B, 16, 12), pixel_attention_mask=real.long(), spatial_shapes=shapes)
    return model, arguments


def beit(**more: Any) -> tuple[PreTrainedModel, Given]:
    """Adds the mask to its position biases."""
    model = built("BeitModel", transformers.BeitConfig(**WIDTH, image_size=12, patch_size=4, **more))
    return model, dict(pixel_values=torch.randn(B, 3, 12, 12))


ROWS: dict[str, tuple[Callable[[], tuple[PreTrainedModel, Given]], int]] = {
    "DeepSeek-V4": (deepseek_v4, 2),
    "BigBird-Pegasus": (bigbird_pegasus, 2),
    "T5Gemma 2": (t5gemma2, 4),
    "LASR": (lasr, 2),
    "SigLIP 2": (siglip2, 2),
    "BEiT": (lambda: beit(use_relative_position_bias=True), 2),
    "BEiT shared": (lambda: beit(use_shared_relative_position_bias=True), 2),
}
"""Name -> how it is built, and how many calls of a forward reach headwise."""


def run(model: PreTrainedModel, implementation: str, arguments: Given) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**arguments)[0]


@pytest.mark.parametrize("name", ROWS)
def test_the_output_is_that_of_eager(name: str) -> None:
    build, count = ROWS[name]
    model, arguments = build()
    eager = run(model, "eager", arguments)
    with counted() as calls:
        ours = run(model, "headwise", arguments)
    assert len(calls) == count
    assert (ours - eager).abs().max() <= 1e-5 * eager.abs().max()  # as of every model, see test_hf_models


def masked_beit() -> tuple[PreTrainedModel, Given]:
    """BEiT with some patches shut off."""
    model, arguments = beit(use_relative_position_bias=True)
    return model, arguments | dict(attention_mask=(torch.arange(10) < torch.tensor([[10], [7], [4]])).long())


@pytest.mark.parametrize("build", [*(build for build, _ in ROWS.values()), masked_beit])
def test_with_the_masks_of_traced_code(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it is, with the masks that it would have while it is traced."""
    model, arguments = build()
    eager = run(model, "eager", arguments)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    ours = run(model, "headwise", arguments)
    assert (ours - eager).abs().max() <= 1e-5 * eager.abs().max()


@pytest.mark.parametrize("model_type", ["llama", *sorted(FLOAT_MASKS)])
def test_what_traced_code_gets(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under sdpa; for a model that computes with it a float tensor, always."""
    config = SimpleNamespace(model_type=model_type)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    arguments = dict(batch_size=B, q_length=3, kv_length=3, config=config, dtype=torch.float64)
    mask = headwise_mask(**arguments)
    rows = headwise_mask(**arguments, attention_mask=padding("left", 3).bool())
    either = headwise_mask(
        **arguments, mask_function=theirs.bidirectional_mask_function, allow_is_bidirectional_skip=True
    )
    if model_type == "llama":
        assert mask is None and either is None and rows.dtype == torch.bool
    else:
        assert mask.dtype == either.dtype == rows.dtype == torch.float64 and not either.any()


class Plain(torch.nn.Module):
    """Attends with whatever mask it is handed."""

    is_causal = False


def attended(mask: Tensor | None, T: int, S: int) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(B, 2, n, 8, generator=draw) for n in (T, S, S))
    return headwise_attention(Plain(), query, key, value, mask)[0]


def test_a_mask_of_one_row_holds_for_all_queries() -> None:
    """As eager adds it: LightGlue makes its mask for the first query alone."""
    frame = dict(batch_size=B, kv_length=7, mask_function=theirs.bidirectional_mask_function)
    frame |= dict(attention_mask=padding("right", 7).bool())
    row, whole = headwise_mask(**frame, q_length=1), headwise_mask(**frame, q_length=5)
    torch.testing.assert_close(attended(row, 5, 7), attended(whole, 5, 7))
    assert (attended(row, 5, 7) - attended(None, 5, 7)).abs().max() > 0.1


def test_a_mask_that_hides_nothing_holds_for_any_number_of_keys() -> None:
    """Eager gets None in its place; one that hides a key is refused (test_hf_masks)."""
    mask = headwise_mask(batch_size=B, q_length=4, kv_length=4, mask_function=theirs.bidirectional_mask_function)
    assert torch.equal(attended(mask, 4, 9), attended(None, 4, 9))


def test_a_function_of_one_pair_is_evaluated_inside_of_an_operation() -> None:
    """torch.vmap, in `__torch_dispatch__`: Gemma 4's audio pads its mask, whose function takes one pair at a time."""
    function = theirs.and_masks(theirs.sliding_window_overlay(3), lambda b, h, q, k: k <= q + 1)
    frame = dict(batch_size=B, q_length=5, kv_length=5, mask_function=function)
    mask = headwise_mask(**frame, use_vmap=True)
    assert isinstance(mask, StructuralMask)
    padded = torch.nn.functional.pad(mask, (0, 2), value=1.0)
    whole = theirs.eager_mask(**frame, dtype=torch.float32)
    assert torch.equal(padded[..., :5], whole.expand(B, -1, -1, -1)) and bool((padded[..., 5:] == 1).all())
