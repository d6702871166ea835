"""What W_O does: how much of the output, and of each slice of it, every head makes."""

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
    """Measured on one input: the output is the sum of one contribution a head, ``head_i W_O^i`` (the bias left out).

    Attributes:
        share: For each head i, ``<contribution_i, output> / <output, output>``: how much of the output it makes. They
            sum to 1; a head that works against the others has a negative one.
        own: The output's columns in H equal slices. For each slice i, the part of its contributions' energy (sum of
            squares) that head i makes. Without W_O slice i is head i and nothing else: 1 for every slice.
        cosine: Mean cosine between a token's concatenated heads and its output; None where their widths differ.
    """

    share: tuple[float, ...]
    own: tuple[float, ...]
    cosine: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
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
    """The mixing that W_O does on concatenated heads (B, T, H * V); memory of two outputs, whatever H.

    None where o_proj is no plain linear layer, whose weight alone would not tell what it does.
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
    own = energy.diagonal() / energy.sum(0).clamp_min(torch.finfo(energy.dtype).tiny)  # a slice without energy: 0
    cosine = None
    if joined.shape == total.shape:
        cosine = float(torch.cosine_similarity(joined.float(), total, dim=-1).mean())
    return Mixing(
        tuple((torch.stack(shares) / whole.clamp_min(torch.finfo(whole.dtype).tiny)).tolist()),
        tuple(own.tolist()),
        cosine,
    )
