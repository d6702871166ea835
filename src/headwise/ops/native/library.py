"""The operators of the native kernel for the backends, and the gradients of those that have one.

`operators` loads the library and registers `torch.ops.headwise`. The operators are stored here as objects, because the
lookup by name takes a tenth of a small call. `append_codes` and `decode_step` write to a cache and are not meant for
tracing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .gradient import Training, by_definition
from .mask_arguments import LoweredOptions
from .operators import register

_trouble = register()


def error_for() -> str | None:
    """Return the reason why there is no native kernel, in one line; None if there is one."""
    return _trouble


def _operator(name: str) -> Any:
    return getattr(torch.ops.headwise, name).default if _trouble is None else None


attend = _operator("attend")
attend_full = _operator("attend_full")
attend_held = _operator("attend_held")
attend_stored = _operator("attend_stored")
attend_kept = _operator("attend_kept")
attend_backward = _operator("attend_backward")
append_codes = _operator("append_codes")
decode_step = _operator("decode_step")
linear = _operator("linear")


def raise_unless_refused(error: RuntimeError) -> None:
    """Raise the error of an operator, except if the operator or torch's dispatcher refused the arguments."""
    if not (isinstance(error, NotImplementedError) or str(error).startswith("headwise: ")):
        raise error


def isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU can run, best first; none if there is no native kernel."""
    return () if error_for() else tuple(torch.ops.headwise.isas().split(","))


# bounds, segments, dense, alibi, maps, relative, dropout and seed of a call that has none of them.
NO_MORE = (None, None, None, None, None, None, 0.0, None)


class _AttendBand(torch.autograd.Function):
    """`attend` with a gradient. For small tensors a call takes two thirds of the time of `_Attend`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, low: int, high: int) -> Tensor:
        out, _, ends = attend_kept(query, key, value, scale, 0.0, None, low, high, *NO_MORE)
        ctx.save_for_backward(query, key, value, out, ends)
        ctx.numbers = scale, 0.0, None, low, high, *NO_MORE
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, ends = ctx.saved_tensors
        if _is_transformed(grad_out):
            grads = by_definition(Training.of(query, key, value, *ctx.numbers), False, grad_out, None)
        else:
            grads = attend_backward(_readable(grad_out), None, out, ends, False, query, key, value, *ctx.numbers)
        return (*grads, None, None, None)


class _Attend(torch.autograd.Function):
    """`attend_kept` with a gradient; its tensors are separate arguments, because autograd does not look into lists."""

    @staticmethod
    def forward(ctx: Any, numbers: _Numbers, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        call = _joined(numbers, tensors)
        out, lse, ends = attend_kept(*call.arguments)
        ctx.numbers = numbers
        ctx.save_for_backward(out, ends, *tensors)
        ctx.set_materialize_grads(False)  # so that the gradient of an unused lse is None
        ctx.mark_non_differentiable(ends)
        return out, lse, ends

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Any, ...]:
        out, ends, *tensors = ctx.saved_tensors
        numbers: _Numbers = ctx.numbers
        call, fixed = _joined(numbers, tensors), numbers.segments + numbers.maps
        biases = any(ctx.needs_input_grad[1 + len(_SINGLE) + fixed :])
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        if _is_transformed(grad_out, grad_lse):
            grads = iter(by_definition(call, biases, grad_out, grad_lse))
        else:
            grads = iter(attend_backward(_readable(grad_out), grad_lse, out, ends, biases, *call.arguments))
        rules = call.rules
        return (
            None,
            *(next(grads) for _ in "qkv"),
            None if rules.sinks is None else next(grads),
            *[None] * (2 + fixed),  # bounds, seed, segments, maps
            *(next(grads) if biases and x.is_floating_point() else None for x in rules.dense or ()),
            *(next(grads) if biases and n % 2 == 0 else None for n in range(len(rules.alibi or ()))),
            *(next(grads) if biases else None for _ in rules.relative or ()),
        )


def _is_transformed(*grads: Tensor | None) -> bool:
    """Return whether a gradient of the gradient is needed, or gradients are batched (vmap, `is_grads_batched`)."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads)
    )


def _readable(grad_out: Tensor) -> Tensor:
    """Return the gradient with contiguous rows, because an expanded one (from `out.sum()`) would be slow to load."""
    return grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()


_SINGLE = ("query", "key", "value", "sinks", "bounds", "seed")


class _Numbers(NamedTuple):
    """The arguments of a call that are not tensors, and the lengths of its tensor lists."""

    scale: float
    softcap: float
    low: int
    high: int
    dropout: float
    segments: int
    maps: int
    dense: int
    alibi: int
    relative: int


attend_band = _AttendBand.apply


def attend_train(*args: Any) -> tuple[Tensor, Tensor]:
    """Run the operator of this name without the dispatcher."""
    out, lse, _ = attend_ends(*args)
    return out, lse


def attend_ends(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run `attend_train`, and return `ends` too, (2, B, H, T): each row's largest score, and its weight."""
    query, key, value, rules, dropout, seed = Training.of(*args)
    lists = [x or () for x in (rules.segments, rules.maps, rules.dense, rules.alibi, rules.relative)]
    numbers = _Numbers(rules.scale, rules.softcap, rules.low, rules.high, dropout, *map(len, lists))
    single = (query, key, value, rules.sinks, rules.bounds, seed)
    return _Attend.apply(numbers, *single, *(x for some in lists for x in some))


def _joined(numbers: _Numbers, tensors: Sequence[Any]) -> Training:
    """Return the call from the arguments into which `attend_train` split it."""
    query, key, value, sinks, bounds, seed, *rest = tensors
    segments = maps = dense = alibi = relative = None
    if rest:
        lengths = (numbers.segments, numbers.maps, numbers.dense, numbers.alibi, numbers.relative)
        segments, maps, dense, alibi, relative = ([rest.pop(0) for _ in range(length)] or None for length in lengths)
    scale, softcap, low, high, dropout, *_ = numbers
    rules = LoweredOptions(scale, softcap, sinks, low, high, bounds, segments, dense, alibi, maps, relative)
    return Training(query, key, value, rules, dropout, seed)
