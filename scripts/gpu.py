"""Run on a machine with an NVIDIA GPU: the tests marked `gpu`, then timings beside PyTorch's own kernels.

    python scripts/gpu.py [--skip-tests] [--only REGEX] [--rounds 20] [--out benchmarks/results]

Needs torch for CUDA, jaxtyping, lazy-loader and pytest; the tests of models need transformers too. Without a GPU it
says so in one line and ends with code 2. The ways of doing one thing take turns, round after round, each after the L2
cache was overwritten; a way that fails leaves its error in the row. Rows go to `gpu-CARD-DATE.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import headwise  # noqa: E402
from headwise.cache import PagedCache, PagePool, StaticCache  # noqa: E402

L2 = 256 << 20
"""Bytes that are overwritten before each timed call: more than any card's L2 cache."""
Run = Callable[[], Any]
Clock = Callable[[Run], float]
"""Runs a function once and returns its milliseconds."""


class Case(NamedTuple):
    """One row: what is computed, the least bytes and floating-point operations that it needs, and the ways to do it."""

    name: str
    bytes: int
    flops: int
    ways: dict[str, Callable[[], Run]]  # each makes its inputs, outside of what is timed


class Sizes(NamedTuple):
    """The heads of all cases, and what their lengths are divided by (more than 1 in tests)."""

    H: int = 32
    K: int = 8
    D: int = 128
    divisor: int = 1
    dtype: torch.dtype = torch.bfloat16

    def qkv(self, T: int, S: int, B: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((self.H, T), (self.K, S), (self.K, S))
        q, k, v = (torch.randn(B, heads, n, self.D, device="cuda", dtype=self.dtype) for heads, n in shapes)
        return q, k, v


def cases(sizes: Sizes) -> Iterator[Case]:
    """The rows of the table, smallest memory first within each kind."""
    pairs = 4 * sizes.H * sizes.D  # floating-point operations of one query and key, all heads
    rows = 2 * (sizes.H + sizes.K) * sizes.D * sizes.dtype.itemsize  # bytes of a token: q, k, v and the output
    n = 8192 // sizes.divisor
    yield Case(f"prefill {n} causal", n * rows, pairs * n * n // 2, _prefill(sizes, n, None))
    n, width = 16384 // sizes.divisor, 1024 // sizes.divisor
    yield Case(f"prefill {n} window {width}", n * rows, pairs * n * width, _prefill(sizes, n, width))
    n, length = 16384 // sizes.divisor, 512 // sizes.divisor
    yield Case(f"prefill {n} documents of {length}", n * rows, pairs * n * length // 2, _documents(sizes, n, length))
    n = 8192 // sizes.divisor
    yield Case(f"statistics {n} causal", n * rows, pairs * n * n // 2, _statistics(sizes, n))
    for S in (4096, 32768, 131072):
        for B in (1, 16) if S < 131072 else (1,):
            S_ = S // sizes.divisor
            held = 2 * B * S_ * sizes.K * sizes.D * sizes.dtype.itemsize
            yield Case(f"decode {S_} keys, batch {B}", held, pairs * B * S_, _decode(sizes, S_, B))
    S_ = 32768 // sizes.divisor
    for B in (1, 32):
        flops = 2 * 4 * sizes.H * B * S_ * (576 + 512)
        yield Case(f"latent decode {S_} keys, batch {B}", 2 * B * S_ * 576, flops, _latent(sizes, S_, B))


def _prefill(sizes: Sizes, n: int, window: int | None) -> dict[str, Callable[[], Run]]:
    def ours() -> Run:
        q, k, v = sizes.qkv(n, n)
        mask = headwise.causal() if window is None else headwise.window(window)
        return lambda: headwise.attention(q, k, v, mask=mask)

    def flex() -> Run:
        q, k, v = sizes.qkv(n, n)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < (window or n))

        tiles = create_block_mask(sees, None, None, n, n, device="cuda")
        return lambda: compiled_flex()(q, k, v, block_mask=tiles, enable_gqa=True)

    def kernel() -> Run:
        q, k, v = sizes.qkv(n, n)
        mask = headwise.causal() if window is None else headwise.window(window)
        return lambda: headwise.attention(q, k, v, mask=mask, backend="triton")

    ways = {"headwise": ours, "headwise triton": kernel, "flex": flex}
    if window is None:
        ways |= {
            f"sdpa {kernel.name.lower()}": partial(_sdpa, sizes, n, n, kernel, is_causal=True)
            for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        }
    return ways


def _sdpa(sizes: Sizes, T: int, S: int, kernel: SDPBackend, **options: Any) -> Run:
    q, k, v = sizes.qkv(T, S)

    def run() -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return run


@cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _documents(sizes: Sizes, n: int, length: int) -> dict[str, Callable[[], Run]]:
    def ours() -> Run:
        q, k, v = sizes.qkv(n, n)
        mask = headwise.segments(torch.arange(n, device="cuda") // length) & headwise.causal()
        return lambda: headwise.attention(q, k, v, mask=mask)

    def flex() -> Run:
        q, k, v = sizes.qkv(n, n)

        def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i // length == j // length)

        tiles = create_block_mask(sees, None, None, n, n, device="cuda")
        return lambda: compiled_flex()(q, k, v, block_mask=tiles, enable_gqa=True)

    return {"headwise": ours, "flex": flex}


def _latent(sizes: Sizes, S: int, B: int) -> dict[str, Callable[[], Run]]:
    """MLA as DeepSeek's: query heads on one latent of 576 columns, of which the first 512 are the values."""
    heads = 4 * sizes.H  # 128, as DeepSeek's, at the default sizes

    def ours() -> Run:
        q = torch.randn(B, heads, 1, 576, device="cuda", dtype=sizes.dtype)
        k = torch.randn(B, 1, S, 576, device="cuda", dtype=sizes.dtype)
        return lambda: headwise.attention(q, k, k[..., :512])

    def folded() -> Run:
        q = torch.randn(B, 1, heads, 576, device="cuda", dtype=sizes.dtype)
        k = torch.randn(B, 1, S, 576, device="cuda", dtype=sizes.dtype)
        return lambda: scaled_dot_product_attention(q, k, k[..., :512].contiguous())

    return {"headwise": ours, "sdpa folded": folded}


def _statistics(sizes: Sizes, n: int) -> dict[str, Callable[[], Run]]:
    def ours() -> Run:
        q, k, v = sizes.qkv(n, n)
        return lambda: headwise.attention_statistics(q, k, v, mask=headwise.causal())

    def matrix() -> Run:
        """What a user writes without headwise: the whole matrix of one head after the other, and its entropy."""
        q, k, v = sizes.qkv(n, n)
        seen = torch.ones(n, n, dtype=torch.bool, device="cuda").tril()

        def run() -> list[Tensor]:
            sums = []
            for h in range(sizes.H):
                group = h * sizes.K // sizes.H
                scores = (q[0, h] @ k[0, group].mT).float() * sizes.D**-0.5
                p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                sums += [p.to(v.dtype) @ v[0, group], -torch.xlogy(p, p).sum(-1)]
            return sums

        return run

    def received() -> Run:
        q, k, _ = sizes.qkv(n, n)
        return lambda: headwise.statistics(q, k, mask=headwise.causal())

    return {"headwise": ours, "headwise, received": received, "whole matrix": matrix}


def _decode(sizes: Sizes, S: int, B: int) -> dict[str, Callable[[], Run]]:
    def dense() -> Run:
        q, k, v = sizes.qkv(1, S, B)
        return lambda: headwise.attention(q, k, v)

    def folded() -> Run:
        """Flash decoding through SDPA: the query heads of a group as rows, as our `sdpa` backend calls it."""
        q, k, v = sizes.qkv(1, S, B)
        rows = q.unflatten(1, (sizes.K, -1)).flatten(2, 3)
        return lambda: scaled_dot_product_attention(rows, k, v)

    def cached(make: Callable[[], Any]) -> Run:
        store = make()
        _, k, v = sizes.qkv(1, S - 1, B)
        store.append(k, v)
        q, k, v = sizes.qkv(1, 1, B)

        def step() -> Tensor:
            out = store.append(k, v).attend(q)
            store.truncate(S - 1)
            return out

        return step

    def static(dtype: torch.dtype) -> StaticCache:
        return StaticCache(B, sizes.K, sizes.D, capacity=S, dtype=dtype, device="cuda")

    def paged(dtype: torch.dtype) -> PagedCache:
        return PagedCache(PagePool(B * (S // 128 + 1), sizes.K, sizes.D, dtype=dtype, device="cuda"), B)

    ways: dict[str, Callable[[], Run]] = {"headwise": dense, "sdpa folded": folded}
    for make in (static, paged):
        for dtype in (sizes.dtype, torch.int8):
            name = f"{make.__name__} {str(dtype).removeprefix('torch.')}"
            ways[name] = partial(cached, partial(make, dtype))
    return ways


def on_card(run: Run) -> float:
    """Milliseconds of one call by CUDA events, with a cold L2 cache."""
    _cold().zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@cache
def _cold() -> Tensor:
    return torch.empty(L2, dtype=torch.int8, device="cuda")


def measure(case: Case, rounds: int, clock: Clock) -> dict[str, Any]:
    """One row: median and quartiles of each way in milliseconds, or the error that it ended with."""
    row: dict[str, Any] = {"case": case.name, "bytes": case.bytes, "flops": case.flops, "ways": {}}
    runs: dict[str, Run] = {}
    for name, make in case.ways.items():
        try:
            run = make()
            for _ in range(3):
                clock(run)
            runs[name] = run
        except Exception as error:  # a peer that the card or this torch lacks, or no memory left for it
            row["ways"][name] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(clock(run))
    for name, all_of_them in times.items():
        low, middle, high = statistics.quantiles(all_of_them, n=4) if rounds > 1 else all_of_them * 3
        row["ways"][name] = {"median_ms": middle, "q25_ms": low, "q75_ms": high}
    return row


def environment() -> dict[str, Any]:
    """The card and the versions that the numbers belong to."""
    card = torch.cuda.get_device_properties(0)
    try:
        import triton

        of_triton = triton.__version__
    except ImportError:
        of_triton = None
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_bytes": card.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": of_triton,
        "headwise": headwise.__version__,
    }


def run_tests() -> dict[str, Any]:
    """Run the tests marked `gpu` in a process of their own; how it ended, and pytest's last line."""
    files = sorted(str(path) for path in ROOT.glob("tests/*/test_cuda*.py"))
    # The tests of the Triton kernels have no mark: they run in Triton's interpreter elsewhere, and here on the card.
    kernels = sorted(str(path) for path in ROOT.glob("tests/ops/test_triton*.py"))
    started = time.time()
    summaries, code = [], 0
    for chosen in (["-m", "gpu", *files], kernels):
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", *chosen]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(ended.stdout[-8000:], ended.stderr[-2000:])
        summaries.append((ended.stdout.strip().splitlines() or [""])[-1])
        code = code or ended.returncode
    return {"code": code, "summary": "; ".join(summaries), "seconds": round(time.time() - started)}


def show(row: dict[str, Any]) -> None:
    """Print a row: each way, and its rate against memory and arithmetic."""
    print(row["case"])
    for name, way in row["ways"].items():
        if "error" in way:
            print(f"  {name:24s} {way['error']}")
            continue
        seconds = way["median_ms"] / 1e3
        rates = f"{row['bytes'] / seconds / 1e12:6.2f} TB/s  {row['flops'] / seconds / 1e12:7.1f} TFLOP/s"
        print(f"  {name:24s} {way['median_ms']:10.3f} ms  {rates}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-tests", action="store_true", help="timings alone")
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each case")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was tested or measured", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": environment()}
    print(" ".join(f"{name}={value}" for name, value in report["machine"].items()))
    if not options.skip_tests:
        report["tests"] = run_tests()
    report["results"] = []
    with torch.no_grad():
        for case in cases(Sizes()):
            if re.search(options.only, case.name):
                report["results"].append(measure(case, options.rounds, on_card))
                show(report["results"][-1])
                torch.cuda.empty_cache()
    name = re.sub(r"[^a-z0-9]+", "-", report["machine"]["card"].lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu-{name}-{date.today().isoformat()}.json"
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf8")
    print(f"rows: {path}")
    return int(report.get("tests", {}).get("code", 0) != 0)


if __name__ == "__main__":
    sys.exit(main())
