"""Every case of the benchmark runs, at a length a test affords, and its ways agree: a table compares like with like."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import attention  # noqa: E402
from benchmarks.registry import CASES, FOLD, Case  # noqa: E402


@pytest.mark.parametrize("case", [*CASES, *FOLD[:3]], ids=lambda case: case.name)
def test_the_ways_of_a_case_agree(case: Case) -> None:
    short = case.short()
    outs = {name: run() for name, run in short.ways().items()}
    tolerance = 2e-2 if case.dtype == "bfloat16" else 1e-5
    for name, out in outs.items():
        assert out.shape == (short.B, short.H, short.T, short.D)
        torch.testing.assert_close(
            out, outs["headwise"], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_names_are_unique_and_kinds_are_known() -> None:
    names = [case.name for case in (*CASES, *FOLD)]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match="no such kind"):
        Case("odd", 1, 1, 1, 1, 1, 1, "diagonal").mask()


def test_a_row_of_the_table() -> None:
    case = CASES[0].short()
    row = attention.row(case, seconds=0.0)
    assert row["ways"]["headwise"]["runs"] >= 5 and "headwise" in attention.line(row)
    assert set(attention.machine()) >= {"cpu", "cores", "threads", "isa", "torch", "headwise"}


def test_committed_results_tell_machine_and_versions_and_no_path() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*-attention*.json"))
    assert files
    for file in files:
        text = file.read_text()
        told = json.loads(text)
        assert {"cpu", "torch", "load", "isa"} <= set(told["machine"]) and told["results"]
        assert "/work" not in text and "/root" not in text and "/home" not in text
