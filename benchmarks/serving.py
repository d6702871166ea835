"""Tokens a second of transformers' continuous batching by attention: `python benchmarks/serving.py [--json]`.

The model is a small Llama (grouped heads of 64, random bfloat16 weights). The requests of a case have drawn prompts and
are served by `generate_batch`, whole: from an empty cache to the last token. "headwise" reads keys and values in
transformers' pages, "headwise, copied" has pages of 64 tokens, of which transformers makes a copy for each step.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

import headwise.hf

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

WAYS = {"headwise": 256, "headwise, copied": 64, "sdpa": 256}
"""Each way and the tokens of a page."""


@dataclass(frozen=True)
class Case:
    """So many requests, the lengths of their prompts, and the tokens that each makes."""

    name: str
    requests: int
    shortest: int
    longest: int
    new: int

    def prompts(self, vocabulary: int) -> list[list[int]]:
        draw = random.Random(3)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.requests)]
        return [[draw.randrange(vocabulary) for _ in range(n)] for n in lengths]


CASES = (
    Case("prompts of 256 to 1,024, 4 new", 6, 256, 1024, 4),
    Case("prompts of 64 to 512, 24 new", 8, 64, 512, 24),
    Case("prompts of 2,048 to 3,072, 16 new", 2, 2048, 3072, 16),
)


def config(hidden: int = 512, layers: int = 2, vocab: int = 2048) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        max_position_embeddings=8192,
        eos_token_id=None,
    )


def model_of(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def served(model: LlamaForCausalLM, case: Case, way: str) -> Callable[[], list[list[int]]]:
    prompts, page = case.prompts(model.config.vocab_size), WAYS[way]
    blocks = 2 * sum(-(-(len(prompt) + case.new) // page) for prompt in prompts)  # no request waits for another's pages
    room = ContinuousBatchingConfig(page_size=page, num_blocks=blocks, max_batch_tokens=512, auto_switch_to_flash=False)
    how = GenerationConfig(max_new_tokens=case.new, do_sample=False, eos_token_id=-1)

    def generate() -> list[list[int]]:
        out = model.generate_batch(prompts, generation_config=how, continuous_batching_config=room, warmup=False)
        return [answer.generated_tokens for answer in out.values()]

    def run() -> list[list[int]]:
        if way == "sdpa":
            return generate()
        with headwise.hf.serving(model):
            return generate()

    return run


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' collection of all garbage at the end of each batch, which is no way's own time."""
    collect, log = gc.collect, logging.getLogger("ContinuousBatchingLogger")
    level = log.level
    gc.collect = lambda *_: 0
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        gc.collect = collect
        log.setLevel(level)


def measured(config: LlamaConfig, cases: Sequence[Case] = CASES, rounds: int = 3) -> dict[str, Any]:
    """The machine and a row for each case."""
    model, rows = model_of(config), []
    with quiet():
        for case in cases:
            runs = {way: served(model, case, way) for way in WAYS}
            tokens = {way: run() for way, run in runs.items()}
            alike = [sum(a == b for a, b in zip(tokens[way], tokens["sdpa"], strict=True)) for way in WAYS]
            times = clock.measure(runs, {}, rounds, seconds=20.0)
            rows.append(
                {
                    "case": f"{case.requests} {case.name}",
                    "tokens_per_second": {way: case.requests * case.new / times.median(way) for way in WAYS},
                    "ratios": {way: times.ratio(way, "headwise") for way in WAYS},
                    "ways": {way: times.summary(way) for way in WAYS},
                    "answers_as_sdpa": dict(zip(WAYS, alike, strict=True)),
                    "disturbed": times.disturbed,
                }
            )
    return {"machine": clock.machine(), "model": config.to_diff_dict(), "results": rows}


def print_table(report: dict[str, Any]) -> None:
    of, model = report["machine"], report["model"]
    title = (
        f"Llama, {model['num_hidden_layers']} layers of {model['hidden_size']}, bfloat16; transformers "
        f"{of['transformers']}; new tokens a second, prompts included; ~ other processes ran"
    )
    grid = Table(title=title, title_justify="left")
    grid.add_column("requests", no_wrap=True)
    for name in (*WAYS, "sdpa takes", "answers as sdpa's"):
        grid.add_column(name, justify="right")
    for row in report["results"]:
        rates = [f"{row['tokens_per_second'][name]:.1f}" for name in WAYS]
        same = f"{row['answers_as_sdpa']['headwise']} of {row['answers_as_sdpa']['sdpa']}"
        grid.add_row(row["case"] + ("~" if row["disturbed"] else ""), *rates, f"{row['ratios']['sdpa']:.2f}x", same)
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    table.add_delivery(parser)
    options = parser.parse_args()
    table.deliver(measured(config(), rounds=options.rounds), print_table, options, "serving")


if __name__ == "__main__":
    main()
