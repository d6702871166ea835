"""Tiny random models whose code of attention does no more than scale, mask and add: a row a family."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from hf_models import PAD, VOCAB, stir, token_ids
from hf_seam_models import BERT, DEBERTA, GPT, IDS, arguments
from torch import Tensor
from transformers import PreTrainedModel

SEQ2SEQ: dict[str, Any] = dict(
    d_model=35,
    encoder_layers=2,
    decoder_layers=1,
    encoder_attention_heads=5,
    decoder_attention_heads=5,
    encoder_ffn_dim=17,
    decoder_ffn_dim=17,
    max_position_embeddings=61,
    decoder_start_token_id=1,
)
VISION: dict[str, Any] = dict(
    hidden_size=35, num_hidden_layers=2, num_attention_heads=5, intermediate_size=17, image_size=12, patch_size=4
)
XLM: dict[str, Any] = dict(emb_dim=35, n_layers=2, n_heads=5, pad_index=PAD, max_position_embeddings=61)


def _vision(*shape: int) -> dict[str, Tensor]:
    return dict(pixel_values=torch.randn(3, *shape, generator=torch.Generator().manual_seed(7)))


def _both() -> dict[str, Tensor]:
    return dict(arguments("right"), decoder_input_ids=token_ids(7, seed=11), use_cache=False)  # type: ignore[arg-type]


def _speech() -> dict[str, Any]:
    wave = torch.randn(3, 400, generator=torch.Generator().manual_seed(7))
    return dict(input_values=wave, decoder_input_ids=token_ids(7), use_cache=False)


CONV: dict[str, Any] = dict(
    conv_dim=(10, 10),
    conv_stride=(5, 4),
    conv_kernel=(10, 3),
    num_conv_pos_embeddings=7,
    num_conv_pos_embedding_groups=5,
    mask_time_prob=0.0,
)

PLAIN: dict[str, tuple[str, dict[str, Any], Any, int, int]] = {
    "bark": (
        "BarkSemanticModel BarkSemanticConfig",
        dict(num_layers=2, num_heads=5, hidden_size=35, input_vocab_size=VOCAB, output_vocab_size=VOCAB, block_size=61),
        "left",
        2,
        5,
    ),
    "blip": ("BlipVisionModel BlipVisionConfig", VISION, _vision(3, 12, 12), 2, 5),
    "blip_text": ("BlipTextModel BlipTextConfig", BERT, "right", 2, 5),
    "clvp": (
        "ClvpForCausalLM ClvpDecoderConfig",
        BERT | dict(n_inner=17, max_text_tokens=61, num_mel_attn_blocks=1, feature_size=5),
        "left",
        2,
        5,
    ),
    "convbert": (
        "ConvBertModel ConvBertConfig",
        BERT | dict(hidden_size=40, num_attention_heads=4, head_ratio=2, embedding_size=40),
        "right",
        2,
        2,
    ),
    "data2vec_vision": (
        "Data2VecVisionModel Data2VecVisionConfig",
        VISION | dict(use_relative_position_bias=True),
        _vision(3, 12, 12),
        2,
        5,
    ),
    "deberta": (
        "DebertaForMaskedLM DebertaConfig",
        DEBERTA | dict(pos_att_type=["c2p", "p2c"], max_relative_positions=7),
        "right",
        2,
        5,
    ),
    "flaubert": ("FlaubertWithLMHeadModel FlaubertConfig", XLM, "right", 2, 5),
    "flava": ("FlavaTextModel FlavaTextConfig", BERT, "right", 2, 5),
    "fsmt": (
        "FSMTForConditionalGeneration FSMTConfig",
        SEQ2SEQ | dict(langs=["a", "b"], src_vocab_size=VOCAB, tgt_vocab_size=VOCAB),
        "both",
        4,
        5,
    ),
    "funnel": (
        "FunnelBaseModel FunnelConfig",
        dict(d_model=40, n_head=5, d_head=8, d_inner=17, block_sizes=[1, 1]),
        "right",
        2,
        5,
    ),
    "gpt_neox_japanese": (
        "GPTNeoXJapaneseForCausalLM GPTNeoXJapaneseConfig",
        BERT | dict(hidden_size=40),
        "left",
        2,
        5,
    ),
    "imagegpt": ("ImageGPTForCausalImageModeling ImageGPTConfig", GPT, "none", 2, 5),
    "layoutlmv3": (
        "LayoutLMv3Model LayoutLMv3Config",
        BERT
        | dict(
            hidden_size=30,
            coordinate_size=5,
            shape_size=5,
            has_relative_attention_bias=True,
            has_spatial_attention_bias=True,
            max_2d_position_embeddings=64,
            visual_embed=False,
        ),
        dict(bbox=torch.arange(3 * 11 * 4).view(3, 11, 4) % 47),
        2,
        5,
    ),
    "lxmert": (
        "LxmertModel LxmertConfig",
        dict(
            hidden_size=35,
            num_attention_heads=5,
            intermediate_size=17,
            l_layers=1,
            x_layers=1,
            r_layers=1,
            visual_feat_dim=6,
            visual_pos_dim=4,
        ),
        dict(visual_feats=torch.randn(3, 7, 6), visual_pos=torch.rand(3, 7, 4)),
        6,
        5,
    ),
    "megatron_bert": ("MegatronBertForMaskedLM MegatronBertConfig", BERT, "right", 2, 5),
    "mgp_str": (
        "MgpstrForSceneTextRecognition MgpstrConfig",
        dict(
            image_size=[12, 12],
            patch_size=4,
            hidden_size=40,
            num_hidden_layers=2,
            num_attention_heads=5,
            max_token_length=5,
            num_character_labels=7,
            num_bpe_labels=11,
            num_wordpiece_labels=13,
        ),
        _vision(3, 12, 12),
        2,
        5,
    ),
    "mobilevit": (
        "MobileViTModel MobileViTConfig",
        dict(
            image_size=64, hidden_sizes=[12, 16, 20], neck_hidden_sizes=[4, 4, 8, 12, 16, 20, 20], num_attention_heads=4
        ),
        _vision(3, 64, 64),
        9,
        4,
    ),
    "mvp": ("MvpForConditionalGeneration MvpConfig", SEQ2SEQ, "both", 4, 5),
    "pvt": (
        "PvtModel PvtConfig",
        dict(
            image_size=32,
            num_encoder_blocks=2,
            depths=[1, 1],
            sequence_reduction_ratios=[2, 1],
            hidden_sizes=[10, 20],
            patch_sizes=[4, 2],
            strides=[4, 2],
            num_attention_heads=[2, 2],
            mlp_ratios=[2, 2],
        ),
        _vision(3, 32, 32),
        2,
        2,
    ),
    "rembert": (
        "RemBertForMaskedLM RemBertConfig",
        BERT | dict(input_embedding_size=13, output_embedding_size=13),
        "right",
        2,
        5,
    ),
    "roformer": ("RoFormerForMaskedLM RoFormerConfig", BERT | dict(hidden_size=40, embedding_size=40), "right", 2, 5),
    "speecht5": ("SpeechT5ForSpeechToText SpeechT5Config", SEQ2SEQ | CONV | dict(hidden_size=35), "speech", 4, 5),
    "squeezebert": (
        "SqueezeBertForMaskedLM SqueezeBertConfig",
        BERT | dict(hidden_size=40, num_attention_heads=4, embedding_size=40, intermediate_size=40),
        "right",
        2,
        4,
    ),
    "tapas": (
        "TapasModel TapasConfig",
        BERT | dict(type_vocab_sizes=[3, 2, 2, 2, 2, 2, 2]),
        dict(token_type_ids=torch.zeros(3, 11, 7, dtype=torch.long)),
        2,
        5,
    ),
    "timesformer": ("TimesformerModel TimesformerConfig", VISION | dict(num_frames=2), _vision(2, 3, 12, 12), 4, 5),
    "trocr": (
        "TrOCRForCausalLM TrOCRConfig",
        dict(d_model=35, decoder_layers=2, decoder_attention_heads=5, decoder_ffn_dim=17, max_position_embeddings=61),
        "left",
        2,
        5,
    ),
    "vilt": ("ViltModel ViltConfig", BERT | VISION | dict(max_image_length=-1), dict(_vision(3, 12, 12)), 2, 5),
    "visual_bert": ("VisualBertModel VisualBertConfig", BERT | dict(visual_embedding_dim=7), "right", 2, 5),
    "xglm": (
        "XGLMForCausalLM XGLMConfig",
        dict(d_model=35, ffn_dim=17, num_layers=2, attention_heads=5, max_position_embeddings=61),
        "left",
        2,
        5,
    ),
    "xlm": ("XLMWithLMHeadModel XLMConfig", XLM, "right", 2, 5),
    "xlnet": ("XLNetLMHeadModel XLNetConfig", dict(d_model=40, n_layer=2, n_head=5, d_inner=17), "left", 2, 5),
}
"""The row of `architectures.OWN_ATTENTION` -> classes, sizes, what it reads (`given` and more), its calls and heads."""


def plain(family: str) -> tuple[PreTrainedModel, dict[str, Any], int, int]:
    """A model on transformers' attention, its input, and what it calls."""
    names, sizes, reads, calls, heads = PLAIN[family]
    model, config = names.split()
    made = getattr(transformers, config)(**(IDS if "image_size" not in sizes or family == "vilt" else {}), **sizes)
    torch.manual_seed(3)
    built = getattr(transformers, model)._from_config(made, attn_implementation="eager").eval()
    stir(built)
    if isinstance(reads, str):
        inputs = {"both": _both, "speech": _speech}.get(reads, lambda: arguments(reads))()
    else:
        inputs = {**(arguments("right") if family in ("layoutlmv3", "lxmert", "tapas", "vilt") else {}), **reads}
    return built, inputs, calls, heads
