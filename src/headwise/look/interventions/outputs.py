"""What a loss is measured on where a model names no words: its classes, or the embedding of the text."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["words", "classes", "embedding"]
DIRECTIONS = 16
"""Directions along which the change of an embedding is measured; all of them where it is no wider than that."""


def kind_of(output: Any, tokens: int, vocabulary: int | None, *, is_encoder: bool) -> Kind:
    """Return which of the three a model gives of a text of so many tokens; ``"words"`` also for what is none of them.

    Args:
        output: What the model gave of one text.
        tokens: How many tokens the text has.
        vocabulary: How many ids the model knows; None where it does not say.
        is_encoder: Whether a token sees those after it. The last states of a decoder are no embedding of a text.
    """
    logits, states = part_of(output, "logits"), part_of(output, "last_hidden_state")
    if isinstance(logits, Tensor) and logits.is_floating_point():
        by_token = logits.ndim == 3 and logits.shape[1] == tokens
        if logits.ndim == 2 or (by_token and vocabulary is not None and logits.shape[-1] < vocabulary):
            return "classes"
    elif is_encoder and isinstance(states, Tensor) and states.ndim == 3 and states.shape[1] == tokens:
        return "embedding"
    return "words"


def part_of(output: Any, name: str) -> Any:
    """Return what stands in an output under a name; None where nothing does, as in a plain tensor."""
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def as_classes(logits: Tensor) -> Tensor:
    """Logits (..., C) of at least two classes. A single number z, as rerankers give it, is yes or no with 0 and z."""
    return nn.functional.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits


def embedding(output: Any) -> Tensor:
    """(B, M) float32: the last states, mean over the tokens, at length 1."""
    states: Tensor = part_of(output, "last_hidden_state")
    return nn.functional.normalize(states.float().mean(1), dim=-1)


def drift(one: Tensor, other: Tensor) -> Tensor:
    """(B,): 1 - cosine of embeddings of length 1, by their difference, which loses no digits where they are alike."""
    return (one - other).square().sum(-1) / 2


def along_directions(embedded: Tensor) -> list[Tensor]:
    r"""Scalars whose gradients tell how fast an embedding (1, M) changes: $\sum_k |\nabla s_k|^2 \approx |\nabla e|^2$.

    They are the components along orthogonal directions, scaled so that the sum is right in the mean over all choices of
    directions; it is exact where there are M of them. The drift itself has gradient 0 where nothing is switched off.
    """
    width = embedded.shape[-1]
    count = min(width, DIRECTIONS)
    draw = torch.randn(width, count, generator=torch.Generator().manual_seed(width), dtype=torch.float64, device="cpu")
    directions = torch.linalg.qr(draw).Q * (width / count) ** 0.5
    return list((embedded @ directions.to(embedded)).flatten())
