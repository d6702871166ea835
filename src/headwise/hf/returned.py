"""Attention weights that a caller asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache.base import Stored
from ..ops.attention import attention
from ..ops.statistics.weights import weighted_values, weights
from ..ops.storage.layout import in_one_piece


class Returned(NamedTuple):
    """How weights are returned.

    Attributes:
        keys: How many keys the model passed; those that are not there yet, at the end, have weight 0.
        dtype: Of the weights.
    """

    keys: int
    dtype: torch.dtype


def attend_and_weigh(
    query: Tensor,
    key: Stored,
    value: Stored,
    answer: Tensor | None,
    returned: Returned | None,
    *,
    dropout: float = 0.0,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return out (B, H, T, V), and the weights (B, H, T, keys) where `returned` says how.

    Where the weights carry a gradient, out is computed from the tensor that is returned, after dropout, as "eager"
    does it: attention x gradient, Grad-CAM and LeGrad read the gradient that reaches that tensor. Everywhere else a
    kernel computes out. An `answer` in the place of out does not depend on the weights, so they have no gradient.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D), as a cache stores it.
        value: (B, K, S, V), likewise.
        answer: What stands in the place of out, (B, H, T, V); None where nothing does.
        returned: How the weights are returned; None where nobody asked for them.
        dropout: The probability with which a weight is dropped.
        backend: That of `headwise.attention`, where a kernel computes out.
        options: mask, scale, softcap and sinks, as of `headwise.weights`.
    """
    matrix = None
    if returned is not None:
        matrix = weights(query, in_one_piece(key, query.dtype), **options).to(returned.dtype)
        if returned.keys > key.shape[2]:
            matrix = F.pad(matrix, (0, returned.keys - key.shape[2]))
    if answer is not None:
        return answer, None if matrix is None else matrix.detach()
    if matrix is None or not matrix.requires_grad:
        return attention(query, key, value, dropout=dropout, backend=backend, **options), matrix
    matrix = F.dropout(matrix, dropout) if dropout else matrix
    out = weighted_values(matrix[..., : key.shape[2]], in_one_piece(value, query.dtype), options["mask"])
    return out.to(query.dtype), matrix
