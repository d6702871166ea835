"""Several processes that train one model: each reads its share, and gradients are averaged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is: those that torchrun started, or one alone."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> Processes:
        """Those of the default process group, which is made where torchrun says that there are several."""
        if dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    def share(self, rows: Tensor) -> Tensor:
        """This process's rows of a batch."""
        return rows[self.rank :: self.size]

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Each gradient becomes the sum of all processes'."""
        if self.size > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def add(self, number: Tensor) -> Tensor:
        """The sum of all processes' numbers."""
        if self.size > 1:
            dist.all_reduce(number)
        return number
