"""transformers models whose heads are dealt out to several processes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import draw
import pytest
import ranks
import tp_hf_cases

pytestmark = pytest.mark.slow

NO_ACCELERATE = importlib.util.find_spec("accelerate") is None
splits_heads = pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.parallel_utils") is None,
    reason="transformers has its styles of tensor parallelism there since 5.23",
)


@splits_heads
def test_any_number_of_key_value_heads() -> None:
    """More than the ranks and not divided by them, divided, and one."""
    cases = [("Qwen2", 6, 3), ("Mistral", 6, 1), ("Llama", 6, 6), ("Llama", 6, 3), ("Qwen3", 6, 3)]
    for wrong in ranks.pool(2).run(tp_hf_cases.split_models, draw.drawn(cases)):
        assert wrong == {}


@splits_heads
def test_fewer_key_value_heads_than_ranks() -> None:
    cases = [("Qwen3", 6, 1), ("Qwen2", 6, 2), ("Mistral", 6, 2)]
    for wrong in ranks.pool(3).run(tp_hf_cases.split_models, draw.drawn(cases)):
        assert wrong == {}


def test_gathered_keys_are_right() -> None:
    cases = [("Llama", 6, 3), ("Mistral", 6, 1), ("Qwen2", 6, 2)]
    for wrong in ranks.pool(2).run(tp_hf_cases.gathered_keys, draw.drawn(cases)):
        assert wrong == {}


def test_sinks_and_biases_of_all_heads_are_cut() -> None:
    assert ranks.pool(2).run(tp_hf_cases.own_parts) == [{}] * 2


@pytest.mark.skipif(
    NO_ACCELERATE, reason="transformers loads with tensor parallelism only where accelerate is installed"
)
@pytest.mark.parametrize("K", [6, 3])
def test_what_transformers_loads_in_parts(tmp_path: Path, K: int) -> None:
    tp_hf_cases.build("Llama", 6, K).save_pretrained(tmp_path)
    for wrong in ranks.pool(2).run(tp_hf_cases.loaded, str(tmp_path), 6, K):
        assert wrong == {}


REFUSED = {
    "a norm behind gathered keys": r"ModelError: Qwen3Attention has k_norm behind keys that were gathered for all",
    "which runs without gradients": "True",
    "heads cut apart": r"RuntimeError: shape",
    "no model": r"TypeError: tensor_parallel takes a transformers PreTrainedModel; got Linear",
    "no mesh": r"TypeError: mesh is a torch.distributed DeviceMesh of one dimension; got 2",
    "no config": r"TypeError: tensor_parallel_config takes a transformers config; got \{\}",
    "no plan": r"ModelError: model_type 'gpt2' has no plan of tensor parallelism in transformers; write one, as",
    "uneven heads": r"ModelError: model_type 'llama': 6 heads do not divide over 4 processes; take a number",
    "fused": r"ModelError: model_type 'phi3': 3 key-value heads do not divide over 2 processes, and its plan has",
}


@pytest.mark.unchecked
def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for texts in ranks.pool(2).run(tp_hf_cases.refusals):
        assert texts.keys() == REFUSED.keys()
        wrong = [f"{name}: {texts[name]}" for name, text in REFUSED.items() if not re.match(text, texts[name])]
        assert wrong == [], "\n".join(wrong)
