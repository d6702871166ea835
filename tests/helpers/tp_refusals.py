"""What ranks, and one process, say of what cannot be split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from tp_cases import Reader, mesh

import headwise
from headwise.nn import MultiHeadAttention
from headwise.parallel import load_slices, tensor_parallel


def said(function: Callable[[], object]) -> str:
    try:
        function()
    except (TypeError, ValueError, RuntimeError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def files(folder: str) -> dict[str, str]:
    """What is said of files that cannot be."""
    small, large = nn.Linear(2, 3), nn.Linear(2, 5)
    return {
        "no module": said(lambda: load_slices(3, folder)),  # type: ignore[type-var]
        "no path": said(lambda: load_slices(small, 3)),  # type: ignore[arg-type]
        "no file": said(lambda: load_slices(small, f"{folder}/none")),
        "another prefix": said(lambda: load_slices(small, f"{folder}/one.safetensors")),
        "another size": said(lambda: load_slices(large, f"{folder}/one.safetensors", prefix="a.")),
        "no safetensors": said(lambda: load_slices(small, f"{folder}/bad.safetensors")),
        "a bad index": said(lambda: load_slices(small, f"{folder}/indexed")),
        "all is well": str(
            torch.equal(load_slices(small, f"{folder}/one.safetensors", prefix="a.").bias, torch.ones(3))
        ),
    }


def refusals() -> dict[str, str]:
    """What ranks say of what cannot be; two of them."""

    def cut(shape: tuple[int, ...], *places: Placement) -> Any:
        return distribute_tensor(torch.randn(shape), mesh(), places)

    q, kv = cut((2, 6, 5, 4), Shard(1)), cut((2, 3, 5, 4), Shard(1))
    by_token, plain = cut((2, 6, 5, 4), Shard(2)), torch.randn(2, 6, 5, 4)
    partial = DTensor.from_local(plain, mesh(), [Partial()], run_check=False)
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    adapted = MultiHeadAttention(12, 6)
    adapted.q_proj = nn.Sequential(nn.Linear(12, 12))  # type: ignore[assignment]
    learned = MultiHeadAttention(12, 6, inner=nn.Linear(2, 3))
    three, half = (MultiHeadAttention(12, 6, num_kv_heads=3) for _ in range(2))
    styles = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    tensor_parallel(parallelize_module(three, mesh(), styles), mesh())
    parallelize_module(half, mesh(), styles)
    reader = Reader("mha", 6, 3)
    tensor_parallel(reader.attention, mesh())
    x = torch.randn(1, 5, 12)
    return {
        "a linear layer": said(lambda: tensor_parallel(nn.Linear(2, 3), mesh())),  # type: ignore[type-var]
        "no mesh": said(lambda: tensor_parallel(MultiHeadAttention(12, 6), 2)),  # type: ignore[arg-type]
        "two dimensions": said(lambda: tensor_parallel(MultiHeadAttention(12, 6), grid)),
        "twice": said(lambda: tensor_parallel(tensor_parallel(MultiHeadAttention(12, 6), mesh()), mesh())),
        "uneven heads": said(lambda: tensor_parallel(MultiHeadAttention(15, 5), mesh())),
        "adapters": said(lambda: tensor_parallel(adapted, mesh())),
        "parameters": said(lambda: tensor_parallel(learned, mesh())),
        "a gate of the own heads": said(
            lambda: tensor_parallel(MultiHeadAttention(12, 6), mesh())(x, gate=torch.ones(3))
        ),
        "heads cut apart": said(lambda: three(x)),
        "torch's plan alone": said(lambda: half(x)),
        "by token": said(lambda: headwise.attention(by_token, by_token, by_token)),
        "mixed": said(lambda: headwise.attention(q, plain, plain)),
        "a sum to come": said(lambda: headwise.attention(partial, partial, partial)),
        "keys elsewhere": said(lambda: headwise.attention(q, kv, kv)),
        "keys by batch": said(lambda: headwise.attention(q, cut((2, 6, 5, 4), Shard(0)), q)),
        "no heads": said(lambda: headwise.attention(*[cut((2, 1, 5, 4), Shard(1))] * 3)),
        "dropout of the op": said(lambda: headwise.attention(q.double(), q.double(), q.double(), dropout=0.5)),
        "what heads write": said(lambda: headwise.look.circuits(reader, torch.arange(5))),
        "sinks of the own heads": said(lambda: headwise.attention(q, q, q, sinks=torch.ones(3))),
    }


def unlike_inputs() -> dict[str, str]:
    """Ranks that disagree; each is told by whom."""
    mha = tensor_parallel(MultiHeadAttention(12, 6), mesh())
    x = torch.randn(2, 5 + dist.get_rank(), 12)
    texts = {"length": said(lambda: mha(x))}
    texts["dtype"] = said(lambda: mha.shards.group.summed(x[:, :5].to((torch.float32, torch.float64)[dist.get_rank()])))
    texts["after all"] = said(lambda: mha(x[:, :5]))
    return texts
