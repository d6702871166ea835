"""Targets of the loss for models that predict no words: their classes, or the embedding of the text."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["words", "classes", "embedding"]
DIRECTIONS = 16
"""The most directions along which the change of an embedding is measured."""


def kind_of(output: Any, tokens: int, vocabulary: int | None, *, is_encoder: bool) -> Kind:
    """Return the kind of output of a model on one text of `tokens`; ``"words"`` also for an output of no known kind.

    The last states of a model in which no token attends to later ones, `is_encoder`, are no embedding of a text.
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
    """Return the value under a name in an output; None if it has none, as in a plain tensor."""
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def as_classes(logits: Tensor) -> Tensor:
    """Return logits (B, T, C) of at least two classes, from (B, T, C) or (B, C), where one position is for all.

    A single z, as of rerankers, becomes the pair 0 and z.
    """
    logits = logits[:, None] if logits.ndim == 2 else logits
    return nn.functional.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits


def embedding(output: Any) -> Tensor:
    """Return the embeddings (B, M) float32: the last states, mean over the tokens, at length 1."""
    states: Tensor = part_of(output, "last_hidden_state")
    return nn.functional.normalize(states.float().mean(1), dim=-1)


def drift(one: Tensor, other: Tensor) -> Tensor:
    """Return 1 - cosine (B,) of embeddings of length 1, from their difference: precise if they are nearly equal."""
    return (one - other).square().sum(-1) / 2


def along_directions(embedded: Tensor) -> list[Tensor]:
    r"""Return scalars whose gradients give the rate of change of an embedding (1, M).

    $\sum_k |\nabla s_k|^2 \approx |\nabla e|^2$: the scalars are components along random orthogonal directions, scaled
    so that the sum is right on average over the directions, and exact for M of them. They replace the drift, whose
    gradient is 0 with all heads on.
    """
    width = embedded.shape[-1]
    count = min(width, DIRECTIONS)
    draw = torch.randn(width, count, generator=torch.Generator().manual_seed(width), dtype=torch.float64, device="cpu")
    directions = torch.linalg.qr(draw).Q * (width / count) ** 0.5
    return list((embedded @ directions.to(embedded)).flatten())
