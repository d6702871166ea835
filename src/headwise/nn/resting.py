"""Models at rest while they are read: dropout off, no gradients, and afterwards as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """In eval mode inside the with block; afterwards each module is in the mode it was in."""
    training = [part for model in models for part in model.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def resting(*models: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients.

    Not `torch.inference_mode`: what a model keeps of its first forward (tables of rotary angles, say) would then be
    inference tensors, and training it later would fail.
    """
    with in_eval_mode(*models), torch.no_grad():
        yield
