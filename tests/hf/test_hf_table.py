"""The ledger of architectures: its page holds every one, a sample is measured again, and its verdicts can fail."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import hf_table_page as pages  # noqa: E402
from hf_table_build import RULES, classes, model_class, names, parts, special, tiny_config  # noqa: E402
from hf_table_measure import measure  # noqa: E402
from hf_table_run import rows  # noqa: E402

import headwise.hf  # noqa: E402, F401  (registers)
from headwise.hf import ModelError, returned  # noqa: E402
from headwise.hf.models.support import require_interface  # noqa: E402

pytestmark = pytest.mark.unchecked  # whole models, a hundred calls each
PAGE = pages.PAGE.read_text("utf8")
SAMPLE = 4
VERSION = re.search(r"of transformers ([\d.]+) builds", PAGE).group(1)  # type: ignore[union-attr]


def on_page(heading: str) -> list[str]:
    """The model types in the table under a heading of the page."""
    section = re.search(rf"^## {heading}: \d+\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None, heading
    rows = [row.split(" | ")[0].removeprefix("| ") for row in section.group(1).splitlines() if row.startswith("| ")]
    return rows[1:] or [name for name in section.group(1).strip().split(", ") if name != "None."]


LISTED = {name: on_page(re.escape(heading)) for name, heading in pages.GROUPS.items()}


@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")
def test_the_page_holds_every_architecture_once() -> None:
    listed = [name for group in LISTED.values() for name in group]
    assert sorted(listed) == sorted(names())
    section = PAGE.partition("## Parts of other models")[2].splitlines()
    assert section[-1].split(", ") == parts()


def test_the_counts_on_the_page_are_those_of_its_tables_and_nothing_is_broken() -> None:
    for name, heading in pages.GROUPS.items():
        assert f"## {heading}: {len(LISTED[name])}\n" in PAGE
    assert LISTED["broken"] == []
    sorted_out = sum(len(LISTED[name]) for name in ("equal", "refused", "without"))
    assert sorted_out >= 0.88 * sum(map(len, LISTED.values()))
    for run in pages.recorded():
        assert sum(run[name] for name in pages.GROUPS) == run["all"]


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")
def test_a_sample_is_as_the_page_says() -> None:
    """The weekly workflow measures every architecture (scripts/hf_table.py --all)."""
    draw = random.Random(0)
    for name, count in (("equal", SAMPLE), ("refused", 1)):
        for one in draw.sample(LISTED[name], min(count, len(LISTED[name]))):
            row = measure(one)
            assert pages.group(row) == name, row


@pytest.mark.parametrize("dropped", ["mask", "scale"])
def test_an_argument_that_were_dropped_would_show(dropped: str) -> None:
    real = returned.attention
    with mock.patch.object(returned, "attention", lambda *args, **kwargs: real(*args, **kwargs | {dropped: None})):
        row = measure("gemma2")
    assert pages.group(row) == "broken" and not all(row["rounding"].values()), row


def test_a_gradient_that_were_wrong_would_show() -> None:
    real = returned.attention
    with mock.patch.object(returned, "attention", lambda q, k, v, **kwargs: real(q, k, (v + v.detach()) / 2, **kwargs)):
        row = measure("bert")
    assert pages.group(row) == "broken" and list(row["rounding"]) == ["gradient"], row


def test_attention_whose_result_were_not_used_would_show() -> None:
    real = returned.attention
    with mock.patch.object(returned, "attention", lambda *args, **kwargs: 0.0 * real(*args, **kwargs)):
        row = measure("vit")
    assert pages.group(row) in ("broken", "left"), row


def test_an_error_of_headwise_is_broken_and_a_refusal_is_not() -> None:
    with mock.patch.object(returned, "attention", side_effect=RuntimeError("shapes")):
        assert pages.group(measure("bert")) == "broken"
    row = measure("deepseek_v32")
    assert pages.group(row) == "refused" and "sparse attention" in pages.short(row)


@pytest.mark.parametrize("name", ["bridgetower", "informer"])
def test_models_whose_own_code_alone_gives_their_numbers_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=rf"\(model_type '{name}'\) is not on transformers' attention interface"):
        require_interface(model_class(name), name)


def fate(name: str) -> dict[str, Any]:
    """A measurement that ends as its name says."""
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        os.kill(os.getpid(), 9)
    if name == "raises":
        raise MemoryError
    return {"name": name, "outcome": "equal"}


def test_a_child_that_dies_or_hangs_costs_its_row_alone(capfd: pytest.CaptureFixture[str]) -> None:
    by_name = {row["name"]: row for row in rows(["dies", "fine", "hangs", "raises", "also fine"], fate, 3, timeout=0.5)}
    assert {name: row["outcome"] for name, row in by_name.items()} == {
        "dies": "broken", "fine": "equal", "hangs": "broken", "raises": "broken", "also fine": "equal",
    }  # fmt: skip
    assert [by_name[name]["reason"] for name in ("dies", "hangs", "raises")] == [
        "its process ended by signal 9", "no end within 0.5 s", "its process ended by exit code 1",
    ]  # fmt: skip


def test_rules_have_a_reason_each_and_names_that_are_there() -> None:
    known = set(transformers.CONFIG_MAPPING)
    for name, case in {**RULES["models"], **RULES["variants"]}.items():
        assert case.get("left") or case.get("why"), name
    unknown = [name for name, case in RULES["variants"].items() if case["of"] not in classes()]
    assert unknown == []
    alone = [name for name, case in RULES["models"].items() if {"inputs", "left", "class"} & case.keys()]
    assert transformers.__version__ != VERSION or set(alone) <= known


def test_configs_are_small_in_every_part() -> None:
    config = tiny_config("llava")
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 64
    assert config.text_config.num_hidden_layers == 2 and config.image_token_id == 100
    assert special("falcon (ALiBi)")["reference"] == "sdpa" and tiny_config("falcon (ALiBi)").alibi
    layers = tiny_config("gemma3_text").layer_types
    assert sorted(layers) == ["full_attention", "sliding_attention"]  # each kind of layer, not the first alone


def test_the_page_is_made_of_its_rows() -> None:
    shared = dict(
        calls=2, unseen=0, modules=2, differences={"plain": 3e-7, "gradient": 2e-6, "left": 1e-7}, rounding={}
    )
    made = [
        dict(name="a", outcome="equal", **shared),
        dict(name="b", outcome="equal", **shared | dict(unseen=1, rounding={"plain": True})),
        dict(name="c", outcome="refused", own=True, reason="ModelError: C (model_type 'c') is not on transformers' "
             "attention interface, so its heads cannot be seen or run by headwise: why not; use more"),
        dict(name="d", outcome="not reached", modules=0, reason="nothing"),
        dict(name="e", outcome="not built", reason="ImportError: E requires the timm library but"),
        dict(name="f", outcome="differs", **shared),
        dict(name="h", outcome="refused", own=False, reason="no attention at all"),
    ]  # fmt: skip
    text = pages.page(made, ["g"])
    for line in ("| a | 2 | 3e-07 | 2e-06 | LG |", "| b | 2 | 3e-07 | 2e-06 | LG* part |", "| c | why not |"):
        assert line in text.splitlines(), line
    assert "| e | needs the package timm |" in text and "## Broken: 1\n" in text and "86%" in text
    assert Counter(map(pages.group, made)) == {"equal": 2, "refused": 1, "without": 2, "left": 1, "broken": 1}
    assert pages.worst(made) == {"outputs": 3e-07, "gradients": 2e-06}
    assert json.loads(json.dumps(made)) == made and torch.__version__
