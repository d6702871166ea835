"""The plan as a user meets it: where configs come from, hostile ones, heads plans, the record and its pictures."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import PAYLOADS
from plan_models import random_config

import headwise
from headwise import plan
from headwise.plan import units
from headwise.plan.config.fields import architectures
from headwise.plan.model.parts import ROOMS

pytestmark = pytest.mark.unchecked
SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 50}  # fmt: skip


# --- where a config comes from --------------------------------------------------------------------------------------


def test_a_file_a_folder_a_dict_and_a_transformers_config_say_the_same(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "other.json").write_text(json.dumps(SMALL))
    config = LlamaConfig(**{key: value for key, value in SMALL.items() if key != "model_type"})
    sources: list[Any] = [folder, str(folder), folder / "config.json", tmp_path / "other.json", SMALL, config]
    plans = [plan.of(source) for source in sources]
    assert len({(one.bytes_per_token, one.model.total_parameters()) for one in plans}) == 1
    assert [one.name for one in plans] == ["my-model", "my-model", "my-model", "other", "llama", "llama"]
    assert all(one.exact for one in plans)


def test_the_hub_s_cache_is_read_and_nothing_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef" * 2 + "01234567"
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "models--some--model" / "refs").mkdir()
    reference = tmp_path / "models--some--model" / "refs" / "main"
    reference.write_text(commit)
    assert plan.of("some/model").name == "some/model"
    for wrong in ("../../../etc", "x" * 40, ""):
        reference.write_text(wrong)
        with pytest.raises(ValueError, match="no such file or folder, no card and no model"):
            plan.of("some/model")
    for name in ("other/model", "a/b/c", "..", "some/..", "\0", "nul\0/x", "llama-3-9b"):
        with pytest.raises(ValueError, match=r"no such file|cannot be read|no regular"):
            plan.of(name)


def test_a_near_name_is_offered() -> None:
    for name in ("nowhere", "some/model", "checkpoint", "x"):  # nothing is like them
        with pytest.raises(ValueError, match=r"cache; headwise plan --list shows the cards$"):
            plan.of(name)
    for name, first in {"bert": "bert-base", "org/Llama-3-8B": "llama-3-8b", "phi3": "phi-3-mini"}.items():
        with pytest.raises(ValueError, match=rf"cards like it: {first}, "):
            plan.of(name)
    with pytest.raises(ValueError, match=r"'llama-3-9b': .* cards like it: llama-3-8b, "):
        plan.of("llama-3-9b")
    assert plan.of("LLaMA-3-8B").name == "llama-3-8b"


def test_the_packaged_model_is_planned_exactly() -> None:
    import headwise.models
    from headwise.hf.files.folder import find_weights

    folder = headwise.models.tiny_path()
    assert plan.of(folder).model.total_parameters() == find_weights(folder).numel


# --- hostile configs --------------------------------------------------------------------------------------------------

HOSTILE: list[tuple[str, str]] = [
    ('{"hidden_size": 0}', "hidden_size is between 1 and 1000000; got 0"),
    ('{"hidden_size": -64}', "hidden_size is between 1 and 1000000; got -64"),
    ('{"hidden_size": 1e3}', "hidden_size is a whole number; got 1000.0"),
    ('{"hidden_size": true}', "hidden_size is a whole number; got True"),
    ('{"hidden_size": "64"}', "hidden_size is a whole number; got '64'"),
    ('{"hidden_size": [64]}', "hidden_size is a whole number; got [64]"),
    ('{"hidden_size": null}', "hidden_size is null, and a whole number is needed"),
    ('{"hidden_size": 1%s}' % ("0" * 40), "hidden_size is between 1 and 1000000; got a number of more than 20 digits"),
    ('{"hidden_size": 1%s}' % ("0" * 5000), "Exceeds the limit"),
    ('{"hidden_size": NaN}', "not valid JSON (NaN is not a number)"),
    ('{"hidden_size": Infinity}', "not valid JSON (Infinity is not a number)"),
    ('{"hidden_size": 1, "hidden_size": 2}', "not valid JSON (the key 'hidden_size' occurs twice)"),
    ('{"num_hidden_layers": 10001}', "num_hidden_layers is between 1 and 10000; got 10001"),
    ('{"num_attention_heads": 10001}', "num_attention_heads is between 1 and 10000; got 10001"),
    ('{"num_key_value_heads": 5}', "num_heads must be a multiple of num_kv_heads: H = 32, K = 5 leave 2 over"),
    ('{"num_attention_heads": 33}', "d_model must be a multiple of num_heads: 4096 = 33 x 124 + 4"),
    ('{"attention_bias": "yes"}', "attention_bias is true or false; got 'yes'"),
    ('{"attention_bias": 1}', "attention_bias is true or false; got 1"),
    ('{"sliding_window": {"x": 1}}', "sliding_window = {'x': 1} is not supported for this architecture"),
    ('{"pruned_heads": "\\u001b[2J\\n"}', r"pruned_heads = '\x1b[2J\n' changes the model"),
    ("[" * 100_000, "not valid JSON (nested too deeply)"),
    ('{"x": ' + "[" * 100_000, "not valid JSON (nested too deeply)"),
    ("[]", "contains a JSON list, and an object is needed"),
    ("", "not valid JSON"),
    ("\x00", "not valid JSON"),
]


@pytest.mark.parametrize(("text", "message"), HOSTILE, ids=[text[:30] for text, _ in HOSTILE])
def test_hostile_configs_get_one_line(text: str, message: str, tmp_path: Path) -> None:
    if text.startswith('{"') and text.endswith("}"):
        text = '{"model_type": "llama", ' + text[1:]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        plan.of(tmp_path)
    assert message in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(10**9)  # holes: no such room is taken
    start = time.process_time()
    with pytest.raises(ValueError, match="is larger than 1000000 bytes"):
        plan.of(path)
    assert time.process_time() - start < 5


def test_a_pipe_and_a_folder_are_no_config(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="is not a regular file"):
        plan.of(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        plan.of(tmp_path.parent)


VALUES = [
    0,
    -1,
    1,
    3,
    10**6,
    10**30,
    True,
    False,
    None,
    0.5,
    float("nan"),
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    [None],
    -(10**9),
]


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", [*architectures()])
def test_any_value_in_any_field_is_answered_or_refused(model_type: str) -> None:
    """One field of a small config after another gets a value that no one asked for; nothing but ValueError may come."""
    about = architectures()[model_type]
    dice = random.Random(7)
    start = {"text_config": {"num_hidden_layers": 2}} if "text" in about else random_config(model_type, dice)
    fields = [*about.get("defaults", {}), *about.get("must", {}), *about.get("aliases", {}), "layer_types", "head_dim"]
    fields += ["text_config", "architectures", "dtype", "torch_dtype", "sliding_window", "tie_word_embeddings"]
    for field in fields:
        for value in dice.sample(VALUES, 5):
            config = {**start, field: value, "model_type": model_type}
            try:
                result = plan.of(config, context=(1, 10), bandwidth=1.0)
            except ValueError as wrong:
                assert str(wrong).isprintable() and len(str(wrong)) < 400
            else:
                json.dumps(result.to_dict(), allow_nan=False)
                assert result.model.total_parameters() > 0


@pytest.mark.slow
def test_many_layers_are_answered_all_the_same() -> None:
    start = time.process_time()
    result = plan.of({**SMALL, "num_hidden_layers": 10_000}, context=100, bandwidth=1e12)
    assert result.model.total_parameters() > 10_000 * 64 and time.process_time() - start < 30


@pytest.mark.slow
@pytest.mark.parametrize("payload", PAYLOADS[::3])
def test_hostile_words_are_told_harmlessly(payload: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan.of({"model_type": payload})
    assert str(caught.value).isprintable()
    shown = plan.of({**SMALL, payload or "x": payload}, context=10)
    assert all(note.isprintable() for note in shown.notes)
    assert "<script" not in shown._repr_html_() and "\x1b" not in str(shown)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"context": 0}, "context is a whole number between 1 and 10000000000; got 0"),
    ({"context": -1}, "context is a whole number between 1 and 10000000000; got -1"),
    ({"context": True}, "context is a whole number between 1 and 10000000000; got True"),
    ({"context": 10**11}, "context is a whole number between 1 and 10000000000; got 100000000000"),
    ({"context": []}, "give 1 to 64 contexts; got 0"),
    ({"context": [1.5]}, "context is a whole number between 1 and 10000000000; got 1.5"),
    ({"batch": 0}, "batch is a whole number between 1 and 10000000; got 0"),
    ({"batch": float("nan")}, "batch is a whole number between 1 and 10000000; got nan"),
    ({"kv_dtype": "int3"}, "kv_dtype is one of fp32, bf16, fp16, fp8, int8; got 'int3'"),
    ({"bandwidth": "fast"}, "bandwidth is a number between 1 and 1e100 such as 3.35TB/s; got 'fast'"),
    ({"bandwidth": float("inf")}, "bandwidth is a number between 1 and 1e100 such as 3.35TB/s; got inf"),
    ({"bandwidth": "990TF"}, "bandwidth is a number between 1 and 1e100 such as 3.35TB/s; got '990TF'"),
    ({"flops": "-1TF"}, "flops is a number between 1 and 1e100 such as 990TF; got '-1TF'"),
    ({"flops": 0}, "flops is a number between 1 and 1e100 such as 990TF; got 0"),
    ({"flops": "1e99E"}, "flops is a number between 1 and 1e100 such as 990TF; got '1e99E'"),
    ({"bandwidth": 0.99}, "bandwidth is a number between 1 and 1e100 such as 3.35TB/s; got 0.99"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=str)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan.of(SMALL, **arguments)
    assert str(caught.value) == message


@pytest.mark.slow
def test_the_slowest_and_the_fastest_machine() -> None:
    """Every time and rate is a number still: a model of a few weights, and slowly the largest cache there may be."""
    least = {**SMALL, "hidden_size": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1,
             "num_hidden_layers": 1, "vocab_size": 1}  # fmt: skip
    largest = {**SMALL, "num_hidden_layers": 10_000}
    for config, speed in ((least, "1e99"), (least, 1), (largest, 1)):
        result = plan.of(config, context=(1, 10**10), batch=10**7, bandwidth=speed, flops=speed)
        json.dumps(result.to_dict(), allow_nan=False)


def test_something_that_is_no_config() -> None:
    lists = type("Lists", (), {"to_dict": lambda self: [1]})()
    for what in (3, None, [1], lists, torch.ones(3)):
        with pytest.raises(TypeError, match="a config is a path, a name, a dict or an object with to_dict"):
            plan.of(what)


# --- the record and its pictures --------------------------------------------------------------------------------------


def test_a_plan_is_no_config(tmp_path: Path) -> None:
    """The sizes of its layers have other names than a config's, so that it would be read as a model of the defaults."""
    made = plan.of("qwen3-0.6b", context=9)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(made.to_dict()))
    for what, name in ((made, "qwen3"), (made.to_dict(), "qwen3"), (file, "plan"), (str(file), "plan")):
        for read in (plan.of, plan.read_config, lambda one: plan.over(one, "50GB/s,2us")):
            with pytest.raises(ValueError) as caught:
                read(what)
            line = f"'{name}' is a plan, not a config; give the config of the model"
            assert str(caught.value) == line


def test_the_record_is_frozen_and_goes_to_json() -> None:
    result = plan.of("gemma-3-1b", bandwidth="1TB/s", flops="100TF", heads_plan={"layers": {"*": {"keep": [0, 2]}}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.batch = 2  # type: ignore[misc]
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["contexts"][1]["cache_bytes"] == result.contexts[1].cache_bytes
    assert data["planned"]["parameters"]["attention"] < data["parameters"]["attention"]
    assert len(data["layers"]) == 26 and data["layers"][5]["window"] is None and data["layers"][4]["window"] == 512
    assert data["contexts"][0]["floors"][0]["binds"] == "weights"
    assert set(data["parameters"]) == {*ROOMS, "towers", "total"}


def test_what_is_printed() -> None:
    text = str(plan.of("deepseek-v3", context=8192, bandwidth="3.35TB/s", flops="990TF"))
    for part in (
        "70,272 B",
        "MLA",
        "W_Q",
        "W_DKV",
        "671,026,404,352",
        "7,808",
        "limited by",
        "exact:",
    ):
        assert part in text
    small = str(plan.of({**SMALL, "[bold]x[/bold]": 1}, context=10))
    assert "[bold]x[/bold]" in small and "not counted or unknown" in small
    encoder = str(plan.of("bert-base", context=512))
    assert "none: it reads the whole text in one pass" in encoder and "cache against" not in encoder


def test_the_bars_are_in_proportion() -> None:
    lines = str(plan.of("mistral-7b", context=16384)).splitlines()
    bars = {int(line.split()[0].replace(",", "")): line for line in lines if re.match(r" +[\d,]+  #", line)}
    assert list(bars) == [1024, 2048, 4096, 8192, 16384]
    assert bars[16384].count("#") == bars[4096].count("#") == 12 and bars[16384].count(".") >= 36


def test_the_svg_is_an_image_and_carries_no_script() -> None:
    plans = [plan.of(name, context=131072) for name in ("gemma-3-27b", "llama-3-8b", "bert-base")]
    drawing = plan.svg(plans)
    assert ElementTree.fromstring(drawing).tag.endswith("svg") and "<script" not in drawing
    assert "llama-3-8b" in drawing and "bert" not in drawing
    for page in (plans[0]._repr_html_(), plans[2]._repr_html_()):
        assert "<script" not in page and "<pre>" in page
    with pytest.raises(ValueError, match="an encoder keeps no cache, so there is nothing to draw"):
        plan.svg(plans[2:])


def test_units() -> None:
    assert units.rate("3.35TB/s", "bandwidth") == 3.35e12 and units.rate(5, "flops") == 5.0
    assert units.rate("312 TFLOPS", "flops") == 312e12 and units.rate("1.5e12", "bandwidth") == 1.5e12
    for bits in ("400Gb/s", "400 gb/s", "3b/s"):
        with pytest.raises(ValueError, match="per second, and a small b means bits; got"):
            units.rate(bits, "bandwidth")
    assert units.rate("400GBps", "bandwidth") == 400e9 and units.rate("990 TFLOPS/s", "flops") == 990e12
    assert units.link("50GBps,2us") == (50e9, 2e-6)
    assert units.rate("1000000", "bandwidth") == 1e6 and units.rate("999 B/s", "bandwidth") == 999.0
    forgotten = {
        "3.35": ("bandwidth", "3.35 bytes"),
        "999999": ("bandwidth", "999,999 bytes"),
        "990": ("flops", "990 F"),
    }
    for text, (what, value) in forgotten.items():
        with pytest.raises(ValueError, match=re.escape(f"{what} has no unit and would be {value}")):
            units.rate(text, what)
    assert units.contexts("1,2k, 3") == (1, 2048, 3)
    for wrong in ("", "1,", "1.5", "1e3", "x" * 100):
        with pytest.raises(ValueError, match="context is whole numbers separated by commas"):
            units.contexts(wrong)
    with pytest.raises(ValueError, match=r"context is at most 10,000,000,000 tokens; got '9999"):
        units.contexts("9" * 16)
    assert [units.show_bytes(n) for n in (0, 1023, 1024, 10 * 2**20, 2**80)] == [
        "0 B",
        "1,023 B",
        "1 KiB",
        "10 MiB",
        "1,048,576 EiB",
    ]


def test_planning_imports_neither_torch_nor_transformers() -> None:
    code = "from headwise import plan; str(plan.of('llama-3-8b')); import sys; "
    code += "print([name for name in ('torch', 'transformers', 'numpy', 'huggingface_hub') if name in sys.modules])"
    source = str(Path(headwise.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}); {code}"], capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
    assert "torch" in sys.modules and torch  # here it is there, so the check above can fail
