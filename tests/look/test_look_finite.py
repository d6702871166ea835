"""Numbers that are not finite: the error names the weight that is to blame, or a dtype that is wider."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, token_ids

from headwise import look
from headwise.look.inputs.nonfinite import spoilt

COMMANDS: dict[str, Callable[[Any, Any], Any]] = {
    "look": look.at,
    "importance": lambda model, ids: look.importance(model, ids, by="zero"),
    "ablate": lambda model, ids: look.ablate(model, ids, [(0, 0)]),
    "circuits": look.circuits,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_weight_that_is_nan_is_named(name: str) -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    COMMANDS[name](model, token_ids(9)[:1])
    place = "model.layers.1.self_attn.q_proj.weight"
    with torch.no_grad():
        model.get_parameter(place)[0, 0] = torch.nan
    text = f"its weight {place!r} holds NaN or infinity: download the checkpoint anew"
    with pytest.raises(ValueError, match=re.escape(text)):
        COMMANDS[name](model, token_ids(9)[:1])


@pytest.mark.parametrize("name", ["look", "importance"])
def test_a_wider_dtype_is_named_where_the_weights_are_finite(name: str) -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        for part in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
            part.weight.mul_(1e25)
    with pytest.raises(ValueError, match=r"; load the model in float64$"):
        COMMANDS[name](model, token_ids(9)[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_faulty_weight_of_any_float_dtype_is_named(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    assert spoilt(model) is None
    with torch.no_grad():
        model[1].weight[1, 3] = torch.inf
    assert "'1.weight'" in str(spoilt(model))
