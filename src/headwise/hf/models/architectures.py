"""Tables of single architectures; no other file of the package treats a model specially by its name.

`support.py` finds out from a model's class whether it runs through transformers' attention interface. These tables add
the reason to a refusal and hold the few differences that the code cannot detect.
"""

from __future__ import annotations

import re

import transformers

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
"""The major and minor version of the installed transformers. All differences between releases are handled here."""

CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
"""The name of the cache in the arguments and in the outputs of models."""

_OWN = "it computes attention in code of its own"
_MARKED = "are marked as causal, and its own attention ignores the mark"
_SPARSE = "it picks single keys for each query (sparse attention), which the interface hands over as indices"

OUTSIDE: dict[str, str] = {
    "big_bird": _OWN,
    "bridgetower": f"its layers of images {_MARKED}",
    "informer": "it attends with some of its queries alone (ProbSparse), in code of its own",
    "layoutlmv2": _OWN,
    "led": _OWN,
    "longformer": _OWN,
    "luke": _OWN,
    "openai-gpt": _OWN,
    "perceiver": _OWN,
    "prophetnet": _OWN,
    "reformer": _OWN,
    "swinv2": _OWN,
    "vits": _OWN,
    "wavlm": _OWN,
}
"""The model_types outside transformers' attention interface, each with the reason for the error text. A model that is
missing here is still refused because of its class."""

if VERSION < (5, 23):
    OUTSIDE["kosmos-2"] = f"its queries of an image {_MARKED}"

OWN_ATTENTION: dict[str, dict[str, dict[str, str]]] = {
    "bark": {"BarkSelfAttention": {}},
    "blip": {"BlipAttention": {}},
    "blip_text": {"BlipTextSelfAttention": {}},
    "bloom": {"BloomAttention": {}},
    "clvp": {"ClvpSelfAttention": {}},
    "codegen": {"CodeGenAttention": {}},
    "convbert": {"ConvBertSelfAttention": {}},
    "data2vec_vision": {"Data2VecVisionSelfAttention": {}},
    "deberta": {"DisentangledSelfAttention": {}},
    "deberta_v2": {
        "DisentangledSelfAttention": {"disentangled_attention_bias": "content_and_position"},
        "DebertaV2Encoder": {"get_attention_mask": "padding_of_keys", "get_rel_pos": "no_positions"},
    },
    "falcon": {"FalconAttention": {"__call__": "bias_once"}},
    "flaubert": {"MultiHeadAttention": {}},
    "flava": {"FlavaSelfAttention": {}},
    "fsmt": {"Attention": {}},
    "funnel": {"FunnelRelMultiheadAttention": {}},
    "gpt_neo": {"GPTNeoSelfAttention": {"__call__": "without_static_cache"}},
    "gpt_neox_japanese": {"GPTNeoXJapaneseAttention": {}},
    "gptj": {"GPTJAttention": {}},
    "imagegpt": {"ImageGPTAttention": {}},
    "layoutlmv3": {"LayoutLMv3SelfAttention": {}},
    "lxmert": {"LxmertAttention": {}},
    "megatron_bert": {"MegatronBertSelfAttention": {}},
    "mgp_str": {"MgpstrAttention": {}},
    "mobilevit": {"MobileViTSelfAttention": {}},
    "mpnet": {"MPNetSelfAttention": {}, "MPNetEncoder": {"compute_position_bias": "bias_by_distance"}},
    "mpt": {"MptAttention": {}, "MptBlock": {"__call__": "tells_attention"}},
    "mvp": {"MvpAttention": {}},
    "pvt": {"PvtEfficientSelfAttention": {}},
    "rembert": {"RemBertSelfAttention": {}},
    "roformer": {"RoFormerSelfAttention": {}},
    "speecht5": {"SpeechT5Attention": {}},
    "squeezebert": {"SqueezeBertSelfAttention": {}},
    "tapas": {"TapasSelfAttention": {}},
    "timesformer": {"TimesformerSelfAttention": {}},
    "trocr": {"TrOCRAttention": {}},
    "vilt": {"ViltSelfAttention": {}},
    "visual_bert": {"VisualBertSelfAttention": {}},
    "xglm": {"XGLMAttention": {}},
    "xlm": {"MultiHeadAttention": {}},
    "xlnet": {"XLNetRelativeAttention": {}},
}
"""Modeling files (modeling_*) with their own attention code that headwise can run. Each maps its attention classes and
other module classes to the methods that are replaced, and each method to its replacement in `own_code/replacements.py`.

Scale, mask, bias and window need no entry: `own_code/recorded_ops.py` records them from the operations on the scores.
"""

if VERSION >= (5, 24):  # This version has these two on its attention interface.
    del OWN_ATTENTION["codegen"], OWN_ATTENTION["gptj"]

SPARSE: dict[str, str] = dict.fromkeys(
    ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "minimax_m3_vl", "mistral_large4"), _SPARSE
)
"""The model_types on the interface with arguments that change the result and that no dense kernel supports."""

FLOAT_MASKS: frozenset[str] = frozenset({"beit", "bigbird_pegasus", "deepseek_v4", "t5gemma2_decoder"})
"""The model_types on the interface that compute with their mask as a float tensor, as "eager" gets it. Only traced code
needs this table, because it gets bool masks or none; elsewhere a mask converts itself when a model computes with it."""

UNDECLARED: dict[str, frozenset[str]] = {
    "deberta": frozenset({"embedding_size", "talking_head"}),
    "deberta-v2": frozenset(
        {"attention_head_size", "conv_act", "conv_groups", "conv_kernel_size", "embedding_size", "norm_rel_ebd"}
        | {"position_buckets", "share_att_key"}
    ),
}
"""The config fields that models of a model_type read and their config class does not declare."""

BOTH_WAYS: frozenset[str] = frozenset({"xlnet"})
"""The model_types that transformers lists as causal language models although every token attends to all others by
default (only a permutation mask changes this)."""

CROSS_ATTENTION = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
"""The pattern of cross-attention module names. A decoder without encoder states does not call such modules, and they
are never causal."""

SUPPORTED_EXAMPLES = (
    "gpt2, gpt_neox, opt, llama, mistral, qwen2, qwen3, gemma2, gemma3, gpt_oss, phi3, bert, distilbert"
)
"""The models that an error message suggests."""
