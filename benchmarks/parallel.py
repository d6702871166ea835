"""Attention over processes against one process with as many threads: time, and memory a rank.

    python benchmarks/parallel.py [--tokens 8192] [--rounds 5] [--json]

- time: two processes of one thread each, in each layout, against one of two threads: causal, forward and backward. The
  work of the ranks is that of one process; what is lost is what is sent, merged, and waited for.
- memory: what a rank holds at N = 1, 2, 4, 8 (queries, keys, values, outputs, their gradients, and what comes by),
  counted as peak bytes of live tensors, and the slope of log(memory) on log(N): -1 is memory that falls as 1 / N.
- DeepSpeed's Ulysses around torch's SDPA, where deepspeed is installed: the same call in two processes.
- torch: `torch.distributed.tensor.experimental.context_parallel` on the same causal call, on the CPU.

Processes are spawned, with gloo over the loopback. On a machine that does other work as well the ratios are lower.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import headwise
from headwise.parallel import context_parallel

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "helpers"))
import ranks

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks.statistics_memory import LiveBytes

H, K, D = 8, 4, 64
LAYOUTS = ("ring", "gather", "ulysses")
WORLDS = (1, 2, 4, 8)


def inputs(tokens: int) -> list[Tensor]:
    """Query, key, value of so many tokens."""
    return [torch.randn(1, heads, tokens, D).requires_grad_() for heads in (H, K, K)]


def timed(run: Any, weight: Tensor, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of forwards and of backwards."""
    forward, backward = [], []
    for n in range(rounds + 1):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        out = run()
        middle = time.perf_counter()
        out.backward(weight)
        end = time.perf_counter()
        if n:
            forward.append(middle - start)
            backward.append(end - middle)
    return forward, backward


def split_times(tokens: int, layout: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Of one rank."""
    own = inputs(tokens // dist.get_world_size())

    def run() -> Tensor:
        out: Tensor = context_parallel(*own, mask=headwise.causal(), layout=layout, order="zigzag")
        return out

    return timed(run, torch.ones(1, H, own[0].shape[2], D), rounds)


def split_memory(tokens: int, layout: Any) -> int:
    """Peak bytes of one rank's tensors in a forward and backward."""
    own = inputs(tokens // dist.get_world_size())
    with LiveBytes(*own) as live:
        out = context_parallel(*own, mask=headwise.causal(), layout=layout, order="zigzag")
        out.sum().backward()
    return live.peak


def torch_says(tokens: int) -> str:
    """What torch's own context parallel gives on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as theirs

    query = torch.randn(1, H, tokens, D)
    try:
        with theirs(init_device_mesh("cpu", (dist.get_world_size(),)), buffers=[query], buffer_seq_dims=[2]):
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return "served"


def deepspeed_times(tokens: int, rounds: int) -> tuple[list[float], list[float]] | str:
    """Of one rank: DeepSpeed's Ulysses around torch's SDPA; or why there is nothing to measure."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention
    except Exception as error:
        return f"not installed ({type(error).__name__}: {str(error)[:100]})"

    def local(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous()

    try:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        attend = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        torch.manual_seed(0)
        n, rank = tokens // dist.get_world_size(), dist.get_rank()
        whole = inputs(tokens)
        own = [x[:, :, rank * n : (rank + 1) * n].transpose(1, 2).detach().requires_grad_() for x in whole]

        def run() -> Tensor:
            out: Tensor = attend(*own, 0)
            return out

        right = headwise.attention(*whole, mask=headwise.causal())[:, :, rank * n : (rank + 1) * n].transpose(1, 2)
        off = (run() - right).abs().max().item()
        if not off < 1e-4:
            return f"wrong: {off:.1e} off"
        return timed(run, torch.ones(1, n, H, D), rounds)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """All of it."""
    torch.set_num_threads(2)
    whole = inputs(tokens)
    one = timed(lambda: headwise.attention(*whole, mask=headwise.causal()), torch.ones(1, H, tokens, D), rounds)
    record: dict[str, Any] = {"tokens": tokens, "one process": [statistics.median(x) for x in one]}
    with ranks.Pool(2) as pool:
        for layout in LAYOUTS:
            times = pool.run(split_times, tokens, layout, rounds, patience=500)
            record[layout] = [statistics.median(map(max, *(one[way] for one in times))) for way in (0, 1)]
        record["torch"] = pool.run(torch_says, 512)[0]
        times = pool.run(deepspeed_times, tokens, rounds, patience=500)
        failed = next((one for one in times if isinstance(one, str)), None)
        record["deepspeed"] = failed or [statistics.median(map(max, *(one[way] for one in times))) for way in (0, 1)]
    record["memory"] = {}
    for world in WORLDS:
        with ranks.Pool(world) as pool:
            for layout in LAYOUTS:
                record["memory"].setdefault(layout, []).append(max(pool.run(split_memory, tokens, layout)))
    return record


def slope(bytes_: list[int]) -> float:
    """Of log(memory) on log(N)."""
    x, y = [math.log(n) for n in WORLDS], [math.log(n) for n in bytes_]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    report = measure(chosen.tokens, chosen.rounds)
    if chosen.json:
        print(json.dumps(report))
        return
    print(f"H {H}, K {K}, D {D}, float32, {chosen.tokens} tokens, causal; load average {os.getloadavg()[0]:.1f}")
    base = report["one process"]
    print(f"one process, two threads: forward {1e3 * base[0]:.0f} ms, backward {1e3 * base[1]:.0f} ms")
    for layout in LAYOUTS:
        forward, backward = report[layout]
        print(
            f"two processes, {layout:<8} forward {1e3 * forward:.0f} ms ({base[0] / forward:.2f} of the speed), "
            f"backward {1e3 * backward:.0f} ms ({base[1] / backward:.2f})"
        )
    for layout, sizes in report["memory"].items():
        mib = ", ".join(f"{n / 2**20:.1f}" for n in sizes)
        print(f"memory a rank, {layout:<8} {mib} MiB at N = 1, 2, 4, 8; slope {slope(sizes):.2f}")
    theirs = report["deepspeed"]
    if not isinstance(theirs, str):
        theirs = f"forward {1e3 * theirs[0]:.0f} ms, backward {1e3 * theirs[1]:.0f} ms"
    print(f"two processes, DeepSpeed's Ulysses around torch's SDPA: {theirs}")
    print(f"torch's context_parallel, causal, on the CPU: {report['torch']}")


if __name__ == "__main__":
    main()
