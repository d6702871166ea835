"""Good calls of what reshapes models, for `malformed_calls`: what plans and what computes; no folder is written."""

from __future__ import annotations

import functools
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


RECIPE = reshape.Recipe(1, rows=2, length=3, lr=0.1, warmup=1)
RESHAPE: dict[str, Callable[[], Call]] = {
    "Budget": lambda: of(reshape.Budget, megabytes=7.5, context=9),
    "Proof": lambda: of(reshape.Proof, ids=(1, 2), mask_id=3, speed=True),
    "Recipe": lambda: of(
        reshape.Recipe, steps=3, rows=2, length=5, lr=0.1, warmup=1, weight_decay=0.1, text=0.5, seed=1
    ),
    "Recipe.rate": lambda: of(RECIPE.rate, step=0),
    "Recipe.batch": lambda: of(RECIPE.batch, stream=torch.arange(9), step=0, first=1),
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
    "prune_module": lambda: of(reshape.prune_module, module=MultiHeadAttention(12, 3), heads=[1]),
    "prune_module model": lambda: of(
        reshape.prune_module, module=nn.Sequential(MultiHeadAttention(12, 3)), heads={"0": [1]}
    ),
}  # fmt: skip
