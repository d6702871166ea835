"""A pickled model that runs on headwise is right in a process that has not imported headwise."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from hf_models import BY_NAME, inputs, logits
from hf_seam_models import BY_NAME as OWN_CODE
from hf_seam_models import arguments

import headwise.hf  # noqa: F401  (registers)

READ = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    model, sample, wanted = pickle.load(file)
with torch.no_grad():
    seen = model(**sample).logits
assert torch.equal(seen, wanted), (seen - wanted).abs().max()
print(model.config._attn_implementation, "headwise.hf" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.unchecked
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("kind", ["headwise", "own code", "sdpa"])
def test_a_pickled_model_in_a_fresh_process(kind: str, protocol: int, tmp_path: Path) -> None:
    sample: Any
    if kind == "own code":
        model, sample = OWN_CODE["Bloom"].build("headwise"), arguments("none")
    else:
        model, sample = BY_NAME["Llama GQA"].build(), inputs(BY_NAME["Llama GQA"])
        model.set_attn_implementation(kind)
    with torch.no_grad():
        wanted = logits(model, sample)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps((model, sample, wanted), protocol))
    read = fresh.run(READ, str(tmp_path / "model.pkl"))
    assert read.returncode == 0, read.stderr
    assert read.stdout.split() == (["sdpa", "False"] if kind == "sdpa" else ["headwise", "True"])


def test_copies_of_a_config_are_what_they_were() -> None:
    config = BY_NAME["Llama GQA"].build().config
    config._attn_implementation = "headwise"
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(other) is type(config) and other.to_dict() == config.to_dict()
        assert type(other._attn_implementation) is str and other._attn_implementation == "headwise"
    config._attn_implementation = "eager"
    assert b"headwise" not in pickle.dumps(config)
