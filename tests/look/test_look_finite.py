"""Numbers that are not finite: the error names the weight that is to blame, or a dtype that is wider."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, token_ids

from headwise import look

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
