"""The counts of two drawn configs of each architecture: those that transformers' models had when they were recorded.

Tests that build and run such models take one architecture in four; `plan_records.py` says how to record anew.
"""

from __future__ import annotations

import json
from typing import Any

import plan_records
import pytest

pytestmark = pytest.mark.unchecked
RECORDED: list[Any] = json.loads(plan_records.FILE.read_text())


def test_counts_of_all_architectures_are_those_recorded() -> None:
    wrong = {}
    for name, fields, expected in RECORDED:
        made = plan_records.numbers(name, fields)
        if made != expected:
            wrong[f"{name} {fields}"] = (made, expected)
    assert wrong == {}
    assert len({name for name, *_ in RECORDED}) >= 80
