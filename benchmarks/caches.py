"""Decoding with each key-value cache: `python benchmarks/caches.py [--cached 4096,16384,...] [--json]`.

The model is that of `hf_end_to_end.py`: Llama-3-8B's dimensions, random bfloat16 weights, 2 layers. Every way has its
own cache, filled with the same tokens, and computes one token more; then the cache is cut back. The ways take turns.
Memory: the bytes that a cache holds, and what a step adds to the process at its peak.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaForCausalLM
from transformers.cache_utils import Fp8QuantizedLayer

import headwise.hf
import headwise.plan
from headwise.hf.models.architectures import CACHE

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, hf_end_to_end, table

BITS = {"int8": 8, "int4": 4, "int3": 3}
CACHED = (4096, 16384, 32768, 131072)
WAYS = (
    "headwise bf16",
    "headwise int8",
    "headwise int4",
    "headwise int3",
    "paged bf16",
    "sdpa",
    "eager",
    "fp8 and sdpa",
)
"""headwise's caches; transformers' DynamicCache with its attentions; its quantised cache that needs no package."""


def attention_of(way: str) -> str:
    return "eager" if way == "eager" else "sdpa" if way.endswith("sdpa") else "headwise"


def cache_of(way: str, model: LlamaForCausalLM, length: int) -> Cache:
    if way == "fp8 and sdpa":
        return Cache(layers=[Fp8QuantizedLayer() for _ in range(model.config.num_hidden_layers)])
    if attention_of(way) != "headwise":
        return DynamicCache(config=model.config)
    model.config._attn_implementation = "headwise"
    kind, bits = ("paged" if way.startswith("paged") else "static"), BITS.get(way.split()[-1])
    return headwise.hf.make_cache(model, kind, max_length=length, bits=bits)


def filled(cache: Cache, model: LlamaForCausalLM, tokens: int) -> Cache:
    """The same tokens in every cache, piece by piece."""
    config, source = model.config, torch.Generator().manual_seed(2)
    size = (1, config.num_key_value_heads, 4096, config.hidden_size // config.num_attention_heads)
    for _ in range(tokens // 4096):
        for layer in range(config.num_hidden_layers):
            k, v = (torch.randn(size, generator=source).bfloat16() for _ in range(2))
            cache.update(k, v, layer)
    return cache


def nbytes(cache: Cache) -> int:
    """Bytes of all tensors that the layers hold, one by one or in headwise's own storage."""
    own = getattr(cache, "nbytes", None)
    if own is not None:
        return int(own)
    tensors = {
        id(x): x for layer in cache.layers for x in vars(layer).values() if isinstance(x, Tensor) and x.numel() > 1
    }
    return sum(x.nbytes for x in tensors.values())


def peak_of(step: Callable[[], Tensor]) -> int | None:
    """Bytes that the step adds to the process at its peak; None where the system does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        step()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def decoding(model: LlamaForCausalLM, cached: int, rounds: int) -> dict[str, Any]:
    ids = torch.randint(model.config.vocab_size, (1, 1), generator=torch.Generator().manual_seed(3))
    caches = {way: filled(cache_of(way, model, cached + 64), model, cached) for way in WAYS}

    def step_of(way: str) -> Callable[[], Tensor]:
        def step() -> Tensor:
            model.config._attn_implementation = attention_of(way)
            out = model(ids, **{CACHE: caches[way]}).logits
            if not way.startswith("fp8"):  # transformers' fp8 layer has no crop: it grows a little
                for layer in caches[way].layers:
                    layer.crop(-1)
            return out

        return step

    steps = {way: step_of(way) for way in WAYS}
    with torch.no_grad():
        logits = {way: step().float() for way, step in steps.items()}
        peaks = {way: peak_of(step) for way, step in steps.items()}
        times = clock.measure(steps, {}, rounds, seconds=8.0)
    return {
        "case": f"decode at {cached}",
        "tokens_per_second": {way: 1 / times.median(way) for way in WAYS},
        "ratios": {way: times.ratio(way, "headwise bf16") for way in WAYS},
        "int8_over_bf16": times.ratio("headwise bf16", "headwise int8"),
        "ways": {way: times.summary(way) for way in WAYS},
        "bytes": {way: nbytes(cache) for way, cache in caches.items()},
        "peaks": peaks,
        "differences": {way: float((x - logits["eager"]).norm() / logits["eager"].norm()) for way, x in logits.items()},
        "disturbed": times.disturbed,
    }


def generating(model: LlamaForCausalLM, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """`generate` end to end: the prompt, then token by token."""
    ids = torch.randint(model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(4))

    def run_of(way: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cache = cache_of(way, model, prompt + new)
            model.config._attn_implementation = attention_of(way)
            how: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return model.generate(ids, **{CACHE: cache}, pad_token_id=0, **how)

        return run

    ways = [way for way in WAYS if not way.startswith("fp8")]
    runs = {way: run_of(way) for way in ways}
    with torch.no_grad():
        times = clock.measure(runs, {}, rounds, seconds=60.0)
    return {
        "case": f"generate {new} after {prompt}",
        "tokens_per_second": {way: new / times.median(way) for way in ways},
        "ratios": {way: times.ratio(way, "headwise bf16") for way in ways},
        "ways": {way: times.summary(way) for way in ways},
        "disturbed": times.disturbed,
    }


def predicted(model: LlamaForCausalLM, tokens: int) -> int:
    """Bytes that so many tokens take in bfloat16, by the planner."""
    plan = headwise.plan.of(model.config.to_dict(), context=tokens)
    return int(plan.bytes_per_token) * tokens


def print_table(report: dict[str, Any]) -> None:
    of = report["machine"]
    title = f"Llama-3-8B's dimensions, 2 layers, bfloat16; transformers {of['transformers']}; tokens a second"
    grid = Table(title=title, title_justify="left")
    grid.add_column("case", no_wrap=True)
    for name in (*WAYS, "over sdpa", "int8 over bf16"):
        grid.add_column(name, justify="right")
    for row in report["results"]:
        rates = [f"{row['tokens_per_second'][way]:.2f}" if way in row["tokens_per_second"] else "" for way in WAYS]
        both = row["tokens_per_second"]["headwise int8"] / row["tokens_per_second"]["headwise bf16"]
        grid.add_row(row["case"], *rates, f"{row['ratios']['sdpa']:.2f}x", f"{both:.2f}x")
        if "bytes" in row:
            grid.add_row("  MiB held", *(f"{row['bytes'][way] / 2**20:.1f}" for way in WAYS))
            peaks = ["" if row["peaks"][way] is None else f"{row['peaks'][way] / 2**20:.0f}" for way in WAYS]
            grid.add_row("  MiB more in a step", *peaks)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", default=",".join(map(str, CACHED)), help="multiples of 4096")
    parser.add_argument("--generate", default="2048,32", help="tokens of the prompt, new tokens; empty for none")
    parser.add_argument("--rounds", type=int, default=5)
    table.add_delivery(parser)
    options = parser.parse_args()
    model = hf_end_to_end.model_of(hf_end_to_end.config())
    rows = [decoding(model, int(n), options.rounds) for n in options.cached.split(",") if n]
    if options.generate:
        prompt, new = map(int, options.generate.split(","))
        rows.append(generating(model, prompt, new, options.rounds))
    report = {"machine": clock.machine(), "predicted_bytes_a_token": predicted(model, 1), "results": rows}
    table.deliver(report, print_table, options, "caches")


if __name__ == "__main__":
    main()
