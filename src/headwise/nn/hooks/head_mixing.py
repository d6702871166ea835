"""The contribution of each head to the output of W_O, and to each slice of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .projections import plain_weight

if TYPE_CHECKING:
    from ..multihead import MultiHeadAttention


@dataclass(frozen=True)
class Mixing:
    """Contributions of the heads on one input: the output, without bias, is the sum of ``head_i W_O^i`` over the heads.

    Attributes:
        share: For each head i, ``<contribution_i, output> / <output, output>``, its share of the output. The shares
            sum to 1; a head that opposes the others has a negative share.
        own: For each of H equal slices of the output's columns, the fraction of the energy (sum of squares) of all
            contributions to slice i that comes from head i. Without W_O it is 1 for every slice.
        cosine: Mean cosine between the concatenated heads and the output of a token; None if their widths differ.
    """

    share: tuple[float, ...]
    own: tuple[float, ...]
    cosine: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {"share": list(self.share), "own": list(self.own), "cosine": self.cosine}

    def __str__(self) -> str:
        lines = [
            "what W_O changes (measured on this input):",
            "  before W_O, slice i of the concatenation is head i alone: own share 1.00 in each slice",
            f"  after W_O, head i's own share of slice i of the output: {_numbers(self.own)}",
            f"  share of the whole output that each head makes (sums to 1): {_numbers(self.share)}",
        ]
        if self.cosine is not None:
            lines.append(f"  cosine between concatenation and output: {self.cosine:.2f}")
        return "\n".join(lines)


def _numbers(values: tuple[float, ...], most: int = 16) -> str:
    more = f" ... ({len(values)} in all)" if len(values) > most else ""
    return " ".join(f"{value:.2f}" for value in values[:most]) + more


@torch.no_grad()
def measure_mixing(mha: MultiHeadAttention, joined: Tensor) -> Mixing | None:
    """Measure how W_O mixes concatenated heads (B, T, H * V); needs memory for two outputs, for any H.

    Returns None if o_proj is not a plain linear layer, as its weight alone then does not determine its output.
    """
    H, weight = mha.num_heads, plain_weight(mha.o_proj)
    if weight is None:
        return None
    heads = joined.detach().float().tensor_split(H, dim=-1)
    matrices = weight.detach().float().tensor_split(H, dim=-1)
    total = torch.zeros((*joined.shape[:-1], mha.d_model), device=joined.device)
    for head, matrix in zip(heads, matrices, strict=True):
        total += head @ matrix.T
    shares, energies = [], []
    for head, matrix in zip(heads, matrices, strict=True):
        contribution = head @ matrix.T
        shares.append((contribution * total).sum())
        energies.append(torch.stack([part.square().sum() for part in contribution.tensor_split(H, dim=-1)]))
    energy = torch.stack(energies)  # head, slice
    whole = total.square().sum()
    own = energy.diagonal() / energy.sum(0).clamp_min(torch.finfo(energy.dtype).tiny)  # 0 for a slice of zeros
    cosine = None
    if joined.shape == total.shape:
        cosine = float(torch.cosine_similarity(joined.float(), total, dim=-1).mean())
    return Mixing(
        tuple((torch.stack(shares) / whole.clamp_min(torch.finfo(whole.dtype).tiny)).tolist()),
        tuple(own.tolist()),
        cosine,
    )
