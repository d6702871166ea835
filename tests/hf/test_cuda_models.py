"""Transformers models on CUDA: forward passes, `generate` and `look` give the CPU's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cuda_places import assert_close, everywhere, on_cuda
from draw import slow_except
from hf_models import BY_NAME, PAD, inputs
from pretend_cuda import pretend_cuda
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from triton_cases import needs_triton

from headwise import look
from headwise.hf import make_cache
from headwise.hf.models.architectures import CACHE

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


@needs_triton
@pytest.mark.parametrize(
    ("full_maps", "waits", "launches"), [(False, 2, 100), (True, 14, 240)], ids=["small maps", "and what they move"]
)
def test_what_a_look_costs(full_maps: bool, waits: int, launches: int) -> None:
    """Waits and launches of each layer, beside 5 waits of a look and the 91 launches of the model's own forward."""
    model = model_of("Llama GQA")
    ids = torch.randint(3, 50, (61,), generator=torch.Generator().manual_seed(1))
    with pretend_cuda() as counts:
        model.to("cuda")
        counts.clear()
        look.at(model, ids, full_maps=full_maps, repeats=None)
    layers = model.config.num_hidden_layers
    assert counts.waits() <= 5 + waits * layers and counts.launches.total() <= 91 + launches * layers
