"""What the tests of `ranks.py` have its processes do."""

import os

import torch
import torch.distributed as dist


def total(value: float) -> float:
    part = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(part)
    return part.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on {rank}")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
