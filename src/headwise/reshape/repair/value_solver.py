"""Solve the values' projection again, for given attention weights and W_O: attention is linear in its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...nn.hooks.probe import AttentionCall
from ...ops.attention import attention
from .paired_models import ModuleBatch


@dataclass(frozen=True, eq=False)
class ValueSystem:
    """The parts of a layer that do not change while W_V is solved.

    Attributes:
        output: (H V, M), the matrix W_O.
        output_bias: (M,) or None.
        value_bias: (K V,) or None.
        num_kv_heads: K.
    """

    output: Tensor
    output_bias: Tensor | None
    value_bias: Tensor | None
    num_kv_heads: int

    def heads(self, W: Tensor, call: AttentionCall, source: Tensor, *, bias: bool = True) -> Tensor:
        """Return the concatenated heads (B, T, H V), with values from W (N, K V) and the source (B, S, N)."""
        value = source @ W
        if bias and self.value_bias is not None:
            value = value + self.value_bias
        value = value.unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        return attention(call.query, call.key, value, gate=call.gate, **call.scoring).transpose(1, 2).flatten(2)


def error(layer: ValueSystem, W: Tensor, samples: Sequence[ModuleBatch]) -> float:
    """Return the squared error of the output with these values, as a share of the target's squares."""
    left = whole = 0.0
    with torch.no_grad():
        for sample in samples:
            out = layer.heads(W, sample.call, sample.source) @ layer.output
            out = out if layer.output_bias is None else out + layer.output_bias
            left += float((out - sample.target).double().square().sum())
            whole += float(sample.target.double().square().sum())
    return left / max(whole, torch.finfo(torch.float64).tiny)


def solve_values(
    layer: ValueSystem, start: Tensor, fit: Sequence[ModuleBatch], check: Sequence[ModuleBatch], steps: int
) -> Tensor | None:
    """Return the W (N, K V) of least error on `fit`, after `steps` steps of conjugate gradients from `start`.

    The step with the least error on `check` is returned, or None if that is the start. The matrix of the normal
    equations has as many entries as W squared and is never computed: a step is one forward and backward pass of
    attention. The steps are preconditioned by the second moments of the hidden states and of W_O.
    """
    by_source, by_output = _scaling(layer, start, fit)

    def scaled(gradient: Tensor) -> Tensor:
        blocks = (by_source @ gradient).unflatten(1, (layer.num_kv_heads, -1))
        return torch.einsum("nkv,kvw->nkw", blocks, by_output).flatten(1)

    def product(direction: Tensor, *, residual: bool = False) -> Tensor:
        """Return the normal equations' matrix times `direction`; with `residual`, the gradient of half the error."""
        total = torch.zeros_like(direction)
        for sample in fit:
            W = direction.detach().to(sample.source.dtype).requires_grad_()
            with torch.enable_grad():
                heads = layer.heads(W, sample.call, sample.source, bias=residual)
                out = heads @ layer.output
                if residual and layer.output_bias is not None:
                    out = out + layer.output_bias
                [gradient] = torch.autograd.grad(out, W, out.detach() - sample.target if residual else out.detach())
            total += gradient.to(torch.float64)
        return total

    W = start.to(torch.float64)
    best, least = None, error(layer, start, check)
    left = -product(W, residual=True)
    toward = scaled(left)
    direction, agreement = toward, float((left * toward).sum())
    for _ in range(steps):
        if not agreement > 0:  # the residual is zero
            break
        pushed = product(direction)
        length = agreement / max(float((direction * pushed).sum()), torch.finfo(torch.float64).tiny)
        W, left = W + length * direction, left - length * pushed
        toward = scaled(left)
        before, agreement = agreement, float((left * toward).sum())
        direction = toward + agreement / before * direction
        now = error(layer, W.to(start.dtype), check)
        if now < least:
            best, least = W.to(start.dtype), now
    return best


def _scaling(layer: ValueSystem, start: Tensor, samples: Sequence[ModuleBatch]) -> tuple[Tensor, Tensor]:
    """Return the inverse second moments of the sources (N, N), and of W_O for each key-value head (K, V, V)."""
    source = torch.zeros(start.shape[0], start.shape[0], dtype=torch.float64, device=start.device)
    for sample in samples:
        rows = sample.source.to(torch.float64).flatten(0, -2)
        source += rows.T @ rows
    V = start.shape[1] // layer.num_kv_heads
    output = layer.output.to(torch.float64).unflatten(0, (layer.num_kv_heads, -1, V))
    return _inverse(source), _inverse(torch.einsum("kgvm,kgwm->kvw", output, output))


def _inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive matrix plus a small multiple of I; a preconditioner need not be exact."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return torch.linalg.inv(matrix + (1e-4 * mean + torch.finfo(matrix.dtype).tiny) * eye)
