"""Single architectures, as data: no other file of the package tells one model from another by name.

Almost nothing is needed here. Whether a model runs through transformers' attention interface is read from its class
(`interface.py`); these tables add the reason to a refusal, and hold the few differences that the code cannot read off.
"""

from __future__ import annotations

import re

import transformers

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
"""Of the installed transformers: major and minor number. Whatever differs from release to release is decided here."""

CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
"""What models call the argument for their cache, and the field of their outputs."""

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
"""model_type of what lies outside transformers' attention interface -> why. A reason for the error text, no more:
a model missing here is still refused, by what its class says."""

if VERSION < (5, 23):
    OUTSIDE["kosmos-2"] = f"its queries of an image {_MARKED}"

SEAMS: dict[str, dict[str, dict[str, str]]] = {
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
"""A file of models (modeling_*) with attention in code of its own that runs on headwise all the same -> its classes of
attention, and of other modules -> the methods of each that have another form here -> that form in `positions.py`.

Scale, mask, bias and window need no entry: they are read from what the code does to its scores (`steps.py`)."""

if VERSION >= (5, 24):  # which has these on its attention interface
    del SEAMS["codegen"], SEAMS["gptj"]

SPARSE: dict[str, str] = dict.fromkeys(
    ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "minimax_m3_vl", "mistral_large4"), _SPARSE
)
"""On the interface, but with arguments that change the result and that no dense kernel honours."""

FLOAT_MASKS: frozenset[str] = frozenset({"beit", "bigbird_pegasus", "deepseek_v4", "t5gemma2_decoder"})
"""On the interface, and computing with their mask as the float tensor that "eager" gets. For code that is traced alone,
which gets bool tensors or none: otherwise a mask becomes that tensor by itself where a model computes with it."""

UNDECLARED: dict[str, frozenset[str]] = {
    "deberta": frozenset({"embedding_size", "talking_head"}),
    "deberta-v2": frozenset(
        {"attention_head_size", "conv_act", "conv_groups", "conv_kernel_size", "embedding_size", "norm_rel_ebd"}
        | {"position_buckets", "share_att_key"}
    ),
}
"""model_type -> what its models read from their config, and the class of the config does not declare."""

BOTH_WAYS: frozenset[str] = frozenset({"xlnet"})
"""Counted among the models that write text, and every token sees all others unless a permutation says otherwise."""

CROSS_ATTENTION = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
"""How modules of cross-attention are named: a decoder without a memory does not call them; never causal."""

SUPPORTED_EXAMPLES = (
    "gpt2, gpt_neox, opt, llama, mistral, qwen2, qwen3, gemma2, gemma3, gpt_oss, phi3, bert, distilbert"
)
"""What an error names as the way out."""
