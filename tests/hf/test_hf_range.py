"""The range of transformers in pyproject.toml, and the script that moves its upper end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from transformers_range import RANGE, moved  # noqa: E402

TEXTS = 'hf = ["safetensors>=0.5", "transformers>=5.20,<5.25"] # a word\n', "torch==2.13.0\ntransformers==5.24.0\n"


def test_the_tests_run_on_the_newest_release_of_the_range() -> None:
    found = RANGE.search((ROOT / "pyproject.toml").read_text("utf8"))
    pinned = re.search(r"(?m)^transformers==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text("utf8"))
    assert found is not None and pinned is not None
    assert (int(pinned[1]), int(pinned[2]) + 1) == (int(found[2]), int(found[3]))


@pytest.mark.parametrize(("release", "end"), [("5.25.0", "5.26"), ("5.31.2", "5.32"), ("6.0.0rc1", "6.1")])
def test_a_release_past_the_range_moves_its_end(release: str, end: str) -> None:
    texts = moved(*TEXTS, release)
    assert texts == (TEXTS[0].replace("5.25", end), TEXTS[1].replace("5.24.0", release))


@pytest.mark.parametrize("release", ["5.24.0", "5.24.9", "5.20.2"])
def test_a_release_within_the_range_moves_nothing(release: str) -> None:
    assert moved(*TEXTS, release) is None


def test_a_range_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pyproject\.toml has no"):
        moved('"transformers>=5.20"', TEXTS[1], "5.25.0")
