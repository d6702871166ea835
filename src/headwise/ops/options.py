"""What happens to scores before they become weights: one record for the op, its backends, statistics and gradient."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ..shapes import check_options, compute_dtype
from .masks.mask import Mask, as_mask


class ScoringOptions(TypedDict, total=False):
    """The keywords that all functions of attention share; see `headwise.attention`."""

    mask: Mask | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class CallOptions(ScoringOptions, total=False):
    """And what else the keywords of `headwise.attention` say of the result."""

    dropout: float
    gate: Tensor | None


class Options(CallOptions, total=False):
    """The keywords of `headwise.attention`, but for `return_lse`."""

    backend: str


class Scoring(NamedTuple):
    """Scale, softcap, mask (biases included) and sinks of a call, checked; they act in that order.

    Attributes:
        mask: a mask without parts lets everything through.
        scale: factor of the scores.
        softcap: None leaves the scores as they are.
        sinks: (H,) logits that join the softmax's denominator, or None.
    """

    mask: Mask
    scale: float
    softcap: float | None
    sinks: Tensor | None

    @staticmethod
    def of(
        query: Tensor,
        key: Tensor,
        mask: Mask | Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Scoring:
        """The options checked against query (B, H, T, D) and key (B, K, S, D), the mask in the call's precision.

        Raises TypeError or ValueError that names the option.
        """
        scale, softcap, _ = check_options(query, scale, softcap, sinks)
        B, H, T, _ = query.shape
        mask = as_mask(mask).sized(B, H)
        mask.check(B, H, T, key.shape[2], query.device)
        return Scoring(mask.computed_in(compute_dtype(query)), scale, softcap, sinks)

    def trimmed(self, T: int, S: int) -> Scoring:
        """The same at this size, without the rules that forbid nothing."""
        return self._replace(mask=self.mask.trimmed(T, S))

    @property
    def learns(self) -> bool:
        """A gradient will be asked of the sinks, a bias, slopes or a table."""
        return torch.is_grad_enabled() and ((self.sinks is not None and self.sinks.requires_grad) or self.mask.learns)
