"""Caches of 8, 4 and 3 bits: loss of a model, error of attention, bytes, and time of decoding.

    python benchmarks/small_caches.py [--model PATH] [--text FILE] [--json]

The loss is that of a text read in one pass through `headwise.hf.make_cache(model, bits=...)`, so that every query reads
stored keys. Error and time are those of `headwise.attention` for one query, bfloat16, 32 query heads on 8 of 128; the
ways take turns, and times are medians of CPU time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import headwise.hf
from headwise import models
from headwise.cache import quantization_error, quantize

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

WAYS = (None, 8, 4, 3)
LENGTHS = (512, 4096, 32768)
ROUNDS = 15


def losses(path: Path, text: str) -> dict[str, Any]:
    """Nats a token and bytes a token of the cache, for each number of bits."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="headwise").eval()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : min(512, model.config.max_position_embeddings)]
    argument = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
    out = {}
    for bits in WAYS:
        cache = headwise.hf.make_cache(model, max_length=ids.shape[1], bits=bits)
        with torch.no_grad():
            logits = model(ids, **{argument: cache}).logits
        loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
        out[name_of(bits)] = {"loss": float(loss), "bytes_a_token": cache.nbytes / ids.shape[1]}
    return {"tokens": ids.shape[1], "ways": out}


def decoding() -> list[dict[str, Any]]:
    """A row for each number of keys: microseconds of one query, and the error of its output."""
    rows = []
    for keys in LENGTHS:
        source = torch.Generator().manual_seed(keys)
        sizes = ((32, 1), (8, keys), (8, keys))
        q, k, v = (torch.randn(1, heads, n, 128, generator=source).bfloat16() for heads, n in sizes)
        forms: dict[int | None, tuple[Any, Any]] = {None: (k, v)}
        forms |= {bits: (quantize(k, bits), quantize(v, bits)) for bits in WAYS if bits is not None}
        times: dict[int | None, list[float]] = {bits: [] for bits in WAYS}
        for _ in range(ROUNDS):
            for bits, pair in forms.items():
                headwise.attention(q, *pair)
                start = time.thread_time()
                headwise.attention(q, *pair)
                times[bits].append(time.thread_time() - start)
        row: dict[str, Any] = {"keys": keys}
        for bits in WAYS:
            error = 0.0 if bits is None else float(quantization_error(q, k, v, bits=bits).out_relative.mean())
            row[name_of(bits)] = {"us": 1e6 * statistics.median(times[bits]), "error": error}
        rows.append(row)
    return rows


def name_of(bits: int | None) -> str:
    return "float" if bits is None else f"{bits} bits"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=models.tiny_path(), help="folder of a causal model")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a text for its loss")
    table.add_delivery(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    report = {
        "machine": clock.machine(),
        "model": {"name": options.model.name, **losses(options.model, options.text.read_text())},
        "decoding": decoding(),
    }
    table.deliver(report, show, options, "small-caches")


def show(report: dict[str, Any]) -> None:
    model = report["model"]
    grid = Table("", *map(name_of, WAYS), title=f"{model['name']}, {model['tokens']} tokens")
    cells = [model["ways"][name_of(bits)] for bits in WAYS]
    grid.add_row("loss, nats/token", *(f"{cell['loss']:.4f}" for cell in cells))
    grid.add_row("bytes/token", *(f"{cell['bytes_a_token']:,.0f}" for cell in cells))
    for row in report["decoding"]:
        grid.add_row(f"{row['keys']} keys, us", *(f"{row[name_of(bits)]['us']:,.0f}" for bits in WAYS))
        grid.add_row(f"{row['keys']} keys, error", *(f"{row[name_of(bits)]['error']:.1%}" for bits in WAYS))
    table.console().print(grid)


if __name__ == "__main__":
    main()
