"""A look beside what other tools do first: `python benchmarks/look_peers.py [--length 128 512] [--way ...] [--json]`.

One model for all, GPT-2's size (12 layers of 12 heads, d_model 768) with random float32 weights. Each way runs in a
process of its own: seconds (median of three, or one where it takes long), MiB that it adds at its peak, and bytes of
what it leaves to work with.

- `forward`: the model's own forward with "sdpa", logits of the last token.
- `headwise`: `look.at` with every default role; its JSON.
- `eager`: transformers' `output_attentions=True`; the matrices.
- `transformer_lens`: `run_with_cache` of the patterns alone; the cache. Where TransformerLens is installed.
- `bertviz`: eager's matrices in `model_view`; its page. Where BertViz is installed.

A way that holds all matrices needs at least layers x heads x tokens^2 numbers: where that exceeds `--limit` (GiB) it is
not run, and the table says what it would take. The others run under that limit of address space, and under `--seconds`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table
from benchmarks.look import HEADS, LAYERS, Peak, model_of

LENGTHS = (128, 512, 2048, 8192)
SHORT = 3.0  # seconds: what takes less is run three times
NUMBER = 4  # bytes of a weight in a tensor
FLOAT = 32  # bytes of a Python float in a list

Run = Callable[[torch.Tensor], Callable[[], int]]
"""Reads ids; what it returns tells the bytes of what is left, outside of the time."""


def forward(model: Any) -> Run:
    def run(ids: torch.Tensor) -> Callable[[], int]:
        with torch.no_grad():
            logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
        return lambda: logits.nbytes

    return run


def headwise(model: Any) -> Run:
    import headwise.hf  # noqa: F401  registers attn_implementation="headwise"
    from headwise import look

    def run(ids: torch.Tensor) -> Callable[[], int]:
        seen = look.at(model, ids)
        return lambda: len(json.dumps(seen.to_dict()))

    return run


def _matrices(model: Any, ids: torch.Tensor) -> Any:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(ids, use_cache=False, logits_to_keep=1, output_attentions=True).attentions


def eager(model: Any) -> Run:
    def run(ids: torch.Tensor) -> Callable[[], int]:
        matrices = _matrices(model, ids)
        return lambda: sum(one.nbytes for one in matrices)

    return run


def transformer_lens(model: Any) -> Run:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    from headwise import models

    words = AutoTokenizer.from_pretrained(models.tiny_path())  # it asks for one, and reads ids here
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=words)

    def run(ids: torch.Tensor) -> Callable[[], int]:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
        patterns = [cache[name] for name in cache if name.endswith("hook_pattern")]
        if len(patterns) != LAYERS:
            raise RuntimeError(f"the cache has {len(patterns)} patterns of {LAYERS} layers: {list(cache)[:9]}")
        return lambda: sum(one.nbytes for one in patterns)

    return run


def bertviz(model: Any) -> Run:
    from bertviz import model_view

    def run(ids: torch.Tensor) -> Callable[[], int]:
        words = [str(i) for i in ids[0].tolist()]
        page = model_view(list(_matrices(model, ids)), words, html_action="return")
        return lambda: len(page.data)

    return run


WAYS: dict[str, Callable[[Any], Run]] = {
    "forward": forward,
    "headwise": headwise,
    "eager": eager,
    "transformer_lens": transformer_lens,
    "bertviz": bertviz,
}
PEERS = ("transformer_lens", "bertviz")


def least(way: str, length: int) -> int:
    """Bytes that a way holds at least: of those that hold every matrix."""
    numbers = LAYERS * HEADS * length**2
    return {"eager": NUMBER, "transformer_lens": NUMBER, "bertviz": NUMBER + FLOAT}.get(way, 0) * numbers


def one(way: str, length: int, limit: float) -> dict[str, Any]:
    """A row, in this process."""
    model = model_of(max(length, 128))
    ids = torch.randint(50000, (1, length), generator=torch.Generator().manual_seed(1))
    run = WAYS[way](model)
    resource.setrlimit(resource.RLIMIT_AS, (int(limit * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]))
    run(ids[:, :17])
    peak, seconds = Peak(), []
    try:
        while len(seconds) < (3 if not seconds or seconds[0] < SHORT else 1):
            start = time.perf_counter()
            left = run(ids)
            seconds.append(time.perf_counter() - start)
        mib = peak.added()
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        return {"failed": f"out of memory under {limit:g} GiB"}
    return {"seconds": statistics.median(seconds), "mib": mib, "bytes": left()}


def row(way: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """A row, from a process of its own; or why there is none."""
    about: dict[str, Any] = {"way": way, "length": length}
    if way in PEERS:
        try:
            importlib.import_module(way)
        except ImportError as error:
            return {**about, "failed": f"not installed: {error}"}
    needed = least(way, length)
    if needed > options.limit * 2**30:
        return {**about, "failed": f"not run: at least {needed / 1e9:.0f} GB"}
    command = [sys.executable, __file__, "--one", way, str(length), "--limit", str(options.limit)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
    except subprocess.TimeoutExpired:
        return {**about, "failed": f"not done after {options.seconds:g} s"}
    if done.returncode:
        return {**about, "failed": done.stderr.strip().splitlines()[-1][:200]}
    return {**about, **json.loads(done.stdout.splitlines()[-1])}


def versions() -> dict[str, str | None]:
    """Of the peers."""
    by_name: dict[str, str | None] = {}
    for name in PEERS:
        try:
            by_name[name] = version(name.replace("_", "-"))
        except PackageNotFoundError:
            by_name[name] = None
    return by_name


def print_table(report: dict[str, Any]) -> None:
    grid = Table("tokens", "way", "seconds", "MiB added", "MB left", title=f"{LAYERS} x {HEADS} heads")
    for one_row in report["results"]:
        if "failed" in one_row:
            cells = [one_row["failed"], "", ""]
        else:
            cells = [table.number(one_row["seconds"]), str(one_row["mib"]), table.number(one_row["bytes"] / 1e6)]
        grid.add_row(str(one_row["length"]), one_row["way"], *cells)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--limit", type=float, default=12.0, help="GiB of address space a process may take")
    parser.add_argument("--seconds", type=float, default=300.0, help="a process is ended after so long")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "LENGTH"), help=argparse.SUPPRESS)
    table.add_delivery(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], int(options.one[1]), options.limit)))
        return
    rows = [row(way, length, options) for length in options.length for way in options.way]
    report = {"machine": clock.machine() | versions(), "limit_gib": options.limit, "results": rows}
    table.deliver(report, print_table, options, "look-peers")


if __name__ == "__main__":
    main()
