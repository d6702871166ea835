"""The library of the native kernel and its operators: loading, what they give on fake tensors, and their gradient.

`headwise::attend`, `attend_full`, `attend_held`, `attend_kept`, `attend_backward`, `attend_part_backward` (the same for
keys that are some of those whose results it gets), `append_int8` and `decode_step` (which write to a cache, and are not
for those who trace) and `dropout_keep` are the library's own (csrc/torch/bind*.cpp).
`attend_train` is `attend_kept` with `attend_backward` as its gradient.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .gradient import Training, by_definition, leaves_of
from .lowering import Rules

LIBRARY = Path(__file__).parents[2] / "_native.so"
OWN = (
    "attend", "attend_full", "attend_held", "attend_kept", "attend_backward", "attend_part_backward",
    "attend_statistics", "attend_received", "append_int8", "decode_step", "dropout_keep", "isa", "isas", "use_isa",
)  # fmt: skip
ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, float scale, float softcap, Tensor? sinks, SymInt low, SymInt high, "
    "Tensor? bounds, Tensor[]? segments, Tensor[]? dense, Tensor[]? alibi, Tensor[]? maps, Tensor[]? relative, "
    "float dropout, Tensor? seed"
)

# The operators, once they are there: looked up by name they cost a tenth of a small call.
attend: Any = None
attend_full: Any = None
attend_held: Any = None
attend_kept: Any = None
attend_backward: Any = None
append_int8: Any = None
decode_step: Any = None

_NOT_LOADED = "not loaded yet"
_trouble: str | None = _NOT_LOADED
_lock = Lock()
_fragment: Any = None  # keeps our operators registered


@torch.compiler.assume_constant_result
def trouble() -> str | None:
    """Why there is no native kernel, in one line; None where there is one. Loads the library when first asked.

    A constant to torch.compile, which asks while it traces: the loading is no part of the graph.
    """
    global _trouble, attend, attend_full, attend_held, attend_kept, attend_backward, append_int8, decode_step
    if _trouble is _NOT_LOADED:
        with _lock:
            if _trouble is _NOT_LOADED:
                problem = _load()
                if problem is None:
                    ops = torch.ops.headwise
                    attend_full, attend_held = ops.attend_full.default, ops.attend_held.default
                    attend_kept, attend_backward = ops.attend_kept.default, ops.attend_backward.default
                    append_int8, decode_step = ops.append_int8.default, ops.decode_step.default
                    attend = ops.attend.default  # last: by this one other threads see that all are there
                _trouble = problem
    return _trouble


def raise_unless_refused(error: RuntimeError) -> None:
    """Raises what an operator raised, unless it or torch's dispatcher has refused the arguments."""
    if not (isinstance(error, NotImplementedError) or str(error).startswith("headwise: ")):
        raise error


def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU can run, best first; none where there is no native kernel."""
    return () if trouble() else tuple(torch.ops.headwise.isas().split(","))


def _load() -> str | None:
    if os.environ.get("HEADWISE_NATIVE", "1") == "0":
        return "the native library is switched off by HEADWISE_NATIVE=0"
    if not hasattr(torch.ops.headwise, "attend"):  # else the user has loaded another build: a sanitizer's, say
        if not LIBRARY.exists():
            return "the native library is not there: reinstall headwise where there is a C++ compiler"
        try:
            torch.ops.load_library(LIBRARY)
        except (OSError, RuntimeError) as error:
            return f"the native library does not load: {str(error).splitlines()[0]}"
    missing = [name for name in OWN if not hasattr(torch.ops.headwise, name)]
    if missing:
        return f"the native library is another version's, without {', '.join(missing)}: reinstall headwise"
    forced, sets = os.environ.get("HEADWISE_ISA"), torch.ops.headwise.isas().replace(",", ", ")
    if forced and forced not in sets.split(", "):
        runs = f"the native kernel runs {torch.ops.headwise.isa()}; this CPU and build have {sets}"
        warnings.warn(f"HEADWISE_ISA={forced} names no instruction set that can run here: {runs}", stacklevel=2)
    _register()
    return None


def _register() -> None:
    """What torch must know beside the library: shapes and strides without data, and the operator with a gradient."""
    global _fragment
    _fragment = torch.library.Library("headwise", "FRAGMENT")
    _fragment.define(f"attend_train({ARGUMENTS}) -> (Tensor, Tensor)")
    _fragment.impl("attend_train", attend_train, "CPU")
    _fragment.impl("attend_train", attend_train, "Autograd")
    fakes: dict[str, Callable[..., Any]] = {
        "attend": lambda *args: _empty_pair(*args)[0],
        "attend_full": _empty_pair,
        "attend_held": lambda query, key, key_scale, value, *_: _empty_pair(query, key, value),
        "attend_kept": _empty_kept,
        "attend_train": _empty_pair,
        "attend_backward": _empty_gradients,
        "attend_part_backward": _empty_gradients,
        "attend_statistics": _empty_statistics,
        "attend_received": _empty_received,
        "append_int8": _nothing,
        "dropout_keep": lambda seed, dropout, B, H, first, rows, S: seed.new_empty((B, H, rows, S), dtype=torch.bool),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"headwise::{name}", fake, lib=_fragment)


def _empty_pair(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, T, V) in the memory order (B, T, H, V), and lse (B, H, T)."""
    B, H, T, _D = query.shape
    out = query.new_empty(B, T, H, value.shape[3]).transpose(1, 2)
    return out, query.new_empty((B, H, T), dtype=torch.float32)


def _empty_kept(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and `ends`: each row's greatest score and largest weight, of which the gradient makes its weights."""
    out, lse = _empty_pair(query, key, value)
    return out, lse, lse.new_empty((2, *lse.shape))


def _empty_statistics(query: Tensor, key: Tensor, value: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    B, H, T, _D = query.shape
    *_, sums, features, bins, query_bins = args
    columns = 0 if features is None else features.shape[-1]
    out = query.new_empty(B, T, H, 0 if value is None else value.shape[3]).transpose(1, 2)
    lse, numbers = (query.new_empty(shape, dtype=torch.float32) for shape in ((B, H, T), (6, B, H, T)))
    totals = (
        query.new_empty((B, H, *shape), dtype=torch.float64)
        for shape in ((2 * sums + columns,), (query_bins, bins + 1))
    )
    return out, lse, numbers, query.new_empty((2, B, H, T), dtype=torch.int64), *totals


def _empty_received(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (B, H), S = query.shape[:2], key.shape[2]
    return query.new_empty((B, H, S), dtype=torch.float64), query.new_empty((B, H, S), dtype=torch.int64)


def _nothing(*args: Any) -> None:
    """Of an operator that writes: refuses a real tensor beside one without data, which would be left as it was."""
    devices = {x.device.type for x in args if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"headwise: append_int8 takes tensors of one device, got {', '.join(sorted(devices))}")


def _empty_gradients(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, ends: Tensor, biases: bool, *args: Any
) -> list[Tensor]:
    leaves = leaves_of(Training.of(*args), biases)
    qkv = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in leaves[:3]]
    return qkv + [x.new_empty(x.shape) for x in leaves[3:]]


# bounds, segments, dense, alibi, maps, relative, dropout and seed of a call without them.
NO_MORE = (None, None, None, None, None, None, 0.0, None)


class _AttendBand(torch.autograd.Function):
    """`attend` with a gradient. Of small tensors a call takes two thirds of the time of `_Attend`."""

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
    """`attend_kept` with a gradient: its tensors one by one, for autograd looks into no list."""

    @staticmethod
    def forward(ctx: Any, numbers: _Numbers, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        call = _joined(numbers, tensors)
        out, lse, ends = attend_kept(*call.arguments)
        ctx.numbers = numbers
        ctx.save_for_backward(out, ends, *tensors)
        ctx.set_materialize_grads(False)  # so that an lse which no loss looks at is known by its None
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
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
    """A gradient of the gradient will be asked, or many gradients come as one (vmap, `is_grads_batched`)."""
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads)
    )


def _readable(grad_out: Tensor) -> Tensor:
    """With contiguous rows: those of an expanded gradient, as `out.sum()` gives, would be read number by number."""
    return grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()


_SINGLE = ("query", "key", "value", "sinks", "bounds", "seed")


class _Numbers(NamedTuple):
    """What of a call is no tensor, and how many tensors its lists hold."""

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


def attend_band(query: Tensor, key: Tensor, value: Tensor, scale: float, low: int, high: int) -> Tensor:
    """`attend` with a gradient."""
    return _AttendBand.apply(query, key, value, scale, low, high)


def attend_train(*args: Any) -> tuple[Tensor, Tensor]:
    """The operator of this name, without the dispatcher."""
    query, key, value, rules, dropout, seed = Training.of(*args)
    lists = [x or () for x in (rules.segments, rules.maps, rules.dense, rules.alibi, rules.relative)]
    numbers = _Numbers(rules.scale, rules.softcap, rules.low, rules.high, dropout, *map(len, lists))
    single = (query, key, value, rules.sinks, rules.bounds, seed)
    return _Attend.apply(numbers, *single, *(x for some in lists for x in some))


def _joined(numbers: _Numbers, tensors: Sequence[Any]) -> Training:
    """The call again, of what `attend_train` took apart."""
    query, key, value, sinks, bounds, seed, *rest = tensors
    segments = maps = dense = alibi = relative = None
    if rest:
        lengths = (numbers.segments, numbers.maps, numbers.dense, numbers.alibi, numbers.relative)
        segments, maps, dense, alibi, relative = ([rest.pop(0) for _ in range(length)] or None for length in lengths)
    scale, softcap, low, high, dropout, *_ = numbers
    rules = Rules(scale, softcap, sinks, low, high, bounds, segments, dense, alibi, maps, relative)
    return Training(query, key, value, rules, dropout, seed)
