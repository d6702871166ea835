"""Context managers that put models in eval mode (no dropout), optionally without gradients, and restore them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

_lock = threading.Lock()
_in_training: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # modules -> number of open blocks


@contextmanager
def in_eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put models in eval mode inside the with block, and restore the mode of each module afterwards.

    The mode applies to all threads. If several blocks overlap, in any threads, the last one that ends restores it.
    """
    with _lock:
        parts = {part for model in models for part in model.modules()}
        training = [part for part in parts if part.training or part in _in_training]
        for part in training:
            _in_training[part] = _in_training.get(part, 0) + 1
            part.training = False
    try:
        yield
    finally:
        with _lock:
            for part in training:
                _in_training[part] -= 1
                if not _in_training[part]:
                    del _in_training[part]
                    part.training = True


@contextmanager
def in_eval_mode_without_grad(*models: nn.Module) -> Iterator[None]:
    """Put models in eval mode and disable gradients inside the with block.

    `torch.inference_mode` is not used: tensors that a model stores in its first forward pass (tables of rotary angles,
    for example) would be inference tensors, and training it later would fail.
    """
    with in_eval_mode(*models), torch.no_grad():
        yield
