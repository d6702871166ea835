"""Tokens a second of hybrid models by cache, and its bytes: `python benchmarks/hybrid.py [--cached 2048] [--json]`.

The models have random weights and the sizes of LFM2-350M (6 of 16 layers attend, 10 have a short convolution) and of
Qwen3.5-0.8B (6 of 24 attend, 18 have a state), with a vocabulary of 32,768. A prompt of 64 tokens makes the states, and
random keys and values fill the layers that attend. Ways take turns: transformers' own cache with PyTorch's attention,
as users run these models; headwise's attention with `make_cache`, in the model's dtype, in 8 and in 4 bits; and with
`fast_decode`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.cache_utils import LinearAttentionLayer

import headwise.hf
from headwise.hf.models.architectures import CACHE

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table
from benchmarks.steps import in_turns, random_model, timed

PROMPT, STEPS = 64, 8
VOCAB = 32768
ATTENDS, CONV, STATE = "full_attention", "conv", "linear_attention"
FAMILIES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "LFM2-350M": (
        Lfm2ForCausalLM,
        Lfm2Config(
            vocab_size=VOCAB,
            hidden_size=1024,
            intermediate_size=6656,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=8,
            layer_types=[ATTENDS if layer in (2, 5, 8, 10, 12, 14) else CONV for layer in range(16)],
        ),
    ),
    "Qwen3.5-0.8B": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            vocab_size=VOCAB,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            linear_num_value_heads=16,
            max_position_embeddings=1 << 18,
            layer_types=[ATTENDS if layer % 4 == 3 else STATE for layer in range(24)],
            tie_word_embeddings=True,
        ),
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "transformers": {"attention": "sdpa"},
    "headwise": {"attention": "headwise"},
    "8 bits": {"attention": "headwise", "bits": 8},
    "4 bits": {"attention": "headwise", "bits": 4},
    "fast_decode": {"attention": "headwise", "fast": True},
}


class Way:
    """One cache of a model, filled with `cached` tokens, and the steps that go on from it."""

    def __init__(
        self, model: PreTrainedModel, cached: int, attention: str, bits: int | None = None, fast: bool = False
    ) -> None:
        self.model, self.attention, self.fast = model, attention, fast
        self.ids = torch.randint(model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(1))
        if attention == "headwise":
            model.set_attn_implementation("headwise")
            self.cache: Any = headwise.hf.make_cache(model, max_length=cached + 512, bits=bits)  # type: ignore[arg-type]
        else:
            self.cache = DynamicCache(config=model.config)
        self._run(self.ids)
        of, source = model.config, torch.Generator().manual_seed(2)
        dim = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
        shape = (1, of.num_key_value_heads, cached - PROMPT, dim)
        for number, kind in enumerate(of.layer_types):
            if kind == ATTENDS:
                key, value = (torch.randn(shape, generator=source).to(model.dtype) for _ in range(2))
                self.cache.update(key, value, number)

    def _run(self, ids: torch.Tensor) -> torch.Tensor:
        self.model.set_attn_implementation(self.attention)
        with torch.inference_mode():
            return self.model(ids, **{CACHE: self.cache}, logits_to_keep=1).logits[0, -1]

    def logits(self) -> torch.Tensor:
        """Those of the next step."""
        return self._run(self.ids[:, :1])

    def times(self) -> list[float]:
        """Milliseconds of the next steps."""
        self.model.set_attn_implementation(self.attention)
        return timed(self.model, self.ids[:, :1], self.cache, STEPS, fast=self.fast)

    def nbytes(self) -> dict[str, int]:
        """Bytes of the keys and values, and of the states, of the tokens that are there now."""
        states = sum(
            kept.nbytes
            for layer in self.cache.layers
            if isinstance(layer, LinearAttentionLayer)
            for of in (layer.conv_states, layer.recurrent_states)
            for kept in of.values()
            if kept is not None
        )
        if self.attention == "headwise":
            return {"keys and values": self.cache.nbytes, "states": states}
        kept = [
            x for layer in self.cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
        ]
        return {"keys and values": sum(x.nbytes for x in kept if isinstance(x, torch.Tensor)), "states": states}


def built(name: str, dtype: torch.dtype) -> PreTrainedModel:
    kind, config = FAMILIES[name]
    return random_model(kind, config, dtype)


def measured(name: str, cached: int, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """Median milliseconds of a step, and the bytes of the cache, by way."""
    model = built(name, dtype)
    ways = {way: Way(model, cached, **how) for way, how in WAYS.items()}
    bytes_of = {way: one.nbytes() for way, one in ways.items()}
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "cached": cached,
        "ms": in_turns({way: one.times for way, one in ways.items()}, turns),
        "bytes": bytes_of,
    }


def print_table(report: dict[str, Any]) -> None:
    grid = Table("model", "cached", *WAYS, title="Tokens a second, and MB of keys and values")
    for row in report["results"]:
        cells = [f"{1e3 / row['ms'][way]:.1f} ({row['bytes'][way]['keys and values'] / 1e6:.1f})" for way in WAYS]
        grid.add_row(row["model"], str(row["cached"]), *cells)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--cached", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=3)
    table.add_delivery(parser)
    options = parser.parse_args()
    rows = [
        measured(name, cached, getattr(torch, options.dtype), options.turns)
        for name in options.models
        for cached in options.cached
    ]
    table.deliver({"machine": clock.machine(), "results": rows}, print_table, options, "hybrid")


if __name__ == "__main__":
    main()
