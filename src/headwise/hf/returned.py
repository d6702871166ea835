"""Attention together with the weights that a caller requested."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.output_capturing import _active_collector  # private API

from ..cache.base import Stored
from ..ops.attention import attention
from ..ops.statistics.weights import weighted_values, weights
from ..ops.storage.layout import in_one_piece


class Returned(NamedTuple):
    """The form of the returned weights.

    Attributes:
        keys: The number of keys that the model passed; keys at the end that are not computed yet have weight 0.
        dtype: The dtype of the weights.
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
    """Return out (B, H, T, V), and the weights (B, H, T, keys), or None if `returned` is None.

    If the weights have a gradient, out is computed from the returned tensor after dropout, as "eager" does, because
    attention x gradient, Grad-CAM and LeGrad read the gradient of that tensor. Otherwise a kernel computes out. If
    `answer` replaces out, out does not depend on the weights, so they have no gradient.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D), as a cache stores it.
        value: (B, K, S, V), as a cache stores it.
        answer: The replacement of out, (B, H, T, V); None to compute out.
        returned: The form of the weights; None to return no weights.
        dropout: The probability with which a weight is dropped.
        backend: The backend of `headwise.attention`, if a kernel computes out.
        options: mask, scale, softcap and sinks, as in `headwise.weights`.
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


def attentions_are_collected() -> bool:
    """Return True if an outer caller requested attentions; most models pass the request only through this collector."""
    wanted = _active_collector.get()
    return bool(wanted) and any("attentions" in key for key in wanted)
