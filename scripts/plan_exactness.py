"""Checks that the planner is exact: every architecture against transformers, on hundreds of random configs each.

    .venv/bin/python scripts/plan_exactness.py --configs 300 --runs 20 [ARCHITECTURE ...]

For each config the parameters of the model that transformers builds on the meta device, with its head and without. For
the first few (`--runs`) the model is run: its caches are measured, growing and fixed, and its matrix products counted,
for a prefill and for one decoded token. Then fields of other architectures are added, one at a time, to see that none
changes a model without a note, and the built-in cards are built at full size. Prints the table of docs/plan.md; exit
code 1 where anything differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]

import torch  # noqa: E402
from plan_models import (  # noqa: E402
    KEEPS_ALL,
    SINGLE,
    build,
    compared_caches,
    compared_decode,
    compared_prefill,
    config_of,
    parameters_of,
    random_config,
    strange_and_wrong,
)
from tower_models import COMPOSITE, composite_config, composite_model, random_composite  # noqa: E402

from headwise import plan  # noqa: E402
from headwise.plan.config.fields import architectures  # noqa: E402
from headwise.plan.model.model import model_of  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("architectures", nargs="*", default=SINGLE)
    parser.add_argument("--configs", type=int, default=300)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    print(
        "| model_type | config class | parameters | cache | prefill FLOPs | decode FLOPs |\n|---|---|---|---|---|---|"
    )
    start, wrong, configs = time.perf_counter(), 0, 0
    for name in options.architectures:
        right = parameters_right(name, options.configs)
        ran = runs_right(name, options.runs)
        cells = [f"{right} of {options.configs}", *(share(ran, what) for what in ("cache", "prefill", "decode"))]
        wrong += options.configs - right + sum(n for what, n in ran.items() if what.endswith("wrong"))
        configs += options.configs
        print(f"| {name} | {architectures()[name]['classes']['config']} | {' | '.join(cells)} |", flush=True)
    for name in COMPOSITE if options.architectures is SINGLE else []:
        right = towers_right(name, options.configs)
        wrong, configs = wrong + options.configs - right, configs + options.configs
        cells = f"{right} of {options.configs} | - | - | -"
        print(f"| {name} | {architectures()[name]['classes']['config']} | {cells} |", flush=True)
    strange = sum(strange_wrong(name) for name in options.architectures)
    cards = [name for name in plan.cards() if not card_right(name)]
    print(
        f"\nfields of other architectures that change a model unnoted: {strange}; cards that differ: {cards or 'none'}"
    )
    wrong += strange + len(cards)
    seconds = time.perf_counter() - start
    count = len(options.architectures) + (len(COMPOSITE) if options.architectures is SINGLE else 0)
    print(f"\n{count} architectures, {configs} configs, {wrong} wrong, {seconds:.0f} s")
    return 1 if wrong else 0


def parameters_right(name: str, count: int) -> int:
    """How many of the configs have equal parameters, with the head or (every fifth) without."""
    right = 0
    for seed in range(count):
        fields, head = random_config(name, random.Random(seed)), seed % 5 > 0
        bare = {} if head else {"architectures": [architectures()[name]["classes"]["base"]]}
        ours = model_of({**fields, **bare, "model_type": name}).total_parameters()
        right += ours == parameters_of(name, config_of(name, fields), head=head)
    return right


def towers_right(name: str, count: int) -> int:
    """How many configs of a model with towers have equal parameters, all towers included."""
    right = 0
    for seed in range(count):
        fields = random_composite(name, random.Random(seed))
        real = composite_model(name, composite_config(name, fields))
        theirs = sum(parameter.numel() for parameter in real.parameters())
        right += model_of({**fields, "model_type": name}).total_parameters() == theirs
    return right


def runs_right(name: str, count: int) -> Counter[str]:
    """Counts of what was right and wrong on models that were run."""
    counts: Counter[str] = Counter()
    for seed in range(count):
        fields = random_config(name, random.Random(1000 + seed), runs=True)
        config = config_of(name, fields)
        real = build(name, config, device="cpu")
        ours = model_of({**fields, "model_type": name})
        checks = {"prefill": [compared_prefill(name, ours, config, real)]}
        if not ours.is_encoder:
            checks["cache"] = compared_caches(name, ours, config, real)
            if name != KEEPS_ALL:
                checks["decode"] = [compared_decode(name, ours, config, real)]
        for what, pairs in checks.items():
            counts[what if all(planned == measured for planned, measured in pairs) else f"{what} wrong"] += 1
    return counts


def strange_wrong(name: str) -> int:
    """How many fields of other architectures change the model and the plan does not say so."""
    fields = random_config(name, random.Random(4))
    size = parameters_of(name, config_of(name, fields))
    return len(strange_and_wrong(name, fields, size))


def card_right(name: str) -> bool:
    """Whether a card has the parameters of transformers' model of that config, at its full size."""
    config = {key: value for key, value in plan.cards()[name]["config"].items() if key != "architectures"}
    kind = config.pop("model_type")
    if kind in COMPOSITE:
        real = composite_model(kind, composite_config(kind, config))
        return plan.of(name).model.total_parameters() == sum(parameter.numel() for parameter in real.parameters())
    return plan.of(name).model.total_parameters() == parameters_of(kind, config_of(kind, config))


def share(ran: Counter[str], what: str) -> str:
    total = ran[what] + ran[f"{what} wrong"]
    return f"{ran[what]} of {total}" if total else "-"


if __name__ == "__main__":
    sys.exit(main())
