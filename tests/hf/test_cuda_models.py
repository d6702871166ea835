"""Transformers models on CUDA: forward passes, `generate` and `look` give the CPU's numbers."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from cuda_places import assert_close, everywhere, on_cuda
from draw import slow_except
from hf_models import BY_NAME, PAD, inputs
from pretend_cuda import pretend_cuda
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel
from triton_cases import needs_triton

from headwise import look
from headwise.hf import make_cache
from headwise.hf.models.architectures import CACHE
from headwise.look.collect.reduce import on_host
from headwise.testing import assert_same_bits

pytestmark = pytest.mark.unchecked
ROWS = ("Llama GQA", "Gemma2 softcap", "gpt-oss sinks")
CACHES: dict[str, dict[str, Any] | None] = {
    "transformers'": None,
    "static": {"kind": "static", "max_length": 64},
    "paged": {"kind": "paged"},
    "static int8": {"kind": "static", "max_length": 64, "bits": 8},
}
every_row = pytest.mark.parametrize("name", slow_except(ROWS, ("gpt-oss sinks",)))  # it has all that the others have


def model_of(name: str) -> PreTrainedModel:
    model = BY_NAME[name].build()
    model.set_attn_implementation("headwise")
    return model


def generated(model: PreTrainedModel, arguments: dict[str, Tensor], made: dict[str, Any] | None) -> Tensor:
    cache = DynamicCache(config=model.config) if made is None else make_cache(model, **made)
    how: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": PAD, "do_sample": False}
    return model.generate(**arguments, **{CACHE: cache}, **how)


@everywhere
@every_row
def test_forward_and_generate(name: str, cuda: Any) -> None:
    model, arguments = model_of(name), inputs(BY_NAME[name])
    with torch.no_grad():
        logits = model(**arguments).logits
        texts = {kind: generated(model, arguments, made) for kind, made in CACHES.items()}
    with cuda():
        moved = copy.deepcopy(model).to("cuda")
        assert_close(moved(**on_cuda(arguments)).logits, logits, atol=2e-4)
        for kind, made in CACHES.items():
            assert torch.equal(generated(moved, on_cuda(arguments), made).cpu(), texts[kind]), kind


def of_bytes(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).astype(float)


@everywhere
@every_row
def test_look(name: str, cuda: Any) -> None:
    model = model_of(name)
    ids = torch.randint(3, 50, (61,), generator=torch.Generator().manual_seed(1))
    repeats = look.Repeats(sequences=2, length=20)
    expected = look.at(model, ids, repeats=repeats)
    with cuda():
        ours = look.at(copy.deepcopy(model).to("cuda"), ids, repeats=repeats)
    for x, y in zip(ours.heads, expected.heads, strict=True):
        assert (x.layer, x.head) == (y.layer, y.head)
        for a, b in zip(x.scores.values(), y.scores.values(), strict=True):
            assert a.value == pytest.approx(b.value, abs=1e-5)
        assert (x.entropy, x.largest, x.distance) == pytest.approx((y.entropy, y.largest, y.distance), abs=1e-5)
        assert x.first_moved == pytest.approx(y.first_moved, abs=1e-5)
    for a, b in zip((*ours.maps, *ours.moved), (*expected.maps, *expected.moved), strict=True):
        assert of_bytes(a.data) == pytest.approx(of_bytes(b.data), abs=1)
    for one, other in zip(ours.neurons, expected.neurons, strict=True):
        assert of_bytes(one.weights) == pytest.approx(of_bytes(other.weights), abs=1)
        for name in ("query", "key", "value"):
            assert getattr(one, name).array() == pytest.approx(getattr(other, name).array(), abs=1e-4)


def test_a_copy_to_the_host_keeps_every_bit_and_waits_once() -> None:
    numbers = {
        "bytes": torch.tensor([3, 200], dtype=torch.uint8),
        "flag": torch.tensor(True),
        "doubles": torch.tensor([[0.1, math.nan], [-0.0, 1e-300]], dtype=torch.float64),
        "halves": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3).mT,
        "places": (torch.tensor([1 << 62]), torch.empty(0, 3)),
    }
    with pretend_cuda() as counts:
        there = on_cuda(numbers)
        counts.clear()
        back = on_host({**there, "name": None})
        assert counts.waits() == 1 and back.pop("name") is None
    for x, y in zip(tree_leaves(back), tree_leaves(numbers), strict=True):
        assert_same_bits(x, y)
    assert on_host(numbers) is numbers


@needs_triton
@pytest.mark.parametrize(
    ("full_maps", "waits", "launches"), [(False, 1, 56), (True, 2, 120)], ids=["small maps", "and what they move"]
)
def test_what_a_look_costs(full_maps: bool, waits: int, launches: int) -> None:
    """Waits and launches of a layer, the model's own 41 launches among them; and 3 waits of a look."""
    ids = torch.randint(3, 50, (61,), generator=torch.Generator().manual_seed(1))
    spent = []
    for layers in (1, 2):
        model = BY_NAME["Llama GQA"].build(num_hidden_layers=layers)
        model.set_attn_implementation("headwise")
        with pretend_cuda() as counts:
            model.to("cuda")
            counts.clear()
            look.at(model, ids, full_maps=full_maps, repeats=None)
            spent.append((counts.waits(), counts.launches.total()))
    (one, few), (two, more) = spent
    assert two - one <= waits and more - few <= launches
    assert one <= 3 + waits
