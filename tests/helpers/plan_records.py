"""Numbers of drawn configs of every architecture, recorded where they equal what transformers' models hold and compute.

    PYTHONPATH=src:tests/helpers python tests/helpers/plan_records.py     writes tests/plan/counted.json anew

The tests that build and run these models take one architecture in four; the recorded numbers are compared for all.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plan_models
import torch

from headwise.plan.config.fields import architectures
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import model_of

FILE = Path(__file__).parents[1] / "plan" / "counted.json"
TOKENS, BATCH, NUMBER = 13, 2, 4
SEEDS = range(101, 117)


def numbers(name: str, fields: dict[str, Any]) -> list[Any]:
    """The plan's counts: parameters with and without a head, bytes of caches, operations of all tokens and of one."""
    model = model_of({**fields, "model_type": name})
    bare = model_of({**fields, "model_type": name, "architectures": [architectures()[name]["classes"]["base"]]})
    whole, step = (cost(model, TOKENS, batch=BATCH) for cost in (costs.prefill, costs.decode))
    return [
        model.total_parameters(),
        bare.total_parameters(),
        model.active_parameters(),
        *(costs.cache_bytes(model, tokens, NUMBER) + costs.state_bytes(model) for tokens in (3, TOKENS)),
        *(whole.projections, whole.dense, whole.attention, whole.rest),
        None if step is None else step.total,
    ]


def steps_of(name: str, fields: dict[str, Any]) -> set[tuple[str, int, int]]:
    """The pairs of lines of the planner that follow each other while these numbers are computed."""
    seen: set[tuple[str, int, int]] = set()
    last: dict[int, int] = {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if "/headwise/plan/" not in file:
            return None
        if event == "line":
            seen.add((file, last.get(id(frame), 0), frame.f_lineno))
        last[id(frame)] = frame.f_lineno if event == "line" else 0
        return trace

    sys.settrace(trace)
    try:
        numbers(name, fields)
    finally:
        sys.settrace(None)
    return seen


def parts_of(name: str, fields: dict[str, Any]) -> tuple[str, frozenset[str]]:
    """The architecture and the names of the parts that a model of it has."""
    model = model_of({**fields, "model_type": name})
    parts = [*model.others, *(part for layer in (*model.layers, *model.states) for part in layer.parts())]
    return name, frozenset(part.name for part in parts)


def candidates(name: str) -> Iterator[dict[str, Any]]:
    """Drawn configs, each also with one number equal to the width, because drawn sizes hardly ever are."""
    for seed in SEEDS:
        yield plan_models.random_config(name, random.Random(seed), runs=True)
    for seed in SEEDS:
        fields = plan_models.random_config(name, random.Random(seed), runs=True)
        width = next((fields[key] for key in ("hidden_size", "n_embd", "d_model", "dim") if key in fields), None)
        if type(width) is int:
            yield from ({**fields, key: width} for key, x in fields.items() if type(x) is int and x != width)


def agrees(name: str, fields: dict[str, Any]) -> bool:
    """Whether every count is that of the model that transformers builds and runs."""
    config = plan_models.config_of(name, fields)
    ours, real = model_of({**fields, "model_type": name}), plan_models.build(name, config, device="cpu")
    held = [plan_models.parameters_of(name, config, head=head) for head in (True, False)]
    pairs = [(numbers(name, fields)[:2], held), plan_models.compared_prefill(name, ours, config, real)]
    if name in plan_models.CACHED:
        pairs += plan_models.compared_caches(name, ours, config, real)
    if name in plan_models.CACHED and name != plan_models.KEEPS_ALL:
        pairs.append(plan_models.compared_decode(name, ours, config, real))
    return all(one == other for one, other in pairs)


def main() -> None:
    """Write two configs of each architecture, and each that has other parts or runs lines in an order of its own."""
    torch.set_num_threads(1)
    lines: list[str] = []
    known: set[Any] = set()
    for name in plan_models.SINGLE:
        for number, fields in enumerate(candidates(name)):
            try:
                new = (steps_of(name, fields) | {parts_of(name, fields)}) - known
                if (number < 2 or new) and agrees(name, fields):
                    known |= new
                    lines.append(json.dumps([name, fields, numbers(name, fields)]))
            except Exception:  # a config that cannot be built, or not run
                continue
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
