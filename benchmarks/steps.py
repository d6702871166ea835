"""Decode steps of transformers models with random weights: the model, the times of its steps, and the turns of ways."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

import headwise.hf
from headwise.hf.models.architectures import CACHE

Model = TypeVar("Model", bound=PreTrainedModel)
Steps = Callable[[], list[float]]
"""Runs the next steps, and returns the milliseconds of each."""


def random_model(kind: type[Model], config: PreTrainedConfig, dtype: torch.dtype, attention: str = "sdpa") -> Model:
    """A model with random weights, made in its dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        return kind._from_config(config, attn_implementation=attention).eval()
    finally:
        torch.set_default_dtype(before)


def timed(model: PreTrainedModel, ids: Tensor, cache: Any, count: int, *, fast: bool) -> list[float]:
    """Milliseconds of `count` further steps, within `fast_decode` or not."""
    times = []
    with headwise.hf.fast_decode(model) if fast else nullcontext(), torch.inference_mode():
        for _ in range(count):
            start = time.perf_counter()
            model(ids, **{CACHE: cache})
            times.append(1e3 * (time.perf_counter() - start))
    return times


def in_turns(ways: Mapping[str, Steps], turns: int) -> dict[str, float]:
    """Median milliseconds of a step by way; before its turn, the threads of the way before come to rest."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, steps in ways.items():
            time.sleep(0.1)
            taken = steps()
            times[name] += taken if turn else []  # the first turn warms up
    return {name: statistics.median(of_way) for name, of_way in times.items()}
