"""The operations on scores before the softmax: one record for the operator, backends, statistics and gradient."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ..shapes import check_options, compute_dtype
from .masks.mask import Mask, as_mask


class ScoringOptions(TypedDict, total=False):
    """The keywords that all attention functions share; see `headwise.attention`."""

    mask: Mask | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class CallOptions(ScoringOptions, total=False):
    """The shared keywords, plus dropout and gate, which change the output of `headwise.attention`."""

    dropout: float
    gate: Tensor | None


class Options(CallOptions, total=False):
    """The keywords of `headwise.attention` except `return_lse`."""

    backend: str


class Scoring(NamedTuple):
    """The checked scale, softcap, mask (biases included) and sinks of a call; they are applied in this order.

    Attributes:
        mask: a mask without parts allows every key.
        scale: factor of the scores.
        softcap: None leaves the scores unchanged.
        sinks: (H,) logits that are added to the softmax's denominator, or None.
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
        """Check the options against query (B, H, T, D) and key (B, K, S, D); return them, the mask in compute dtype.

        Raises TypeError or ValueError with the name of the option.
        """
        scale, softcap, _ = check_options(query, scale, softcap, sinks)
        B, H, T, _ = query.shape
        mask = as_mask(mask).sized(B, H)
        mask.check(B, H, T, key.shape[2], query.device)
        return Scoring(mask.computed_in(compute_dtype(query)), scale, softcap, sinks)

    def trimmed(self, T: int, S: int) -> Scoring:
        """Return the same options at this size, without the rules that forbid nothing."""
        return self._replace(mask=self.mask.trimmed(T, S))

    @property
    def learns(self) -> bool:
        """True if the sinks, a bias, slopes or a table need a gradient."""
        return torch.is_grad_enabled() and ((self.sinks is not None and self.sinks.requires_grad) or self.mask.learns)
