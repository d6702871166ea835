"""Tokens a second of a transformers model with each attention: `python benchmarks/hf_end_to_end.py [--json]`.

The model is Llama with Llama-3-8B's dimensions, random bfloat16 weights, and 2 of its 32 layers. Its vocabulary is
2/32 of Llama-3's too (8016 words), so that attention has the share of the time that it has in the whole model. Prefill
reads a prompt; decoding computes one token beside so many cached ones, with transformers' default cache, which grows by
copying, and with its static one, which writes in place (and for which transformers makes a mask).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import headwise.hf  # noqa: F401  registers attn_implementation="headwise"
from headwise.hf.models.architectures import CACHE

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table
from benchmarks.steps import random_model

ATTENTIONS = ("headwise", "sdpa", "eager")
PREFILL = (2048,)
DECODE = (4096, 16384, 32768)
LAYERS = 2
VOCAB = 128256 * LAYERS // 32


def config(
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    intermediate: int = 14336,
    vocab: int = VOCAB,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2 * max(DECODE),
        rope_theta=500000.0,
    )


def model_of(config: LlamaConfig) -> LlamaForCausalLM:
    """Random weights, in bfloat16, of a size at which all numbers stay ordinary."""
    return random_model(LlamaForCausalLM, config, torch.bfloat16, "eager")


def prefill_run(model: LlamaForCausalLM, length: int) -> Callable[[], Tensor]:
    ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))

    def run() -> Tensor:
        return model(ids, use_cache=True, logits_to_keep=1).logits

    return run


def decode_run(model: LlamaForCausalLM, cached: int, static: bool) -> Callable[[], Tensor]:
    """One more token; then the cache is cut back, so that every step is the same."""
    config = model.config
    source = torch.Generator().manual_seed(2)
    shape = (1, config.num_key_value_heads, cached, config.hidden_size // config.num_attention_heads)
    cache = StaticCache(config=config, max_cache_len=cached + 64) if static else DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, generator=source).bfloat16() for _ in range(2))
        cache.update(k, v, layer)
    ids = torch.randint(config.vocab_size, (1, 1), generator=source)

    def run() -> Tensor:
        out = model(ids, **{CACHE: cache}).logits
        for layer in cache.layers:
            if static:
                layer.cumulative_length.fill_(cached)
            else:
                layer.crop(-1)
        return out

    return run


def compared(model: LlamaForCausalLM, run: Callable[[], Tensor], tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens a second with each attention, in turns, and how far their logits are from eager's."""

    def with_attention(name: str) -> Callable[[], Tensor]:
        def switched() -> Tensor:
            model.config._attn_implementation = name  # what set_attn_implementation does, without its checks
            return run()

        return switched

    ways = {name: with_attention(name) for name in ATTENTIONS}
    with torch.no_grad():
        logits = {name: way().float() for name, way in ways.items()}
        times = clock.measure(ways, {}, rounds, seconds=8.0)
    truth = logits["eager"]
    return {
        "tokens_per_second": {name: tokens / times.median(name) for name in ways},
        "ratios": {name: times.ratio(name, "headwise") for name in ways},
        "ways": {name: times.summary(name) for name in ways},
        "differences": {name: float((x - truth).norm() / truth.norm()) for name, x in logits.items()},
        "disturbed": times.disturbed,
    }


def measured(
    config: LlamaConfig, prefill: Sequence[int] = PREFILL, decode: Sequence[int] = DECODE, rounds: int = 5
) -> dict[str, Any]:
    """The machine and a row for each length."""
    model = model_of(config)
    rows = []
    for length in prefill:
        result = compared(model, prefill_run(model, length), length, rounds)
        rows.append({"case": f"prefill of {length}", **result})
    for cached in decode:
        for static in (False, True):
            result = compared(model, decode_run(model, cached, static), 1, rounds)
            rows.append({"case": f"decode at {cached}, {'static' if static else 'default'} cache", **result})
    return {"machine": clock.machine(), "model": config.to_diff_dict(), "results": rows}


def print_table(report: dict[str, Any]) -> None:
    of = report["machine"]
    title = f"Llama-3-8B's dimensions, {LAYERS} layers, bfloat16; transformers {of['transformers']}; tokens a second"
    grid = Table(title=title, title_justify="left")
    grid.add_column("case", no_wrap=True)
    for name in (*ATTENTIONS, "against sdpa", "against eager", "logits off eager's", "sdpa's"):
        grid.add_column(name, justify="right")
    for row in report["results"]:
        rates = [f"{row['tokens_per_second'][name]:.1f}" for name in ATTENTIONS]
        ratios = [f"{row['ratios'][name]:.2f}x" for name in ATTENTIONS[1:]]
        off = [f"{row['differences'][name]:.1e}" for name in ATTENTIONS[:2]]
        grid.add_row(row["case"] + ("~" if row["disturbed"] else ""), *rates, *ratios, *off)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    table.add_delivery(parser)
    options = parser.parse_args()
    table.deliver(measured(config(), rounds=options.rounds), print_table, options, "hf")


if __name__ == "__main__":
    main()
