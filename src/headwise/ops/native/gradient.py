"""The native kernel's call for autograd, the gradient of its gradient, and the operators without the kernel.

The library computes the first gradient (csrc/kernels/backward/). If that must be differentiated again, or gradients are
batched, `by_definition` computes it from the reference: it is differentiable any number of times and builds the T x S
matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..masks.mask import Mask
from ..masks.positional_rules import Alibi
from ..masks.rule import Rule
from ..masks.rules import Band, Bias, Keep, Lengths, Segments
from ..masks.tiles import TileMap, unpacked
from ..reference import reference
from ..storage.layout import StorageLayout
from ..storage.packed import rotated
from .mask_arguments import LoweredOptions


class Training(NamedTuple):
    """A call of the kernel with a gradient: the arguments of `attend_train`."""

    query: Tensor
    key: Tensor
    value: Tensor
    rules: LoweredOptions
    dropout: float
    seed: Tensor | None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Training:
        """Return the call from the operator's list of arguments."""
        *rules, dropout, seed = rest
        return Training(query, key, value, LoweredOptions(*rules), dropout, seed)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's list of arguments."""
        return (self.query, self.key, self.value, *self.rules, self.dropout, self.seed)

    @property
    def mask(self) -> Mask:
        """The mask, rebuilt from the operator's arguments."""
        return mask_of(self.rules, self.query.shape[2], self.key.shape[2])


def mask_of(rules: LoweredOptions, T: int, S: int) -> Mask:
    """Return the mask from which `lowered` made the arguments of an operator."""
    # `bounds` includes the two numbers.
    band = Band(1 - rules.low, rules.high - 1, 0).trimmed(T, S) if rules.bounds is None else None
    parts: list[Rule] = [] if band is None else [band]
    if rules.bounds is not None:
        low, high, start, stop, *always = rules.bounds.unbind(1)
        first = int(always[0][0]) if always else 0
        parts += [Band(1, None, low, first), Band(None, -1, high)] if bool(((low > -T) | (high < S)).any()) else []
        parts += [Lengths(stop, start)]
    parts += [Segments(*pair) for pair in _pairs(rules.segments)]
    parts += [Keep(x) if x.dtype == torch.bool else Bias(x) for x in rules.dense or []]
    parts += [Alibi(slopes, offset=offset) for slopes, offset in _pairs(rules.alibi)]
    parts += [Keep(unpacked(TileMap(*pair), T, S)) for pair in _pairs(rules.maps)]
    apart = torch.arange(S, device="cpu") - torch.arange(T, device="cpu")[:, None] + T - 1
    parts += [Bias(diagonals[..., apart]) for diagonals in rules.relative or []]
    return Mask(tuple(parts))


def _pairs(tensors: list[Tensor] | None) -> list[tuple[Tensor, Tensor]]:
    tensors = tensors or []
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def leaves_of(call: Training, biases: bool) -> list[Tensor]:
    """Return query, key, value, the sinks and, if `biases` is set, float masks, slopes and tables, if present."""
    rules = call.rules
    sinks = [] if rules.sinks is None else [rules.sinks]
    learned = [x for x in rules.dense or [] if x.is_floating_point()] + (rules.alibi or [])[::2]
    return [call.query, call.key, call.value, *sinks, *(learned + (rules.relative or []) if biases else [])]


def with_leaves(call: Training, biases: bool, leaves: Sequence[Tensor]) -> Training:
    """Return the call with other tensors in place of `leaves_of`, in the same order."""
    rules, (query, key, value, *rest) = call.rules, leaves
    others = iter(rest)
    if rules.sinks is not None:
        rules = rules._replace(sinks=next(others))
    if biases:
        rules = rules._replace(
            dense=[next(others) if x.is_floating_point() else x for x in rules.dense or []],
            alibi=[next(others) if n % 2 == 0 else x for n, x in enumerate(rules.alibi or [])],
            relative=[next(others) for _ in rules.relative or []],
        )
    return call._replace(query=query, key=key, value=value, rules=rules)


def by_definition(call: Training, biases: bool, grad_out: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    """Return the gradients of `leaves_of` the call as functions of them and of `grad_out` and `grad_lse`."""
    (B, H, T, _), S = call.query.shape, call.key.shape[2]
    kept = torch.ops.headwise.dropout_keep(call.seed, call.dropout, B, H, 0, T, S) if call.dropout > 0 else None
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Each leaf is a separate view: if the key is the query or made from it, it would get the gradient of both.
        leaves = [x.view_as(x) if x.requires_grad else x for x in leaves_of(call, biases)]
    call, learning = with_leaves(call, biases, leaves), [x for x in leaves if x.requires_grad]
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        out, lse = _by_reference(call, kept)
        results = [out] if grad_lse is None else [out, lse]
        grads = [grad_out] if grad_lse is None else [grad_out, grad_lse]
        gradients = iter(torch.autograd.grad(results, learning, grads, create_graph=again, allow_unused=True))
    wanted = [next(gradients) if x.requires_grad else None for x in leaves]
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(wanted, leaves, strict=True)]


def _by_reference(call: Training, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return out and lse; `kept` are the weights that dropout keeps, drawn here by default."""
    scale, softcap, sinks = call.rules[:3]
    return reference(
        call.query, call.key, call.value,
        mask=call.mask, scale=scale, softcap=softcap or None, sinks=sinks, dropout=call.dropout, kept=kept,
    )  # fmt: skip


def by_reference(
    call: Call, learning: Sequence[Tensor], grads: tuple[Tensor | None, Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the gradients of tensors that a call is made of, as functions of them and of `grads` of out and lse."""
    mask, scale, softcap, sinks, *_ = call.options
    results = reference(call.query, call.key, call.value, mask=mask, scale=scale, softcap=softcap, sinks=sinks)
    outputs = [x for x, grad in zip(results, grads, strict=True) if grad is not None]
    given = [grad for grad in grads if grad is not None]
    return torch.autograd.grad(outputs, learning, given, create_graph=True, allow_unused=True)


# The operators for installations without the library. A saved program with them then runs on the reference.


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, low: int, high: int) -> Tensor:
    """Compute the operator of this name from the reference."""
    return attend_train(query, key, value, scale, 0.0, None, low, high, *[None] * 6, 0.0, None)[0]


def attend_train(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator of this name from the reference."""
    return _by_reference(Training.of(*args))


def attend_full(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute the operator of this name from the reference."""
    *rest, gate, dropout, seed = args
    out, lse = attend_train(*rest, dropout, seed)
    return out if gate is None else out * gate, lse


def attend_held(
    query: Tensor, key: Tensor, key_scale: Tensor | None, value: Tensor, value_scale: Tensor | None,
    table: Tensor | None, length: int, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the operator of this name from the reference, on plain float keys and values.

    Packed keys and values stay in the basis in which they are stored, as the query is.
    """
    if table is None and length > 0:
        key, value = key[:, :, :length], value[:, :, :length]
        key_scale, value_scale = (None if x is None else x[:, :, :length] for x in (key_scale, value_scale))
    bits = 8 if key_scale is None else 8 * key.shape[3] // query.shape[3]
    key, value = StorageLayout(key_scale, value_scale, table, length, bits).plain(key, value, torch.float32)
    if bits < 8:
        key, value = rotated(key), rotated(value)
    return attend_full(query, key.to(query.dtype), value.to(query.dtype), *rest)
