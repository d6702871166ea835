"""Tokens a second of small models of transformers, whose time is largely Python's: python benchmarks/hf_small.py.

One token beside 512 cached ones, a row: transformers as it comes ("sdpa", or "eager" where a model has no other, with a
DynamicCache) and headwise with `make_cache`, in turns. 12 layers of 768 numbers, GPT-2's dimensions, random weights in
float32; and Llama 1B's dimensions in 2 layers, bfloat16. The logits of both are compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headwise.hf import make_cache
from headwise.hf.models.architectures import CACHE

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

TOKENS = 512
VOCAB = 8000
_GPT: dict[str, Any] = dict(n_layer=12, n_embd=768, n_head=12)
_FALCON: dict[str, Any] = dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
_BLOOM: dict[str, Any] = dict(n_layer=12, hidden_size=768, n_head=12)
_LLAMA: dict[str, Any] = dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=2048)
_LARGE: dict[str, Any] = dict(
    num_hidden_layers=2, hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192
)
MODELS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "GPT-2": ("GPT2", dict(n_layer=12), torch.float32),
    "GPT-J": ("GPTJ", _GPT | dict(rotary_dim=64), torch.float32),
    "CodeGen": ("CodeGen", _GPT | dict(rotary_dim=32), torch.float32),
    "GPT-Neo": (
        "GPTNeo",
        dict(num_layers=12, hidden_size=768, num_heads=12, attention_types=[[["global", "local"], 6]]),
        torch.float32,
    ),
    "Bloom": ("Bloom", _BLOOM, torch.float32),
    "MPT": ("Mpt", dict(n_layers=12, d_model=768, n_heads=12), torch.float32),
    "Falcon, one key head": ("Falcon", _FALCON, torch.float32),
    "Falcon, new": ("Falcon", _FALCON | dict(new_decoder_architecture=True, num_kv_heads=4), torch.float32),
    "Falcon, ALiBi": ("Falcon", _FALCON | dict(alibi=True, multi_query=False), torch.float32),
    "Llama": ("Llama", _LLAMA, torch.float32),
    "Llama 1B, 2 layers": ("Llama", _LARGE, torch.bfloat16),
}
HEAD = {"GPT2": "LMHeadModel"}


def model_of(name: str, sizes: dict[str, Any], attention: str) -> PreTrainedModel:
    """A model of random weights, the same for each attention; on "eager" where it has no other."""
    kind, own, dtype = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **(dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=None) | own | sizes)
    )
    build = getattr(transformers, kind + HEAD.get(kind, "ForCausalLM"))._from_config
    torch.manual_seed(0)
    try:
        model = build(config, attn_implementation=attention)
    except ValueError:  # its attention is code of its own
        model = build(config, attn_implementation="eager")
    result: PreTrainedModel = model.to(dtype).eval()
    return result


def step_of(model: PreTrainedModel, ours: bool, tokens: int) -> Callable[[], Tensor]:
    """One token more, which is taken back."""
    cache = make_cache(model, max_length=tokens + 8) if ours else DynamicCache(config=model.config)
    ids = torch.randint(model.config.vocab_size, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    model(ids[:, :-1], **{CACHE: cache}, use_cache=True)

    def run() -> Tensor:
        logits: Tensor = model(ids[:, -1:], **{CACHE: cache}, use_cache=True).logits
        for layer in cache.layers:
            layer.crop(-1)
        return logits

    return run


def measured(
    names: tuple[str, ...] = tuple(MODELS), tokens: int = TOKENS, rounds: int = 7, seconds: float = 6, **sizes: Any
) -> dict[str, Any]:
    """The machine and a row for each model."""
    rows = []
    with torch.no_grad():
        for name in names:
            stock, ours = (model_of(name, sizes, attention) for attention in ("sdpa", "headwise"))
            ways = {"transformers": step_of(stock, False, tokens), "headwise": step_of(ours, True, tokens)}
            logits = {way: run().float() for way, run in ways.items()}
            times = clock.measure(ways, {}, rounds, seconds)
            truth = logits["transformers"]
            rows.append(
                {
                    "model": name,
                    "attention": stock.config._attn_implementation,
                    "tokens_per_second": {way: 1 / times.median(way) for way in ways},
                    "ratio": times.ratio("transformers", "headwise"),
                    "difference": float((logits["headwise"] - truth).norm() / truth.norm()),
                    "disturbed": times.disturbed,
                }
            )
    return {"machine": clock.machine(), "tokens": tokens, "results": rows}


def print_table(report: dict[str, Any]) -> None:
    grid = Table(title=f"A token beside {report['tokens']} cached ones; tokens a second", title_justify="left")
    for name in ("model", "transformers", "headwise", "times", "logits off"):
        grid.add_column(name, justify="left" if name == "model" else "right")
    for row in report["results"]:
        rates = [f"{rate:.1f}" for rate in row["tokens_per_second"].values()]
        mark = "~" if row["disturbed"] else ""
        grid.add_row(row["model"] + mark, *rates, f"{row['ratio']:.2f}", f"{row['difference']:.1e}")
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6)
    table.add_delivery(parser)
    options = parser.parse_args()
    report = measured(tuple(options.models), rounds=options.rounds, seconds=options.seconds)
    table.deliver(report, print_table, options, "hf-small")


if __name__ == "__main__":
    main()
