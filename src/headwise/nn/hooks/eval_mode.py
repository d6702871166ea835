"""Models in eval mode (no dropout), without gradients, while they are read; afterwards they are as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

_lock = threading.Lock()
_resting: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # modules that train, and the blocks that rest them


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """In eval mode inside the with block; afterwards each module is in the mode it was in.

    The mode is the model's, in all threads. Of several blocks, in any threads and order, the last one that ends gives
    it back.
    """
    with _lock:
        parts = {part for model in models for part in model.modules()}
        training = [part for part in parts if part.training or part in _resting]
        for part in training:
            _resting[part] = _resting.get(part, 0) + 1
            part.training = False
    try:
        yield
    finally:
        with _lock:
            for part in training:
                _resting[part] -= 1
                if not _resting[part]:
                    del _resting[part]
                    part.training = True


@contextmanager
def resting(*models: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients.

    Not `torch.inference_mode`: what a model keeps of its first forward (tables of rotary angles, say) would then be
    inference tensors, and training it later would fail.
    """
    with in_eval_mode(*models), torch.no_grad():
        yield
