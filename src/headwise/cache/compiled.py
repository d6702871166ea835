"""The operators by which a graph of torch.compile uses a cache; one graph is valid for all lengths and all caches.

A cache is a Python object. Its lengths, its page tables and the place of the next token change at every token, and a
graph that had read them would be valid for one token only. So a graph holds the cache's handle, a tensor with one
number, and calls operators that find the cache by this number and run its `append` and `attend` as without a compiler.
The schema of the append operator declares that it changes the handle, so that later operators stay after it.

Calls that these operators do not support end the graph and run without it: calls that need a gradient, run under
autocast, or have a mask of functions, unions or complements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..ops.masks.mask import EVERYTHING, Mask, as_mask
from ..ops.masks.picked import Picked
from ..ops.masks.positional_rules import Alibi, Blocks, Dilated, Relative
from ..ops.masks.rule import Rule
from ..ops.masks.rules import Band, Bias, Keep, Lengths, Segments

SCHEMAS = {
    "cache_append": "(Tensor(a!) handle, Tensor key, Tensor? value, Tensor? lengths, bool left) -> ()",
    "cache_attend": "(Tensor handle, Tensor query, int value_dim, SymInt[] rules, Tensor[] of_rules, Tensor? sinks, "
    "Tensor? gate, float? scale, float? softcap, bool return_lse, str backend) -> (Tensor, Tensor)",
    "cache_positions": "(Tensor handle, int rows, SymInt T, Device device) -> Tensor",
}
FIELDS: dict[type[Rule], tuple[str, ...]] = {
    Band: ("left", "right", "offset", "first"),
    Lengths: ("stop", "start"),
    Segments: ("query_ids", "key_ids"),
    Keep: ("tensor",),
    Bias: ("tensor",),
    Picked: ("indices",),
    Dilated: ("step", "offset"),
    Blocks: ("size", "offset"),
    Alibi: ("slopes", "offset"),
    Relative: ("table", "offset"),
}
"""The rules that an operator takes, with their fields, which become numbers and tensors."""
NONE, NUMBER, TENSOR = range(3)

_caches: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


def handle_of(cache: Any) -> Tensor | None:
    """Make the handle of a new cache; None while a graph is traced, because no cache can be registered in it."""
    if torch.compiler.is_compiling():
        return None
    number = next(_numbers)
    _caches[number] = cache
    with torch.inference_mode(False):  # so that it can be changed outside of inference mode, too
        return torch.tensor([number], dtype=torch.int64, device="cpu")


def in_graph(cache: Any, *tensors: Tensor | None) -> bool:
    """Return True if a call is traced into a graph that can contain it as an operator."""
    return (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and cache.handle is not None
        and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))
        and not any(x is not None and torch.is_autocast_enabled(x.device.type) for x in tensors)
    )


def append_in_graph(cache: Any, key: Tensor, value: Tensor | None, lengths: Any, side: str) -> None:
    """Put `append` into the graph."""
    if lengths is not None and not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, device="cpu")
    torch.ops.headwise.cache_append(cache.handle, key, value, lengths, side == "left")


def attend_in_graph(cache: Any, query: Tensor, mask: Any, options: dict[str, Any]) -> Any:
    """Put `attend` into the graph and return its result; None if the operator does not support the call."""
    rest = dict(options)
    sinks, gate, scale, softcap = (rest.pop(name, None) for name in ("sinks", "gate", "scale", "softcap"))
    return_lse, backend = rest.pop("return_lse", False), rest.pop("backend", "auto")
    written = _written(as_mask(mask))
    if rest.pop("dropout", 0.0) or rest or written is None or not in_graph(cache, query, sinks, gate, *written[1]):
        return None
    scale, softcap = (None if x is None else float(x) for x in (scale, softcap))
    out, lse = torch.ops.headwise.cache_attend(
        cache.handle, query, cache.value_dim, *written, sinks, gate, scale, softcap, return_lse, backend
    )
    return (out, lse) if return_lse else out


def _written(mask: Mask) -> tuple[list[int], list[Tensor]] | None:
    """Return the rules of a mask as numbers and tensors; None if a rule is of another kind."""
    numbers: list[int] = []
    tensors: list[Tensor] = []
    for part in mask.parts:
        if type(part) not in FIELDS:
            return None
        numbers.append(list(FIELDS).index(type(part)))
        for name in FIELDS[type(part)]:
            x = getattr(part, name)
            if isinstance(x, Tensor):
                numbers.append(TENSOR)
                tensors.append(x)
            else:
                numbers += [NONE] if x is None else [NUMBER, x]
    return numbers, tensors


def _read(numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """Return the mask from the numbers and tensors of `_written`."""
    left, others = iter(numbers), iter(tensors)
    parts = []
    for kind in left:
        cls = list(FIELDS)[kind]
        values: dict[str, Any] = {}
        for name in FIELDS[cls]:
            tag = next(left)
            values[name] = None if tag == NONE else next(left) if tag == NUMBER else next(others)
        parts.append(cls(**values))
    return Mask(tuple(parts)) if parts else EVERYTHING


def _cache(handle: Tensor) -> Any:
    cache = _caches.get(int(handle))
    if cache is None:
        raise RuntimeError("headwise: a graph was called with a key-value cache that no longer exists; keep the cache")
    return cache


def _append(handle: Tensor, key: Tensor, value: Tensor | None, lengths: Tensor | None, left: bool) -> None:
    _cache(handle).append(key, value, lengths=lengths, side="left" if left else "right")


def _attend(
    handle: Tensor,
    query: Tensor,
    value_dim: int,
    rules: Sequence[int],
    of_rules: Sequence[Tensor],
    sinks: Tensor | None,
    gate: Tensor | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "return_lse": return_lse, "backend": backend}
    if gate is not None:
        options["gate"] = gate
    result = _cache(handle).attend(query, mask=_read(rules, of_rules), **options)
    made, lse = result if return_lse else (result, query.new_empty(0, dtype=torch.float32))
    out, _ = _empty(handle, query, value_dim)  # a graph relies on the strides of the output
    return (made if made.stride() == out.stride() else out.copy_(made)), lse


def _empty(handle: Tensor, query: Tensor, value_dim: int, *options: Any) -> tuple[Tensor, Tensor]:
    """Return empty out (B, H, T, V) in the memory order (B, T, H, V), and lse (B, H, T) or an empty tensor."""
    B, H, T, _ = query.shape
    with_lse = bool(options) and options[-2]
    out = query.new_empty(B, T, H, value_dim).transpose(1, 2)
    return out, query.new_empty((B, H, T) if with_lse else (0,), dtype=torch.float32)


def _positions(handle: Tensor, rows: int, T: int, device: torch.device) -> Tensor:
    return _cache(handle).positions(T, device).expand(rows, T).contiguous()


def _define() -> torch.library.Library:
    """Register the operators; they exist as long as the returned library."""
    library = torch.library.Library("headwise", "FRAGMENT")
    tags = (torch.Tag.cudagraph_unsafe,)  # they run Python and may allocate memory
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "cache_append": (_append, lambda *_: None),
        "cache_attend": (_attend, _empty),
        "cache_positions": (_positions, lambda handle, rows, T, device: handle.new_empty((rows, T), device=device)),
    }
    for name, (function, fake) in functions.items():
        library.define(name + SCHEMAS[name], tags=tags)
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"headwise::{name}", fake, lib=library)
    return library


_LIBRARY = _define()
