"""Tiny random transformers models of many kinds, and their inputs.

Sizes are small and mostly prime to one another; the weights are stirred so that attention is far from uniform and a
wrong mask, scale, softcap or sink moves the logits by much more than rounding does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import headwise.hf  # noqa: F401  (registers)

B, T, VOCAB, WINDOW = 3, 11, 53, 4
PAD = 0


@dataclass(frozen=True)
class Row:
    """One model: the names of its classes in transformers, its config, and how many attention calls a forward makes."""

    name: str
    model: str
    config: str
    calls: int
    kind: str = "decoder"  # or encoder, seq2seq, speech, vision, both
    sizes: dict[str, Any] = field(default_factory=dict)

    def build(self, seed: int = 3, *, attention: str = "eager", **sizes: Any) -> PreTrainedModel:
        config = getattr(transformers, self.config)(**(self.sizes | sizes))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = (
                getattr(transformers, self.model)
                ._from_config(config, attn_implementation=attention, experts_implementation="eager")
                .eval()
            )
            stir(model)
        return model


def stir(model: nn.Module) -> None:
    """Weights of unit gain in place of the timid ones of an initialisation; vectors (norms, biases, sinks) moved."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                gain = 3.0 if "q_proj" in name or "query" in name or "c_attn" in name else 1.0
                weight.normal_(std=gain * weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.3 * torch.randn_like(weight))


_IDS: dict[str, Any] = dict(pad_token_id=PAD, bos_token_id=1, eos_token_id=None)
_LM: dict[str, Any] = dict(
    _IDS,
    vocab_size=VOCAB,
    hidden_size=28,
    intermediate_size=17,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
_GQA: dict[str, Any] = _LM | dict(num_key_value_heads=2, head_dim=6)
_HALF = ["sliding_attention", "full_attention"]
_BERT: dict[str, Any] = _LM | dict(hidden_size=28, type_vocab_size=2)
_MOE: dict[str, Any] = _GQA | dict(num_local_experts=3, num_experts_per_tok=2)

ROWS: tuple[Row, ...] = (
    Row(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        2,
        sizes=_IDS | dict(vocab_size=VOCAB, n_embd=28, n_head=4, n_layer=2, n_positions=64),
    ),
    Row("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", 2, sizes=_LM | dict(hidden_size=32, rotary_pct=0.5)),
    Row("OPT", "OPTForCausalLM", "OPTConfig", 2, sizes=_LM | dict(ffn_dim=17, word_embed_proj_dim=28)),
    Row("Llama MHA", "LlamaForCausalLM", "LlamaConfig", 2, sizes=_LM | dict(hidden_size=24)),
    Row("Llama GQA", "LlamaForCausalLM", "LlamaConfig", 2, sizes=_GQA),
    Row("Mistral window", "MistralForCausalLM", "MistralConfig", 2, sizes=_GQA | dict(sliding_window=WINDOW)),
    Row("Mixtral", "MixtralForCausalLM", "MixtralConfig", 2, sizes=_MOE | dict(sliding_window=WINDOW)),
    Row(
        "Qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        2,
        sizes=_GQA | dict(layer_types=_HALF, sliding_window=WINDOW, use_sliding_window=True),
    ),
    Row("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", 2, sizes=_GQA),
    Row(
        "Gemma2 softcap",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        2,
        sizes=_GQA
        | dict(attn_logit_softcapping=2.0, sliding_window=WINDOW, layer_types=_HALF, query_pre_attn_scalar=7),
    ),
    Row(
        "Gemma3 text",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        2,
        sizes=_GQA | dict(sliding_window=WINDOW, layer_types=_HALF),
    ),
    Row(
        "gpt-oss sinks",
        "GptOssForCausalLM",
        "GptOssConfig",
        2,
        sizes=_MOE
        | dict(sliding_window=WINDOW, layer_types=_HALF, rope_parameters=dict(rope_type="default", rope_theta=1e4)),
    ),
    Row(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        2,
        sizes=_LM
        | dict(
            num_key_value_heads=4,
            q_lora_rank=11,
            kv_lora_rank=13,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=7,
            moe_intermediate_size=5,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        ),
    ),
    Row(
        "Phi-3",
        "Phi3ForCausalLM",
        "Phi3Config",
        2,
        sizes=_LM | dict(hidden_size=24, num_key_value_heads=2, sliding_window=WINDOW),
    ),
    Row(
        "Llama4 chunked",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        2,
        sizes=_MOE
        | dict(
            intermediate_size_mlp=17, attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"]
        ),
    ),
    Row("Doge", "DogeForCausalLM", "DogeConfig", 2, sizes=_GQA | dict(keep_window_size=32)),
    Row("BERT", "BertForMaskedLM", "BertConfig", 2, "encoder", _BERT),
    Row(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        2,
        "encoder",
        _IDS | dict(vocab_size=VOCAB, dim=28, n_heads=4, n_layers=2, hidden_dim=17, max_position_embeddings=64),
    ),
    Row(
        "ALBERT", "AlbertForMaskedLM", "AlbertConfig", 3, "encoder", _LM | dict(embedding_size=13, num_hidden_layers=3)
    ),
    Row(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        2,
        "encoder",
        _LM | dict(hidden_size=24, local_attention=4, layer_types=_HALF, cls_token_id=1, sep_token_id=2),
    ),
    Row(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        6,
        "seq2seq",
        _IDS | dict(vocab_size=VOCAB, d_model=28, d_kv=7, d_ff=17, num_layers=2, num_heads=4, decoder_start_token_id=1),
    ),
    Row(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        6,
        "seq2seq",
        _IDS
        | dict(
            vocab_size=VOCAB,
            d_model=28,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=17,
            decoder_ffn_dim=17,
            max_position_embeddings=64,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
        ),
    ),
    Row(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        6,
        "speech",
        _IDS
        | dict(
            vocab_size=VOCAB,
            d_model=28,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=17,
            decoder_ffn_dim=17,
            num_mel_bins=5,
            max_source_positions=13,
            max_target_positions=64,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
    ),
    Row(
        "ViT",
        "ViTForImageClassification",
        "ViTConfig",
        2,
        "vision",
        dict(
            hidden_size=28,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=17,
            image_size=12,
            patch_size=4,
        ),
    ),
    Row(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        4,
        "both",
        dict(
            text_config=dict(_LM, eos_token_id=VOCAB - 1),
            vision_config=dict(
                hidden_size=28,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=17,
                image_size=12,
                patch_size=4,
            ),
            projection_dim=19,
        ),
    ),
)
BY_NAME = {row.name: row for row in ROWS}
DECODERS = tuple(row for row in ROWS if row.kind == "decoder")
OUTSIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "big_bird": ("BigBirdForMaskedLM", "BigBirdConfig", _BERT | dict(hidden_size=24)),
    "longformer": ("LongformerForMaskedLM", "LongformerConfig", _BERT | dict(hidden_size=24, attention_window=4)),
    "luke": ("LukeForMaskedLM", "LukeConfig", _BERT | dict(hidden_size=24, entity_vocab_size=5, entity_emb_size=7)),
    "openai-gpt": (
        "OpenAIGPTLMHeadModel",
        "OpenAIGPTConfig",
        dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=32),
    ),
}
"""model_type -> (model, config, sizes) of models not on the attention interface that do not run on headwise."""


# -- inputs -----------------------------------------------------------------------------------------------------------


def token_ids(length: int = T, seed: int = 5) -> Tensor:
    """(B, length) ids, never the pad."""
    return torch.randint(2, VOCAB - 1, (B, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, length: int = T) -> Tensor:
    """(B, length) of 1 and 0: nothing padded, `left`, `right`, or `holes` in the middle; row 0 is always whole."""
    real = torch.ones(B, length, dtype=torch.long)
    for row, n in ((1, 2), (2, 5)):
        where = {"none": slice(0, 0), "left": slice(0, n), "right": slice(length - n, length), "holes": slice(3, 3 + n)}
        real[row, where[side]] = 0
    return real


def inputs(row: Row, side: str = "none", masked: bool = True) -> dict[str, Tensor]:
    """What the model takes; `side`: where the text is padded. Without `masked` no attention mask is given at all."""
    noise = torch.Generator().manual_seed(7)
    ids, real = token_ids(), padding(side)
    arguments: dict[str, Tensor] = {}
    if row.kind in ("decoder", "encoder", "seq2seq", "both"):
        arguments["input_ids"] = torch.where(real.bool(), ids, PAD)
        if masked:
            arguments["attention_mask"] = real
    if row.kind == "both":
        arguments["input_ids"][:, -1 if side != "right" else 5] = VOCAB - 1
    if row.kind == "seq2seq" or row.kind == "speech":
        arguments["decoder_input_ids"] = token_ids(7, seed=11)
        if masked:
            arguments["decoder_attention_mask"] = padding(side, 7)
    if row.kind == "speech":
        arguments["input_features"] = torch.randn(B, 5, 26, generator=noise)
    if row.kind in ("vision", "both"):
        arguments["pixel_values"] = torch.randn(B, 3, 12, 12, generator=noise)
    return arguments


def real_rows(row: Row, side: str) -> Tensor:
    """Which rows of the output are of real tokens, as an index."""
    if row.kind in ("vision", "both"):
        return torch.ones(B, dtype=torch.bool)
    return padding(side, 7 if row.kind in ("seq2seq", "speech") else T).bool()


def logits(model: PreTrainedModel, arguments: dict[str, Any]) -> Tensor:
    """The model's main output."""
    dtype = next(model.parameters()).dtype
    arguments = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in arguments.items()}
    with torch.no_grad():
        out = model(**arguments)
    return out.logits_per_image if "logits_per_image" in out else out.logits
