"""Numbers of drawn configs of every architecture, recorded where they equal what transformers' models hold and compute.

    PYTHONPATH=src:tests/helpers python tests/helpers/plan_records.py     writes tests/plan/counted.json anew

The tests that build and run these models take one architecture in four; the recorded numbers are compared for all.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from headwise.plan.config.fields import architectures
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import model_of

FILE = Path(__file__).parents[1] / "plan" / "counted.json"
TOKENS, BATCH, NUMBER = 13, 2, 4
SEEDS = (101, 102)


def numbers(name: str, fields: dict[str, Any]) -> list[Any]:
    """The plan's counts: parameters with and without a head, bytes of caches, and operations of all tokens and of one."""
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


def main() -> None:
    """Draw the configs, compare every count with transformers' model, and write those that agree."""
    import plan_models
    import torch

    torch.set_num_threads(1)
    lines = []
    for name in plan_models.SINGLE:
        for seed in SEEDS:
            fields = plan_models.random_config(name, random.Random(seed), runs=True)
            config = plan_models.config_of(name, fields)
            ours, real = model_of({**fields, "model_type": name}), plan_models.build(name, config, device="cpu")
            made = numbers(name, fields)
            assert made[:2] == [plan_models.parameters_of(name, config, head=head) for head in (True, False)], name
            pairs = [plan_models.compared_prefill(name, ours, config, real)]
            if name in plan_models.CACHED:
                pairs += plan_models.compared_caches(name, ours, config, real)
            if name in plan_models.CACHED and name != plan_models.KEEPS_ALL:
                pairs.append(plan_models.compared_decode(name, ours, config, real))
            if all(one == other for one, other in pairs):
                lines.append(json.dumps([name, fields, made]))
            else:
                print(name, seed, pairs)
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
