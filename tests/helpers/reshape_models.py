"""Tiny models of every family whose heads can be reshaped, and checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hf_folders import quiet
from hf_models import _BERT, _GQA, _IDS, _LM, BY_NAME, VOCAB, Row
from safetensors.torch import save_file

from headwise import hf
from headwise.hf.loading import verify_process as proving
from headwise.reshape.pruning.pruned_checkpoint import Pruning

DEEPSEEK = BY_NAME["DeepSeek-V3"]
FAMILIES: dict[str, Row] = {
    "llama": BY_NAME["Llama MHA"],
    "llama GQA": BY_NAME["Llama GQA"],
    "llama odd": Row("Llama odd", "LlamaForCausalLM", "LlamaConfig", 2, sizes=_LM | dict(head_dim=6)),
    "llama biased": Row(
        "Llama biased",
        "LlamaForCausalLM",
        "LlamaConfig",
        2,
        sizes=_LM | dict(head_dim=6, attention_bias=True, mlp_bias=True),
    ),
    "mistral": BY_NAME["Mistral window"],
    "mixtral": BY_NAME["Mixtral"],
    "qwen2": BY_NAME["Qwen2"],
    "qwen3": BY_NAME["Qwen3"],
    "gemma": Row("Gemma", "GemmaForCausalLM", "GemmaConfig", 2, sizes=_GQA),
    "gemma2": BY_NAME["Gemma2 softcap"],
    "gemma3_text": BY_NAME["Gemma3 text"],
    "gemma3": Row(
        "Gemma 3",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        2,
        sizes=dict(
            text_config=BY_NAME["Gemma3 text"].sizes | dict(model_type="gemma3_text"),
            vision_config=BY_NAME["ViT"].sizes | dict(vision_use_head=False),
            **dict(mm_tokens_per_image=1, image_token_index=VOCAB - 1, boi_token_index=51, eoi_token_index=50),
        ),
    ),
    "phi3": BY_NAME["Phi-3"],
    "olmo2": Row("OLMo2", "Olmo2ForCausalLM", "Olmo2Config", 2, sizes=_GQA),
    "granite": Row("Granite", "GraniteForCausalLM", "GraniteConfig", 2, sizes=_GQA | dict(attention_multiplier=0.5)),
    "cohere": Row("Cohere", "CohereForCausalLM", "CohereConfig", 2, sizes=_GQA | dict(use_qk_norm=True)),
    "smollm3": Row("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config", 2, sizes=_GQA | dict(no_rope_layers=[1, 0])),
    "gpt_oss": BY_NAME["gpt-oss sinks"],
    "deepseek_v3": replace(DEEPSEEK, sizes=DEEPSEEK.sizes | dict(num_nextn_predict_layers=0)),
    "gpt2": BY_NAME["GPT-2"],
    "gpt_bigcode": Row(
        "GPTBigCode",
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        2,
        sizes=_IDS | dict(vocab_size=VOCAB, n_embd=28, n_head=4, n_layer=2, n_positions=64),
    ),
    "gpt_neox": BY_NAME["GPT-NeoX"],
    "opt": BY_NAME["OPT"],
    "bert": BY_NAME["BERT"],
    "roberta": Row("RoBERTa", "RobertaForMaskedLM", "RobertaConfig", 2, "encoder", _BERT),
    "xlm-roberta": Row("XLM-R", "XLMRobertaForMaskedLM", "XLMRobertaConfig", 2, "encoder", _BERT),
    "camembert": Row("CamemBERT", "CamembertForMaskedLM", "CamembertConfig", 2, "encoder", _BERT),
    "electra": Row("ELECTRA", "ElectraForMaskedLM", "ElectraConfig", 2, "encoder", _BERT | dict(embedding_size=13)),
    "distilbert": BY_NAME["DistilBERT"],
    "t5": BY_NAME["T5"],
    "bart": BY_NAME["BART"],
    "whisper": BY_NAME["Whisper"],
    "vit": BY_NAME["ViT"],
}


def saved(row: Row, folder: Path, **changes: Any) -> Path:
    """A checkpoint of a row, as transformers writes it."""
    if changes:
        row = replace(row, sizes=row.sizes | changes)
    quiet(lambda: row.build().save_pretrained(folder))
    return folder


def put(pruning: Pruning, folder: Path) -> Path:
    """The result, written plainly."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(pruning.target.config)))
    tensors = {}
    for planned in pruning.tensors():
        tensor = planned.make()
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(planned.shape), planned.dtype), planned.name
        tensors[planned.name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def proved(source: Path | None, result: Path, gates: list[list[int]] | None, **more: Any) -> dict[str, Any]:
    """What the process that compares the two tells, asked in this one."""
    request = None
    if source is not None:
        with hf.checkpoint(source) as opened:
            request = {"config": dict(opened.config), "weights": [str(source / "model.safetensors")]}
    return quiet(lambda: proving.answer({"folder": str(result), "source": request, "gates": gates, **more}))


class Made:
    """A checkpoint that lies nowhere: a config, and tensors of zeros by their shapes."""

    folder, files, inputs = Path("made"), (), ()

    def __init__(self, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
        self.config, self.layouts = config, hf.layouts()
        self.tensors = {name: SimpleNamespace(dtype=torch.float32, shape=shape) for name, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros(self.tensors[name].shape)

    def chunks(self, file: str) -> Iterator[bytes]:
        raise NotImplementedError

    copy = chunks

    def check(self) -> None: ...

    def prove(self, folder: Path, request: Mapping[str, Any], *, compare: bool = True) -> dict[str, Any]:
        raise NotImplementedError


def decoder(H: int, K: int, D: int = 5, *, layers: int = 2, M: int = 26, **config: Any) -> Made:
    """A decoder with separate projections, of a class that takes any number of heads."""
    sizes = dict(model_type="mistral", num_attention_heads=H, num_key_value_heads=K, head_dim=D, hidden_size=M)
    rows = {"q_proj": (H * D, M), "k_proj": (K * D, M), "v_proj": (K * D, M), "o_proj": (M, H * D)}
    shapes = {f"model.layers.{n}.self_attn.{name}.weight": shape for n in range(layers) for name, shape in rows.items()}
    return Made(
        sizes | dict(num_hidden_layers=layers, vocab_size=11, intermediate_size=7, sliding_window=None) | config,
        {"model.embed_tokens.weight": (11, M), **shapes},
    )
