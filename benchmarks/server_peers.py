"""The CPU attention of vLLM and of SGLang on the same tensors, where vLLM's wheel for CPUs lies unpacked.

The wheel needs other versions of the libraries that headwise needs, so it is no dependency: `make bench-peers` unpacks
the pinned version into a folder of its own, from which only its library of operators is loaded. SGLang's kernels are in
the same library. Both read keys and values in layouts of their own, into which they are packed beforehand: in those
servers the cache has them so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import FULL, Case

Run = Callable[[], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]
Forms = Mapping[str, Callable[[], Run]]
FOLDER = Path(os.environ.get("HEADWISE_VLLM", Path(__file__).parent.parent / "build" / "peers")) / "vllm"
BLOCK = 128  # tokens in a block of vLLM's cache


@cache
def _operators() -> Any:
    """The operators of vLLM's library for this CPU, loaded once.

    Raises:
        LookupError: the wheel is not there, or it cannot be loaded here.
    """
    tiles = (
        torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    )  # the wheel leaves it to its caller to ask the system for AMX
    wide = torch.cpu._is_avx512_bf16_supported()
    path = FOLDER / ("_C.abi3.so" if tiles or wide else f"_C_{torch.backends.cpu.get_cpu_capability()}.abi3.so")
    if not path.exists():
        raise LookupError(f"vLLM's wheel is not unpacked ({path.name} is missing): make bench-peers")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise LookupError(f"{path.name} cannot be loaded: {error}") from None
    return torch.ops._C


def _tokens(x: Tensor) -> Tensor:
    """(B, K, S, D) as (B * S, K, D)."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _takes(case: Case, inputs: Inputs) -> bool:
    """Whether both servers mask such a case: without a mask, causal, or a window of a causal mask."""
    return case.kind in (FULL, "causal", "window") and not case.int8 and inputs[0].dtype != torch.float16


def vllm_forms(case: Case, inputs: Inputs) -> Forms:
    """vLLM's `cpu_attention_with_kv_cache`, by AMX for bfloat16 where there is AMX, and by vectors."""
    C = _operators()
    if not _takes(case, inputs) or case.V:
        return {}
    names = ["vec"]
    if inputs[0].dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        names.append("amx")
    return {name: lambda name=name: _vllm(C, case, inputs, name) for name in names}


def _vllm(C: Any, case: Case, inputs: Inputs, isa: str) -> Run:
    q, k, v = (x.detach() for x in inputs)
    (B, H, T, D), (_, K, S, _) = q.shape, k.shape
    blocks = -(-S // BLOCK)
    # One tensor of blocks, whose halves are the keys' and the values'.
    both = torch.zeros(B * blocks, K, BLOCK, 2 * D, dtype=k.dtype).view(B * blocks, K, 2 * BLOCK, D)
    keys, values = both.chunk(2, 2)
    slots = torch.cat([torch.arange(S) + b * blocks * BLOCK for b in range(B)])
    C.cpu_attn_reshape_and_cache(_tokens(k), _tokens(v), keys, values, slots, isa, 1.0, 1.0, "auto")
    rows, out = _tokens(q), q.new_empty(B * T, H, D)
    starts, lengths = (torch.arange(0, (B + 1) * T, T, dtype=torch.int32), torch.full((B,), S, dtype=torch.int32))
    table = torch.arange(B * blocks, dtype=torch.int32).view(B, blocks)
    causal, window = case.kind != FULL, case.width - 1 if case.kind == "window" else -1
    plan = C.get_scheduler_metadata(
        B, H, K, D, lengths, q.dtype, starts, causal, window, isa, True, None, "auto"
    )  # fmt: skip

    def run() -> Tensor:
        C.cpu_attention_with_kv_cache(
            rows, keys, values, out, starts, lengths, D**-0.5, causal, None, window, table, 0.0, plan, None, None, 1.0,
            1.0, "auto",
        )  # fmt: skip
        return out.view(B, T, H, D).transpose(1, 2)

    return run


def sglang_forms(case: Case, inputs: Inputs) -> Forms:
    """SGLang's `decode_attention_cpu` for one query, in several splits of the keys, and `extend_attention_cpu` else."""
    C = _operators()
    if not _takes(case, inputs) or case.kind == "window" or inputs[0].dtype != torch.bfloat16:
        return {}
    if case.T == 1:
        return {f"{splits} splits": lambda splits=splits: _sglang_decode(C, inputs, splits) for splits in (2, 8)}
    return {"extend": lambda: _sglang_extend(C, inputs)} if case.kind == "causal" and not case.V else {}


def _sglang_decode(C: Any, inputs: Inputs, splits: int) -> Run:
    q, k, v = (x.detach() for x in inputs)
    (B, H, _, D), (S, V) = q.shape, v.shape[2:]
    keys = _tokens(k)
    values = keys[..., :V] if v.data_ptr() == k.data_ptr() else _tokens(v)
    rows, out, partial = q[:, :, 0].contiguous(), q.new_empty(B, H, V), torch.empty(B, H, splits, V + 1)
    table = torch.arange(B * S, dtype=torch.int32).view(B, S)
    requests, lengths = torch.arange(B), torch.full((B,), S)

    def run() -> Tensor:
        C.decode_attention_cpu(
            rows, keys, values, out, None, None, None, partial, table, requests, lengths, D**-0.5, 0.0, False, -1, None,
            None,
        )  # fmt: skip
        return out[:, :, None]

    return run


def _sglang_extend(C: Any, inputs: Inputs) -> Run:
    q, k, v = (x.detach() for x in inputs)
    (B, H, T, D), (S, V) = q.shape, v.shape[2:]
    keys, values = _tokens(k), _tokens(v)
    new_keys, new_values = _tokens(k[:, :, S - T :]), _tokens(v[:, :, S - T :])
    rows, out = _tokens(q), q.new_empty(B * T, H, V)
    table = torch.arange(B * S, dtype=torch.int32).view(B, S)
    requests, lengths = torch.arange(B), torch.full((B,), S)
    counts, starts = torch.full((B,), T, dtype=torch.int32), torch.arange(B, dtype=torch.int32) * T

    def run() -> Tensor:
        C.extend_attention_cpu(
            rows, new_keys, new_values, out, keys, values, table, requests, lengths, counts, starts, T, D**-0.5, 0.0,
            False, -1, None, None, None,
        )  # fmt: skip
        return out.view(B, T, H, V).transpose(1, 2)

    return run
