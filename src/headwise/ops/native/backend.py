"""Backend `native`: headwise's own kernel for the CPU, written in C++ (`csrc/`).

Masks go in as what they are (two numbers a row, ids, rows of a tensor), never as T x S. The kernel itself keeps NaN and
Inf where they belong and reads any strides. The library lies beside the package and is loaded by the first call that
could use it (`native_library`); without it everything runs on the other backends. Gradients: `native_backward`.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...shapes import DTYPES, FAR, INTEGERS, LEAST_FACTOR, MOST_FACTOR, check_gate, check_options
from . import library as native_library
from ..call import Call, Limit
from ..storage.held import Layout
from ..masks.compose import Mask, as_mask
from .library import trouble
from ..masks.rules import Alibi, Band, Bias, Keep, Lengths, Segments

MOST = {Keep: 8, Bias: 8, Segments: 4, Alibi: 4}  # of one kind in a mask; Keep and Bias share theirs


def _count(call: Call, *kinds: type) -> int:
    return 0 if call.mask is None else sum(isinstance(part, kinds) for part in call.mask.parts)


def _firsts(mask: Mask | None) -> set[int]:
    parts = () if mask is None else mask.parts
    return {part.first for part in parts if isinstance(part, Band) and part.left is not None}


FIRSTS = "headwise's own kernel takes windows that all keep the same first keys in sight"
LIMITS = (
    Limit(lambda c: c.device_type != "cpu", "headwise's own kernel runs on the CPU"),
    Limit(lambda c: c.query.dtype == torch.float64, "headwise's own kernel has no float64"),
    Limit(lambda c: c.is_empty, "headwise's own kernel takes no empty tensors"),
    Limit(lambda c: c.is_transformed, "headwise's own kernel has no torch.func rules (vmap, jvp)"),
    Limit(
        lambda c: any(is_traceable_wrapper_subclass(x) for x in (c.query, c.key, c.value)),
        "headwise's own kernel takes plain tensors, no subclass that wraps others",
    ),
    Limit(lambda c: _count(c, Keep, Bias) > MOST[Keep], "headwise's own kernel takes at most 8 mask tensors"),
    Limit(lambda c: _count(c, Segments) > MOST[Segments], "headwise's own kernel takes at most 4 pairs of segments"),
    Limit(lambda c: _count(c, Alibi) > MOST[Alibi], "headwise's own kernel takes at most 4 rules of ALiBi"),
    Limit(lambda c: len(_firsts(c.mask)) > 1, FIRSTS),
    Limit(
        lambda c: c.layout is not None and c.needs_grad,
        "headwise's own kernel has no gradient through int8 keys and values, or through pages",
    ),
    Limit(lambda c: trouble() is not None, lambda: trouble() or ""),
)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """out (B, H, T, V) and, where asked for, lse (B, H, T). The gate is applied unless a gradient is needed."""
    (B, H, _, T, S), V = call.sizes, call.value.shape[3]
    ops, qkv, masks = torch.ops.headwise, (call.query, call.key, call.value), lowered(call.mask, T, S)
    softcap = 0.0 if call.softcap is None else call.softcap
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    dropout, seed = (call.dropout, torch.randint(1 << 62, (1,), device="cpu")) if call.dropout > 0 else (0.0, None)
    if call.needs_grad:
        # The operator is for those who trace: its way through the dispatcher costs as much as a small backward.
        attend_train = ops.attend_train if torch.compiler.is_compiling() else native_library.attend_train
        out, lse = attend_train(*qkv, call.scale, softcap, sinks, *masks, dropout, seed)
    else:
        gate = None if call.gate is None else call.gate.expand(B, H, T, V)
        rules = (call.scale, softcap, sinks, *masks, gate, dropout, seed)
        if call.layout is None:
            out, lse = ops.attend_full(*qkv, *rules)
        else:
            key_scale, value_scale, *pages = call.layout
            out, lse = ops.attend_held(call.query, call.key, key_scale, call.value, value_scale, *pages, *rules)
    return out, lse if call.return_lse else None


# bounds, segments, dense, alibi, dropout and seed of a call without them.
_PLAIN = (None, None, None, None, 0.0, None)


def at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    gate: Tensor | None,
    return_lse: bool,
    layout: Layout | None = None,
) -> Any:
    """The call without the full path's questions, which cost more than decoding a token; None where they must be asked.

    Here is asked only what the operator cannot know: whether anything but plain tensors and plain numbers is at work.
    Sizes and dtypes it checks itself, and where it refuses, the full path finds the words.
    """
    if (
        native_library.attend is None
        or not (type(query) is type(key) is type(value) is Tensor)
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or not (scale is None or (type(scale) is float and LEAST_FACTOR <= abs(scale) <= MOST_FACTOR))
        or not (type(dropout) in (float, int) and dropout == 0)  # not in haste, and not without a seed
    ):
        return None
    try:
        (_, _, T, D), S = query.shape, key.shape[2]
        if layout is not None:
            if type(layout.length) is not int or not all(x is None or x.is_cpu for x in layout[:3]):
                return None  # one tensor on meta would make it a call that is traced, whose numbers mean nothing
            S = S if layout.table is None else layout.length
        scale = D**-0.5 if scale is None else scale
        learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        if not (
            layout is not None
            or gate is not None
            or sinks is not None
            or softcap is not None
            or return_lse is not False
        ):
            ends = (-FAR, FAR) if mask is None else None
            band = mask.simple_band if type(mask) is Mask else None
            if band is not None:
                left, right, at_end = band
                shift = S - T if at_end else 0
                ends = -FAR if left is None else left + shift, FAR if right is None else right + shift
            if ends is not None and not learning:
                return native_library.attend(query, key, value, scale, *ends)
            if ends is not None:
                return native_library.attend_train(query, key, value, scale, 0.0, None, *ends, *_PLAIN)[0]
        if learning:
            return None
        return _in_full(query, key, value, as_mask(mask), scale, softcap, sinks, gate, return_lse, S, layout)
    except Exception:  # our own checks say it better; what they do not know the full path meets again
        return None


def _in_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    gate: Tensor | None,
    return_lse: bool,
    S: int,
    layout: Layout | None,
) -> Any:
    """`at_once` with a mask of any kind and further options."""
    learning = torch.is_grad_enabled() and (
        (sinks is not None and sinks.requires_grad)
        or (gate is not None and gate.requires_grad)
        or (mask is not None and mask.learns)
        or any(x is not None and x.requires_grad for x in (layout or ())[:2])
    )
    if learning or (return_lse is not True and return_lse is not False):
        return None
    if not (softcap is None or (type(softcap) is float and LEAST_FACTOR <= softcap <= MOST_FACTOR)):
        return None
    (B, H, T, _), V = query.shape, value.shape[3]
    if sinks is not None:
        check_options(query, scale, softcap, sinks)
        sinks = sinks.float().contiguous()
    if gate is not None:
        gate = check_gate(gate, (B, H, T, V), query.device).expand(B, H, T, V)
    masks = lowered(mask, T, S)
    rules = (scale, softcap or 0.0, sinks, *masks, gate, 0.0, None)
    if layout is None:
        out, lse = native_library.attend_full(query, key, value, *rules)
    else:
        key_scale, value_scale, *pages = layout
        out, lse = native_library.attend_held(query, key, key_scale, value, value_scale, *pages, *rules)
    return (out, lse) if return_lse else out


class Lowered(NamedTuple):
    """A mask as the operator takes it."""

    low: int  # row i sees i + low <= j < i + high, by the bands whose place is a number
    high: int
    bounds: (
        Tensor | None
    )  # where a mask says more: int64 (B|1, 4), low, high, start, stop, by all rules together; 5: always
    segments: list[Tensor] | None  # query ids, key ids, ...; None for no tensors: cheaper than an empty list
    dense: list[Tensor] | None  # (B|1, H|1, T|1, S|1)
    alibi: list[Tensor] | None  # slopes (B|1, H), offsets (B|1,), ...


def lowered(mask: Mask | None, T: int, S: int) -> Lowered:
    """The mask in the operator's terms; what does not fit the call is left to the operator to refuse.

    Raises TypeError for an index that is no integer tensor, which a conversion would hide, and for what has no form.
    """
    if len(_firsts(mask)) > 1:
        raise TypeError(FIRSTS)
    numbers: tuple[list[Any], ...] = [], []  # low, high
    tensors: tuple[list[Any], ...] = [], [], [], [], []  # low, high, start, stop, always
    segments: list[Tensor] = []
    dense: list[Tensor] = []
    alibi: list[Tensor] = []
    for part in () if mask is None else mask.parts:
        if isinstance(part, Band):
            shift = S - T if part.offset is None else part.offset
            to = tensors if isinstance(shift, Tensor) else numbers
            shift = _int64(shift).clamp(-FAR, FAR) if isinstance(shift, Tensor) else shift
            if part.left is not None:
                to[0].append(shift - part.left + 1)
            if part.right is not None:
                to[1].append(shift + part.right + 1)
            if part.kept:
                tensors[4].append(_number(part.kept, 1)[0])
        elif isinstance(part, Lengths):
            tensors[3].append(_int64(part.stop))
            if part.start is not None:
                tensors[2].append(_int64(part.start))
        elif isinstance(part, Segments):
            segments += [_int64(part.query_ids), _int64(part.key_ids)]
        elif isinstance(part, (Keep, Bias)):
            dense.append(part.full if part.tensor.dtype in _READ else part.full.float())
        elif isinstance(part, Alibi):
            at = S - T if part.offset is None else part.offset
            alibi += [part.slopes.float().view(-1, part.slopes.shape[-1])]
            alibi += [_int64(at) if isinstance(at, Tensor) else _number(at, 1)[0]]
        else:
            raise TypeError(f"headwise's own kernel has no form for {type(part).__name__}")
    low = reduce(torch.sym_max, numbers[0]) if numbers[0] else None
    high = reduce(torch.sym_min, numbers[1]) if numbers[1] else None
    bounds = _bounds((low, high, None, None, None), tensors) if any(tensors) else None
    ends = -FAR if low is None else low, FAR if high is None else high
    return Lowered(*ends, bounds, segments or None, dense or None, alibi or None)


def _bounds(numbers: tuple[int | None, ...], tensors: tuple[list[Any], ...]) -> Tensor:
    """int64 (B|1, 4): low, high, start, stop of each row of the batch, each the tightest of the rules.

    (B|1, 5) where some keys stay in sight however far back: their end.
    """
    n = next((x.shape[0] for given in tensors for x in given if x.shape[0] != 1), 1)
    columns: list[Tensor] = []
    if not tensors[4]:
        numbers, tensors = numbers[:4], tensors[:4]
    for number, given, (tightest, none) in zip(numbers, tensors, _ENDS, strict=False):
        terms = [x[:, None] for x in given]
        if number is not None or not given:
            terms.append(_number(none if number is None else number, n))
        column = reduce(tightest, terms)
        columns.append(column if column.shape[0] == n else column.expand(n, 1))
    return torch.cat(columns, dim=1)


# What the operator reads of a mask; a bias of another float type is converted.
_READ = (torch.bool, *DTYPES)
# How two rules join into one, and what stands for no rule.
_ENDS = ((torch.maximum, -FAR), (torch.minimum, FAR), (torch.maximum, 0), (torch.minimum, FAR), (torch.minimum, 0))


def _number(number: int, n: int) -> Tensor:
    """(n, 1) times the number; on the CPU, whatever the default device is."""
    return torch.full((n, 1), number, dtype=torch.int64, device="cpu")


def _int64(index: Tensor) -> Tensor:
    """The index as the operator reads it; a float or a bool is no index."""
    if index.dtype == torch.int64:
        return index
    if index.dtype not in INTEGERS:
        raise TypeError(f"an index is an integer tensor; got {index.dtype}")
    return index.long()
