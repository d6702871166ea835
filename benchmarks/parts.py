"""What a part of `MultiHeadAttention` costs: a learned output gate, the largest logit of each head (QK-clip).

    python benchmarks/parts.py [--rounds 7] [--json]

The layer has d_model 1024 and 16 query heads on 4 key-value heads of 64. Training is forward and backward of 1,024
tokens; decoding is a step after 4,096 of them. Ways take turns: the module without and with each part, and the same
layer in plain PyTorch, as users write it: SDPA, and for the largest logits the scores as a matrix.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headwise
from headwise import MultiHeadAttention
from headwise.cache import StaticCache
from headwise.nn import GatedMultiHeadAttention, MaxLogitAttention, headwise_gate

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

SIZES = {"d_model": 1024, "num_heads": 16, "num_kv_heads": 4}
T, S = 1024, 4096
Modules = dict[str, MultiHeadAttention]


def modules(sizes: dict[str, int], dtype: torch.dtype) -> Modules:
    torch.manual_seed(0)
    made: Modules = {
        "plain": MultiHeadAttention(**sizes),
        "gate per number": GatedMultiHeadAttention(**sizes),
        "gate per head": GatedMultiHeadAttention(**sizes, gate=headwise_gate),
        "largest logits": MultiHeadAttention(**sizes, inner=MaxLogitAttention()),
    }
    for module in made.values():
        module.load_state_dict(made["plain"].state_dict(), strict=False)
    return {name: module.to(dtype) for name, module in made.items()}


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def projected(of: MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return split(of.q_proj(x), of.num_heads), split(of.k_proj(x), of.num_kv_heads), split(of.v_proj(x), of.num_kv_heads)


def mixed(of: MultiHeadAttention, x: Tensor, out: Tensor) -> Tensor:
    """The end of the layer: the gate, if there is one, and W_O."""
    if isinstance(of, GatedMultiHeadAttention):
        gate = of.gate(x)
        out = out * (gate if gate.ndim == 4 else gate[..., None])
    return of.o_proj(out.transpose(1, 2).flatten(2))


def by_sdpa(of: MultiHeadAttention, x: Tensor) -> Tensor:
    return mixed(of, x, scaled_dot_product_attention(*projected(of, x), is_causal=True, enable_gqa=True))


def by_matrix(of: MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer, and the largest logit of each head, from the scores of all pairs."""
    q, k, v = projected(of, x)
    k, v = (y.repeat_interleave(of.num_heads // of.num_kv_heads, 1) for y in (k, v))
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
    return mixed(of, x, scores.softmax(-1) @ v), scores.detach().amax((0, 2, 3))


def training(made: Modules, length: int, dtype: torch.dtype) -> dict[str, clock.Run]:
    """Forward and backward of each way; each returns the layer's output."""
    x = torch.randn(1, length, made["plain"].d_model, generator=torch.Generator().manual_seed(1)).to(dtype)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    calls = {name: partial(module, mask=headwise.causal()) for name, module in made.items()}
    calls |= {f"PyTorch, {name}": partial(by_sdpa, made[name]) for name in list(made)[:3]}
    calls["PyTorch, largest logits"] = lambda x: by_matrix(made["plain"], x)[0]

    def run(call: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        out: Tensor = call(leaf)
        out.backward(grad)
        return out

    return {name: partial(run, call) for name, call in calls.items()}


def decoding(made: Modules, cached: int, dtype: torch.dtype) -> dict[str, clock.Run]:
    """A step of each way after so many tokens; the step is taken back, so that all are alike."""
    of = made["plain"]
    source = torch.Generator().manual_seed(3)
    k, v = (torch.randn(1, of.num_kv_heads, cached, of.head_dim, generator=source).to(dtype) for _ in range(2))
    x = torch.randn(1, 1, of.d_model, generator=source).to(dtype)

    def ours(module: MultiHeadAttention, cache: StaticCache) -> Tensor:
        out, after = module(x, cache=cache)
        after.truncate(cached)
        return out

    def theirs(module: MultiHeadAttention) -> Tensor:
        q, *new = projected(module, x)
        keys, values = (torch.cat([old, y], 2) for old, y in zip((k, v), new, strict=True))
        return mixed(module, x, scaled_dot_product_attention(q, keys, values, enable_gqa=True))

    ways: dict[str, clock.Run] = {}
    for name in list(made)[:3]:
        module = made[name]
        cache = StaticCache(1, of.num_kv_heads, of.head_dim, capacity=cached + 8, dtype=dtype).append(k, v)
        ways[name] = partial(ours, module, cache)
        ways[f"PyTorch, {name}"] = partial(theirs, module)
    return ways


def measured(rounds: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A row for training and one for decoding."""
    rows = []
    for kind in ("training", "decoding"):
        made = modules(SIZES, dtype)
        ways = training(made, T, dtype) if kind == "training" else decoding(made, S, dtype)
        with torch.set_grad_enabled(kind == "training"):
            for run in ways.values():
                run()
            times = clock.measure(ways, {}, rounds, 20.0)
        case = {**SIZES, "tokens": T if kind == "training" else S}
        ms = {way: times.summary(way) for way in times.seconds}
        name = str(dtype).removeprefix("torch.")
        rows.append({"kind": kind, "case": case, "dtype": name, "ms": ms, "disturbed": times.disturbed})
    return rows


def print_table(report: dict[str, Any]) -> None:
    grid = Table(title="Milliseconds of a layer by its parts", title_justify="left")
    for name in ("", "way", "ms", "quartiles"):
        grid.add_column(name)
    for row in report["results"]:
        for way, ms in row["ms"].items():
            quartiles = f"{ms['q25_ms']:.3g} to {ms['q75_ms']:.3g}"
            grid.add_row(f"{row['kind']}, {row['dtype']}", way, f"{ms['median_ms']:.3g}", quartiles)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    table.add_delivery(parser)
    options = parser.parse_args()
    rows = [row for dtype in (torch.float32, torch.bfloat16) for row in measured(options.rounds, dtype)]
    table.deliver({"machine": clock.machine(), "results": rows}, print_table, options, "parts")


if __name__ == "__main__":
    main()
