"""Good calls of what reshapes models, for `malformed_calls`. What is written goes into the working folder."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from malformed import PACKAGE, Call
from torch import nn

from headwise import MultiHeadAttention, hf, reshape


def of(function: Callable[..., Any], /, **arguments: Any) -> Call:
    return function, arguments


@functools.cache
def opened() -> hf.Checkpoint:
    """The checkpoint in the package; it is only read."""
    return hf.checkpoint(PACKAGE / "models/tiny")


@functools.cache
def pruning() -> reshape.Pruning:
    return reshape.plan_prune(opened(), heads={layer: [0] for layer in range(4)})


def scored(**arguments: Any) -> reshape.Pruning:
    """A pruning by scores."""
    return reshape.plan_prune(opened(), keep_fraction=0.5, scores=reshape.by_call(**arguments))


@functools.cache
def regrouping() -> reshape.Regrouping:
    return reshape.plan_regroup(opened(), 4, method="first")


@functools.cache
def model() -> nn.Module:
    return hf.load(PACKAGE / "models/tiny").model


NUMBERS = itertools.count()


def new() -> str:
    """The name of a folder that is not there."""
    return f"new{next(NUMBERS)}"


def pair(**arguments: Any) -> Any:
    """A reconstruction of one attention module by another."""
    return reshape.reconstruct_modules(MultiHeadAttention(12, 3), MultiHeadAttention(12, 3), **arguments)


def distillation(**arguments: Any) -> Any:
    teacher, student = (nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)) for _ in range(2))
    stream = torch.arange(9) % 7  # of what the model reads, its embedding speaks
    return reshape.distill(student, teacher, stream, config=CONFIG, call=lambda model, ids: model(ids), **arguments)


CONFIG = reshape.DistillConfig(1, rows=2, length=3, lr=0.1, warmup=1)
CURVE = {"steps": [0.5], "held": [[0, 0.5, 0.7]]}
ROWS = [torch.arange(1, 9).view(1, 8) + row for row in range(2)]
RESHAPE: dict[str, Callable[[], Call]] = {
    "Budget": lambda: of(reshape.Budget, megabytes=7.5, context=9),
    "Proof": lambda: of(reshape.Proof, ids=(1, 2), mask_id=3, speed=True),
    "DistillConfig": lambda: of(
        reshape.DistillConfig, steps=3, rows=2, length=5, lr=0.1, warmup=1, weight_decay=0.1, text=0.5, seed=1
    ),
    "DistillConfig.rate": lambda: of(CONFIG.rate, step=0),
    "DistillConfig.batch": lambda: of(CONFIG.batch, stream=torch.arange(9), step=0, first=1),
    "Pruning.facts": lambda: of(pruning().facts, context=9),
    "Regrouping.facts": lambda: of(reshape.plan_regroup(opened(), 4, method="first").facts, context=9),
    "random_scores": lambda: of(reshape.random_scores, seed=1),
    "by_call": lambda: of(scored, values=[[0.5, 1.5] * 4] * 4),
    "by_twins": lambda: of(reshape.by_twins, twins=[((0, 0), 0.1, (0, 1)), ((0, 1), 0.1, (0, 0))]),
    "plan_prune": lambda: of(reshape.plan_prune, source=opened(), heads={0: [1], 1: [2], 2: [3], 3: [4]}, zero=False),
    "plan_prune fraction": lambda: of(
        reshape.plan_prune, source=opened(), keep_fraction=0.5, scores=reshape.random_scores(), zero=False
    ),
    "plan_prune budget": lambda: of(
        reshape.plan_prune, source=opened(), budget=reshape.Budget(7.5), scores=reshape.random_scores()
    ),
    "plan_prune text": lambda: of(reshape.plan_prune, source=opened(), heads="0.1,1.1,2.1,3.1", zero=True),
    "prune": lambda: of(
        reshape.prune, source=opened(), destination=new(), heads="0.1,1.1", zero=True, proof=None, progress=print
    ),
    "write_pruned": lambda: of(
        reshape.write_pruned, plan=pruning(), destination=new(), proof=None, progress=print, remark=str
    ),
    "reconstruct pruning": lambda: of(reshape.reconstruct, plan=pruning(), model=model(), rows=ROWS, progress=print),
    "plan_regroup": lambda: of(
        reshape.plan_regroup, source=opened(), num_kv_heads=4, method="mean", model=model(), rows=ROWS, seed=1
    ),
    "plan_regroup groups": lambda: of(
        reshape.plan_regroup, source=opened(), num_kv_heads=2, groups={"0": [[0, 2, 4, 6], [1, 3, 5, 7]]}
    ),
    "reconstruct regrouping": lambda: of(
        reshape.reconstruct, plan=regrouping(), model=model(), rows=ROWS, inputs="own", value_steps=0, progress=print
    ),
    "regroup": lambda: of(
        reshape.regroup, source=opened(), destination=new(), num_kv_heads=4, proof=None
    ),
    "write_regrouped": lambda: of(
        reshape.write_regrouped, plan=regrouping(), destination=new(), proof=None, progress=print, remark=str
    ),
    "reconstruct_modules": lambda: of(
        pair, batches=[torch.randn(1, 5, 12) for _ in range(2)], layers={"": reshape.Projections("o_proj", "v_proj")},
        inputs="own", value_steps=1, progress=print,
    ),
    "distill": lambda: of(distillation, first=1, every=1, state=new(), progress=print),
    "distill_facts": lambda: of(
        reshape.distill_facts, source=opened(), teacher="it", config=CONFIG, curve=reshape.LossCurve(**CURVE), context=9
    ),
    "write_distilled": lambda: of(
        reshape.write_distilled, source=opened(), student=model(), destination=new(),
        facts=reshape.distill_facts(opened(), "it", CONFIG, reshape.LossCurve(**CURVE)), proof=None, progress=print,
    ),
    "prune_module": lambda: of(reshape.prune_module, module=MultiHeadAttention(12, 3), heads=[1]),
    "prune_module model": lambda: of(
        reshape.prune_module, module=nn.Sequential(MultiHeadAttention(12, 3)), heads={"0": [1]}
    ),
}  # fmt: skip
