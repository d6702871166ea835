"""`scripts/gpu.py`: without a card one line; its cases and rows on pretend CUDA, at small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import pretend_cuda

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.unchecked]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu

    return gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, which would be measured")
def test_without_a_card_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "gpu.py", "--out", tmp_path / "rows"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == ["no CUDA device here: nothing was tested or measured"]
    assert not (tmp_path / "rows").exists()


def test_every_case_runs(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.gpu_cases, "compiled_flex", lambda: lambda *x, **_: x)

    def clock(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    with pretend_cuda():
        rows = [
            gpu.measure(case, 2, clock) for case in gpu.cases(gpu.Sizes(4, 2, 16, divisor=256, dtype=torch.float32))
        ]
    ours = {
        "headwise",
        "static float32",
        "static int8",
        "paged float32",
        "paged int8",
        "sdpa folded",
        "whole matrix",
        "headwise triton",
        "headwise, received",
        "headwise, large maps",
        "sdpa",
        "sdpa forward",
        "eager, whole matrices",
    }
    for row in rows:
        for name, way in row["ways"].items():
            assert name not in ours or way["median_ms"] > 0, (row["case"], name, way)
        gpu.show(json.loads(json.dumps(row, allow_nan=False)))
    assert len(rows) == 14 and all("headwise" in row["ways"] for row in rows)


def test_shapes_of_programs_are_timed_and_the_one_in_use_is_first(gpu: Any) -> None:
    asked: list[tuple[int, ...]] = []

    def clock(run: Callable[[], Any]) -> float:
        run()
        asked.append(gpu.gpu_cases.kernel_operators.shape_of("attend", 64, torch.device("cpu")))
        return 1.0

    with pretend_cuda():
        rows = gpu.tuned(gpu.Sizes(4, 2, 16, divisor=256, dtype=torch.float32), 2, clock)
    assert [row["case"] for row in rows[::3]] == [f"{name}, head dim 64" for name in ("attend", "statistics", "decode")]
    for row in rows:
        kernel, dim = row["case"].split(", head dim ")
        used = gpu.launch.shape_of(kernel, int(dim), torch.device("cpu"))
        assert next(iter(row["ways"])) == str(list(used)) and len(row["ways"]) >= 6
        assert all(way["median_ms"] == 1.0 for way in row["ways"].values()), row
    assert set(asked) == {gpu.launch.shape_of("attend", 64, torch.device("cpu"))}, "the shapes in use are back"
