"""Drawn compositions of transformers' mask functions: headwise's mask is the function, evaluated pair by pair."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as theirs

from headwise.hf.attention.mask import headwise_mask

pytestmark = pytest.mark.skipif(
    not hasattr(theirs, "remap_positions_for_packed_sequence"),
    reason="this transformers does not renumber packed sequences",
)
B, T = 3, 7
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6], [4, 5, 0, 1, 2, 3, 9]])
OTHERS = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1, 0]])
SEEN = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]).bool()


def drawn_function(make: random.Random, depth: int = 2, *, bands: bool = False) -> tuple[Any, str]:
    """A mask function and its text; of positions alone, without a table over tokens, where `bands` says so."""
    kinds = ["causal", "window", "both ways", "a rule", *([] if bands else ["packed", "other packed", "padding"])]
    kind = make.choice(kinds if depth == 0 else [*kinds, "and", "and", "and", "or", "renumbered", "renumbered"])
    if kind in ("and", "or"):
        parts = [drawn_function(make, depth - 1) for _ in range(make.choice([2, 2, 3]))]
        joined = theirs.and_masks if kind == "and" else theirs.or_masks
        return joined(*(part for part, _ in parts)), f"{kind}({', '.join(text for _, text in parts)})"
    if kind == "renumbered":
        positions, name = make.choice([(POSITIONS, "own"), (OTHERS, "other")])
        inner, text = drawn_function(make, 0, bands=True)
        return theirs.remap_positions_for_packed_sequence(inner, positions), f"renumbered({name}, {text})"
    made = {
        "causal": lambda: theirs.causal_mask_function,
        "window": lambda: theirs.sliding_window_causal_mask_function(3),
        "both ways": lambda: theirs.bidirectional_mask_function,
        "packed": lambda: theirs.packed_sequence_mask_function(theirs.find_packed_sequence_indices(POSITIONS)),
        "other packed": lambda: theirs.packed_sequence_mask_function(theirs.find_packed_sequence_indices(OTHERS)),
        "padding": lambda: theirs.padding_mask_function(SEEN),
        "a rule": lambda: lambda b, h, q, k: (q + 2 * k) % 5 != 1,
    }
    return made[kind](), kind


def truth(function: Any) -> Tensor:
    """Each pair by itself."""
    allowed = torch.zeros(B, T, T).bool()
    for b in range(B):
        for i in range(T):
            for j in range(T):
                at = [torch.tensor(n) for n in (b, 0, i, j)]
                allowed[b, i, j] = bool(function(*at))
    return allowed


def test_compositions_mean_what_they_say_pair_by_pair() -> None:
    make, wrong = random.Random(3), []
    functions = [drawn_function(make) for _ in range(60)]
    renumbered = theirs.remap_positions_for_packed_sequence(theirs.causal_mask_function, POSITIONS)
    functions += [
        (theirs.and_masks(renumbered, theirs.padding_mask_function(SEEN)), "renumbered and padding"),
        (theirs.and_masks(renumbered, theirs.causal_mask_function), "renumbered and causal"),
    ]
    for function, text in functions:
        made = headwise_mask(B, T, T, 0, 0, mask_function=function)
        mask = made.mask.allowed(T, T, device=torch.device("cpu"))
        allowed = torch.ones(B, 1, T, T).bool() if mask is None else mask.expand(B, -1, T, T)
        if not torch.equal(allowed[:, 0], truth(function)):
            wrong.append(text)
    assert wrong == []
