"""Small checkpoint folders, made without a model: what is opened and written is tensors by name, whatever they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import headwise.hf as hf
from headwise.reshape.write.manifest import Manifest
from headwise.reshape.write.writer import kept, write

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "head_dim": 3,
    "hidden_size": 12,
    "intermediate_size": 7,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 53,
}
TOKENIZER = {"tokenizer.json": '{"model": {}}', "tokenizer_config.json": '{"bos_token": "<s>"}'}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, Tensor]:
    """Of every layer a matrix and a norm of another dtype; and numbers that are no weights."""
    state: dict[str, Tensor] = {"model.embed_tokens.weight": torch.randn(53, 12)}
    for layer in range(2):
        state[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.randn(12, 13)
        state[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(13).bfloat16()
        state[f"model.layers.{layer}.mask"] = torch.randint(2, (5, 3)).bool()
    return state | {
        "model.positions": torch.arange(7),
        "model.nothing": torch.empty(0, 3),
        "model.scale": torch.tensor(2.0),
    }


def made(folder: Path, *, shards: int = 1, **config: Any) -> Path:
    """A whole folder; of two shards, layer 1 lies in the second."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text)
    state = tensors()
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    table = {name: SHARDS["layers.1" in name] for name in state}
    for shard in SHARDS:
        part = {name: tensor for name, tensor in state.items() if table[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def copied(source: Path, destination: Path, **options: Any) -> Manifest:
    """The checkpoint written again as it is."""
    with hf.checkpoint(source) as opened:
        planned = [kept(opened, name) for name in opened.tensors]
        return write(destination, config=opened.config, tensors=planned, source=opened, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
