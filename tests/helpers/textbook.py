"""Multi-head attention as the textbook writes it: h small attentions. Nothing of headwise but the small matrices."""

import copy

import torch
from torch import Tensor

from headwise.nn import MultiHeadAttention


def head_outputs(
    mha: MultiHeadAttention,
    x: Tensor,
    memory: Tensor | tuple[Tensor, Tensor] | None = None,
    allowed: Tensor | None = None,
) -> list[Tensor]:
    """head_i = softmax(Q_i K_i^T / sqrt(d_k)) V_i, each (B, T, V); `allowed` is (T, S), True = attend."""
    pair = memory if isinstance(memory, tuple) else (memory, memory)
    for_keys, for_values = (x if part is None else part for part in pair)
    outputs = []
    for i in range(mha.num_heads):
        h = mha.head(i)
        Q = x @ h.W_Q + (0 if h.b_Q is None else h.b_Q)
        K = for_keys @ h.W_K + (0 if h.b_K is None else h.b_K)
        V = for_values @ h.W_V + (0 if h.b_V is None else h.b_V)
        scores = Q @ K.transpose(-1, -2) / Q.shape[-1] ** 0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        outputs.append(torch.softmax(scores, -1) @ V)
    return outputs


def summed(mha: MultiHeadAttention, heads: list[Tensor]) -> Tensor:
    """sum_i head_i W_O^i (+ the bias of o_proj)."""
    total = sum(head @ mha.head(i).W_O for i, head in enumerate(heads))
    assert isinstance(total, Tensor)
    return total if mha.o_proj.bias is None else total + mha.o_proj.bias


def concatenated(mha: MultiHeadAttention, heads: list[Tensor]) -> Tensor:
    """Concat(head_1, ..., head_h) W_O (+ the bias of o_proj)."""
    W_O = torch.cat([mha.head(i).W_O for i in range(mha.num_heads)])
    return torch.cat(heads, dim=-1) @ W_O + (0 if mha.o_proj.bias is None else mha.o_proj.bias)


def in_float64(mha: MultiHeadAttention) -> MultiHeadAttention:
    """A copy of the module in float64."""
    return copy.deepcopy(mha).double()
