"""Single architectures, as data: no other file of the package tells one model from another by name.

Almost nothing is needed here. Whether a model runs through transformers' attention interface is read from its class
(`interface.py`); these tables add the reason to a refusal, and hold the few differences that the code cannot read off.
"""

from __future__ import annotations

import re

import transformers

_ALIBI = "it adds ALiBi biases inside attention code of its own"
_OWN = "it computes attention in code of its own"
_DISENTANGLED = "its attention mixes content and position terms in code of its own"
_MARKED = "are marked as causal, and its own attention ignores the mark"
_SPARSE = "it picks single keys for each query (sparse attention), which the interface hands over as indices"

OUTSIDE: dict[str, str] = {
    "big_bird": _OWN,
    "bloom": _ALIBI,
    "bridgetower": f"its layers of images {_MARKED}",
    "codegen": _OWN,
    "deberta": _DISENTANGLED,
    "deberta-v2": _DISENTANGLED,
    "falcon": "it computes attention, with ALiBi in some sizes, in code of its own",
    "funnel": _OWN,
    "gpt_neo": _OWN,
    "gptj": _OWN,
    "informer": "it attends with some of its queries alone (ProbSparse), in code of its own",
    "layoutlmv2": _OWN,
    "layoutlmv3": _OWN,
    "led": _OWN,
    "longformer": _OWN,
    "luke": _OWN,
    "mpnet": _OWN,
    "mpt": _ALIBI,
    "mvp": _OWN,
    "openai-gpt": _OWN,
    "perceiver": _OWN,
    "prophetnet": _OWN,
    "reformer": _OWN,
    "rembert": _OWN,
    "roformer": _OWN,
    "speecht5": _OWN,
    "swinv2": _OWN,
    "tapas": _OWN,
    "trocr": _OWN,
    "vits": _OWN,
    "wavlm": _OWN,
    "xglm": _OWN,
    "xlm": _OWN,
    "xlnet": _DISENTANGLED,
}
"""model_type of what lies outside transformers' attention interface -> why. A reason for the error text, no more:
a model missing here is still refused, by what its class says."""

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    OUTSIDE["kosmos-2"] = f"its queries of an image {_MARKED}"

SPARSE: dict[str, str] = dict.fromkeys(
    ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "minimax_m3_vl", "mistral_large4"), _SPARSE
)
"""On the interface, but with arguments that change the result and that no dense kernel honours."""

FLOAT_MASKS: frozenset[str] = frozenset({"beit", "bigbird_pegasus", "deepseek_v4", "t5gemma2_decoder"})
"""On the interface, and computing with their mask as the float tensor that "eager" gets. For code that is traced alone,
which gets bool tensors or none: otherwise a mask becomes that tensor by itself where a model computes with it."""

CROSS_ATTENTION = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
"""How modules of cross-attention are named: a decoder without a memory does not call them; never causal."""

SUPPORTED_EXAMPLES = (
    "gpt2, gpt_neox, opt, llama, mistral, qwen2, qwen3, gemma2, gemma3, gpt_oss, phi3, bert, distilbert"
)
"""What an error names as the way out."""
