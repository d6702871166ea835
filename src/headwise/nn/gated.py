"""Multi-head attention with a learned output gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops.native.decode_step import runs_plain
from ..shapes import check_gate
from ..shapes.arguments import check_counts, check_flags, shown
from .checks import check_input
from .decode.fused_step import projected
from .head_views import split_heads
from .multihead import MultiHeadAttention


class OutputGate(nn.Module):
    r"""A gate computed from the input of the attention module.

    $$G = \sigma(X W_G), \qquad \text{MultiHead}(X) = \text{Concat}(G_1 \odot \text{head}_1, \dots) W_O$$

    The elementwise gate has a factor for each of the V numbers of a head; the headwise gate has one factor per head and
    token. Source: Qiu et al. 2025, "Gated Attention for Large Language Models", arXiv 2505.06708
    (positions G1, elementwise and headwise).

    Args:
        d_model: Width M of the input.
        num_heads: Query heads H.
        value_dim: Size V of a value; None for the headwise gate.
        bias: Whether the projection has a bias.

    Raises:
        TypeError, ValueError: a size is not a positive int, or `bias` is not a bool.

    Example:
        >>> import torch
        >>> OutputGate(12, 3, 5)(torch.randn(2, 7, 12)).shape
        torch.Size([2, 3, 7, 5])
        >>> OutputGate(12, 3)(torch.randn(2, 7, 12)).shape
        torch.Size([2, 3, 7])
    """

    def __init__(self, d_model: int, num_heads: int, value_dim: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        check_counts(1, d_model=d_model, num_heads=num_heads, value_dim=1 if value_dim is None else value_dim)
        check_flags(bias=bias)
        self.d_model, self.value_dim = d_model, value_dim
        self.proj = nn.Linear(d_model, num_heads * (value_dim or 1), bias=bias)

    def forward(self, x: Float[Tensor, "B T M"]) -> Tensor:
        """Return the gate of `x` (B, T, M): (B, H, T, V), or (B, H, T) for the headwise gate."""
        check_input(x, self.d_model, self.proj)
        gate = torch.sigmoid(projected(self.proj, x) if runs_plain() else self.proj(x))
        # The heads are counted from the result: with heads split over ranks, this rank has fewer than the module.
        size = self.value_dim or 1
        gate = split_heads(gate, gate.shape[-1] // size, size)
        return gate.squeeze(-1) if self.value_dim is None else gate


def times_gate(own: Tensor, gate: Tensor | None, out_shape: Sequence[int]) -> Tensor:
    """Return a module's own gate times that of the call, which broadcast to (B, H, T, V); `gate` may be None."""
    if gate is None:
        return own
    return check_gate(own, out_shape, own.device) * check_gate(gate, out_shape, own.device)


def output_gate_of(module: nn.Module) -> OutputGate | None:
    """Return the `OutputGate` of an attention module, whose rows belong to heads; None for any other gate, or none."""
    gate = module.gate if isinstance(module, GatedMultiHeadAttention) else None
    return gate if isinstance(gate, OutputGate) else None


GateFactory = Callable[[int, int, int], nn.Module]


def headwise_gate(d_model: int, num_heads: int, value_dim: int) -> OutputGate:
    """Return the headwise `OutputGate`: one factor per head and token, whatever the `value_dim`."""
    check_counts(1, value_dim=value_dim)
    return OutputGate(d_model, num_heads)


class GatedMultiHeadAttention(MultiHeadAttention):
    """`headwise.MultiHeadAttention` with an output gate as a part: ``gate(x)`` multiplies the heads before W_O.

    The gate is computed from `x`, also in cross-attention, and applies in every call: with caches, in training, with
    heads split over ranks. A `gate` given to the call multiplies it.

    Args:
        d_model: Width M of input and output.
        num_heads: Query heads H.
        gate: A factory ``(d_model, num_heads, value_dim) -> module``; the module maps (B, T, M) to (B, H, T, V) or
            (B, H, T). `OutputGate` is the elementwise gate, `headwise_gate` the headwise one.
        **options: The options of `headwise.MultiHeadAttention`.

    Raises:
        TypeError: `gate` is not a factory of a module; or as for `headwise.MultiHeadAttention`.
        ValueError: As for `headwise.MultiHeadAttention`.

    Example:
        >>> import torch, headwise
        >>> gated = headwise.nn.GatedMultiHeadAttention(12, 6, num_kv_heads=2)
        >>> x = torch.randn(2, 5, 12)
        >>> plain = headwise.MultiHeadAttention(12, 6, num_kv_heads=2)
        >>> names = plain.load_state_dict(gated.state_dict(), strict=False).unexpected_keys
        >>> names
        ['gate.proj.weight']
        >>> torch.allclose(gated(x), plain(x, gate=gated.gate(x)))
        True
    """

    takes_steps = True

    def __init__(self, d_model: int, num_heads: int, *, gate: GateFactory = OutputGate, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        if isinstance(gate, nn.Module) or not callable(gate):
            raise TypeError(
                "gate is a factory (d_model, num_heads, value_dim) -> module, such as headwise.nn.OutputGate or "
                f"headwise.nn.headwise_gate; got {shown(gate)}"
            )
        self.gate = gate(d_model, num_heads, self.value_dim)
        if not isinstance(self.gate, nn.Module):
            raise TypeError(f"gate is a factory that returns a torch.nn.Module; it returned {shown(self.gate)}")

    def _gate(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """Return the gate of `x`, times the gate of the call (B, H, T, V)."""
        return times_gate(self.gate(x), gate, (x.shape[0], self.num_heads, x.shape[1], self.value_dim))
