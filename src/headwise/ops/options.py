"""What acts on the scores of a call: one record for the operator, backends, statistics, gradient, caches and ranks."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ..shapes import check_gate, check_options, compute_dtype
from .masks.mask import Mask, as_mask
from .masks.reads import tensors_in
from .sharding.heads import refuse_dtensors


class ScoreKeywords(TypedDict, total=False):
    """The keywords that all attention functions share; see `headwise.attention`."""

    mask: Mask | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class AttentionKeywords(ScoreKeywords, total=False):
    """The shared keywords, plus dropout and gate, which change the output of `headwise.attention`."""

    dropout: float
    gate: Tensor | None


class ScoreOptions(NamedTuple):
    """The checked options of a call, named as the keywords of `headwise.attention`: `_asdict()` gives them again.

    Scale, softcap, the biases of the mask, the mask, sinks, dropout and gate are applied in this order. The kernel
    takes another form of them, `native.mask_arguments.LoweredOptions`.

    Attributes:
        mask: a mask without parts allows every key.
        scale: factor of the scores.
        softcap: None leaves the scores unchanged.
        sinks: (H,) logits that are added to the softmax's denominator, or None.
        dropout: probability of zeroing a weight.
        gate: factor of the output, four axes, each 1 or the output's size; or None.
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    gate: Tensor | None = None

    @staticmethod
    def checked(
        query: Tensor,
        key: Tensor,
        mask: Mask | Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
        dropout: float = 0.0,
        gate: Tensor | None = None,
        *,
        value_dim: int = 0,
    ) -> ScoreOptions:
        """Check the options against query (B, H, T, D) and key (B, K, S, D); return them, the mask in compute dtype.

        `value_dim` is needed only for a gate. Raises TypeError or ValueError with the name of the option.
        """
        scale, softcap, dropout = check_options(query, scale, softcap, sinks, dropout)
        B, H, T, _ = query.shape
        mask = as_mask(mask).sized(B, H)
        _refuse_dtensors(mask, query=query, key=key, sinks=sinks, gate=gate)
        mask.check(B, H, T, key.shape[2], query.device)
        gate = None if gate is None else check_gate(gate, (B, H, T, value_dim), query.device)
        return ScoreOptions(mask.computed_in(compute_dtype(query)), scale, softcap, sinks, dropout, gate)

    def trimmed(self, T: int, S: int) -> ScoreOptions:
        """Return the same options at this size, without the rules that forbid nothing."""
        return self._replace(mask=self.mask.trimmed(T, S))

    @property
    def learns(self) -> bool:
        """True if the sinks, the gate, a bias, slopes or a table need a gradient."""
        tensors = (self.sinks, self.gate)
        return torch.is_grad_enabled() and (any(x is not None and x.requires_grad for x in tensors) or self.mask.learns)


def _refuse_dtensors(mask: Mask, **tensors: Tensor | None) -> None:
    """Refuse DTensors; `attention` cuts those of calls that have DTensors alone before the options are checked."""
    if torch.compiler.is_compiling():
        return
    takes = "this call takes plain tensors (headwise.attention also takes query, key and value that are DTensors all)"
    refuse_dtensors(takes, **tensors)
    for part in mask.parts:
        for x in tensors_in(part):
            refuse_dtensors(takes, **{"a tensor of the mask": x})
