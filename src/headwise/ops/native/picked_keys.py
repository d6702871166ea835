"""Attention to the keys that a mask picks for each query: they are gathered, some queries at a time.

Each query is a row of a batch of its own, with T = 1 and its n keys: what the kernel does for a decode step. Time and
memory do not depend on T x S. The gradient gathers and attends again, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from ..call import Call, Result, Run
from ..masks.constructors import bias, keep
from ..masks.mask import EVERYTHING, Mask
from ..masks.picked import Picked
from ..nonfinite import quiet
from ..row_blocks import strips
from ..storage.layout import StorageLayout
from ..tracing import is_symbol
from .gradient import by_reference

BLOCK_BYTES = 1 << 22
"""Bytes of keys and values that are gathered at a time, about the L2 cache of a core or two."""


def is_picked(mask: Mask) -> bool:
    """Return whether a mask picks the keys of each query, so that it allows no others."""
    return any(isinstance(rule, Picked) for rule in mask.parts)


def attend_picked(call: Call, run: Run) -> Result:
    """Return out (B, H, T, V) and the lse (B, H, T); `run` attends without picked keys."""
    shortest, *others = (rule for rule in call.options.mask.parts if isinstance(rule, Picked))
    for other in others:
        shortest = other if other.indices.shape[3] < shortest.indices.shape[3] else shortest
    rest = Mask(tuple(rule for rule in call.options.mask.parts if rule is not shortest))
    indices = shortest.indices if shortest.indices.shape[3] else pad(shortest.indices, (0, 1), value=-1)
    gate = call.options.gate
    key, value = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (call.key, call.value))
    options = call.options._replace(mask=rest, gate=None)
    call = replace(call, key=key, value=value, return_lse=True, options=options)
    if call.needs_grad and not torch.compiler.is_compiling():
        leaves, shape = pytree.tree_flatten((call.query, call.key, call.value, call.options.sinks, rest))
        out, lse = _AttendPicked.apply((call, shape, run), indices, *leaves)
    else:
        out, lse = _attend(call, indices, run)
    if gate is None:
        return out, lse
    return quiet(out * gate.to(out.dtype), (lse == -torch.inf)[..., None]), lse


def _attend(call: Call, indices: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    B, H = call.sizes[:2]
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for rows in _blocks(call, indices):
        out, lse = run(_of_rows(call, rows, *_places(call, indices, rows)))
        assert lse is not None
        outs.append(out.reshape(B, -1, H, out.shape[3]))
        lses.append(lse.reshape(B, -1, H))
    return torch.cat(outs, 1).transpose(1, 2), torch.cat(lses, 1).transpose(1, 2).contiguous()


def _blocks(call: Call, indices: Tensor) -> Iterator[slice]:
    """Return an iterator over some queries at a time; a query's result does not depend on which."""
    B, H, K, T, _ = call.sizes
    if is_symbol(T):
        return strips(T, T)
    numbers = B * (H if indices.shape[1] > 1 else K) * indices.shape[3] * (call.key.shape[3] + call.value.shape[3])
    return strips(T, max(BLOCK_BYTES // max(numbers * call.key.itemsize, 1), 1))


def _places(call: Call, indices: Tensor, rows: slice) -> tuple[Tensor, Mask]:
    """Return the keys of some queries, (B, H|1, R, n), ascending, and the mask over them, in which each counts once."""
    B, _, _, T, S = call.sizes
    j, rest = indices[:, :, rows].long().expand(B, -1, -1, -1), call.options.mask
    i = torch.arange(T, device=j.device)[rows][:, None]
    rules, biases = (Mask(tuple(rule for rule in rest.parts if rule.biases is adds)) for adds in (False, True))
    if rules.parts:
        allowed, _ = rules.at(i, j.clamp(min=0), T, S)
        j = torch.where(allowed, j, -1)  # type: ignore[arg-type]  # if heads differ, each head has its own list now
    j = j.sort(-1).values
    valid = (j >= 0) & pad(j[..., 1:] != j[..., :-1], (1, 0), value=True)
    places, added = j.clamp(min=0), None
    if biases.parts:
        allowed, added = biases.at(i, places, T, S)
        valid = valid if allowed is None else valid & allowed
    every = not torch.compiler.is_compiling() and bool(valid.all())
    mask = EVERYTHING if every else keep(_as_rows(valid))
    return places, mask if added is None else mask & bias(_as_rows(added.expand(B, -1, -1, -1)))


def _as_rows(x: Tensor) -> Tensor:
    """Return (B, h, R, n) as (B R, h, 1, n)."""
    return x.transpose(1, 2).flatten(0, 1)[:, :, None]


def _of_rows(call: Call, rows: slice, places: Tensor, mask: Mask) -> Call:
    """Return the call of some queries, (B R, H, 1, D), on the keys at their places, (B R, K or H, n, D)."""
    layout, H = call.layout, call.query.shape[1]
    table = None if layout is None else layout.table
    key, value = (_gathered(x, places, table, H) for x in (call.key, call.value))
    if layout is not None:
        key_scale, value_scale = (
            None if x is None else _gathered(x[..., None], places, table, H)[..., 0] for x in layout[:2]
        )
        layout = None if key_scale is None else StorageLayout(key_scale, value_scale, None, 0, layout.bits)
    options = call.options._replace(mask=mask)
    return replace(call, query=_as_rows(call.query[:, :, rows]), key=key, value=value, options=options, layout=layout)


def _gathered(x: Tensor, places: Tensor, table: Tensor | None, H: int) -> Tensor:
    """Return (B R, K or H, n, D) at `places` (B, h, R, n) of x (B, K, S, D), or of pages (P, K, size, D)."""
    (B, h, _, _), K = places.shape, x.shape[1]
    heads = K if h == 1 else H
    b = torch.arange(B, device=x.device).view(B, 1, 1, 1)
    if table is not None:
        b, places = table.to(x.device)[b, places // x.shape[2]], places % x.shape[2]
    if torch.compiler.is_compiling():
        k = torch.arange(heads, device=x.device).view(1, heads, 1, 1) // (heads // K)
        picked = x[b, k, places.expand(-1, heads, -1, -1)]
    else:
        with torch.no_grad():  # a gradient goes to what is gathered, and from there to the keys
            picked = _rows_of(x, b, places, heads)
    return picked.transpose(1, 2).flatten(0, 1)


def _rows_of(x: Tensor, b: Tensor, places: Tensor, heads: int) -> Tensor:
    """Return a copy (B, heads, R, n, D) of rows of x (B, K, S, D), of any strides; `index_select` copies whole rows."""
    (B, h, R, n), K, D = places.shape, x.shape[1], x.shape[3]
    steps = x.stride()[:3]
    unit = gcd(*steps) or 1
    numbers = b * (steps[0] // unit) + places * (steps[2] // unit)  # of the first head; the others begin later
    last = sum((size - 1) * step for size, step in zip(x.shape[::2], steps[::2], strict=False)) // unit
    out = x.new_empty(heads, B * R * n, D)
    for head in range(heads):
        first = x.storage_offset() + head // (heads // K) * steps[1]
        its = numbers[:, head if h > 1 else 0].reshape(-1)
        torch.index_select(x.as_strided((last + 1, D), (unit, 1), first), 0, its, out=out[head])
    return out.view(heads, B, R, n, D).transpose(0, 1)


class _AttendPicked(torch.autograd.Function):
    """`_attend` with a gradient that gathers the keys again: nothing of a block is kept for it."""

    @staticmethod
    def forward(ctx: Any, how: _How, indices: Tensor, *leaves: Any) -> tuple[Tensor, Tensor]:
        ctx.how = how
        ctx.plain = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.at = [n for n, x in enumerate(leaves) if isinstance(x, Tensor)]
        ctx.save_for_backward(indices, *(leaves[n] for n in ctx.at))
        ctx.set_materialize_grads(False)
        return _attend(_with_leaves(how, leaves), indices, how[2])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        indices, *saved = ctx.saved_tensors
        leaves, wanted = list(ctx.plain), ctx.needs_input_grad[2:]
        for n, x in zip(ctx.at, saved, strict=True):
            leaves[n] = x
        gradients = _by_definition if torch.is_grad_enabled() else _by_blocks
        return (None, None, *gradients(ctx.how, indices, leaves, wanted, (grad_out, grad_lse)))


_How: TypeAlias = tuple[Call, Any, Run]
"""A call, the structure of its leaves (query, key, value, sinks, mask), and what attends without picked keys."""
_Grads: TypeAlias = tuple["Tensor | None", "Tensor | None"]


def _with_leaves(how: _How, leaves: Sequence[Any]) -> Call:
    call, shape, _ = how
    query, key, value, sinks, mask = pytree.tree_unflatten(list(leaves), shape)
    return replace(call, query=query, key=key, value=value, options=call.options._replace(sinks=sinks, mask=mask))


def _by_blocks(
    how: _How, indices: Tensor, leaves: Sequence[Any], wanted: Sequence[bool], grads: _Grads
) -> list[Tensor | None]:
    """Return the gradient of each leaf that wants one, from one block of queries after the other."""
    plain = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
    sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) if want else None
            for x, want in zip(plain, wanted, strict=True)]  # fmt: skip
    for rows in _blocks(_with_leaves(how, plain), indices):
        with torch.enable_grad():
            rest = [x.detach().requires_grad_() if want else x for x, want in zip(plain[3:], wanted[3:], strict=True)]
            whole = _with_leaves(how, [*plain[:3], *rest])
            places, mask = _places(whole, indices, rows)
            some = _of_rows(whole, rows, places, mask)
            tensors = [
                x.detach().requires_grad_(w)
                for x, w in zip((some.query, some.key, some.value), wanted[:3], strict=True)
            ]
            results = how[2](replace(some, query=tensors[0], key=tensors[1], value=tensors[2]))
            given = [
                None if x is None else _as_rows(x[:, :, rows] if x.ndim == 4 else x[:, :, rows, None]) for x in grads
            ]
            given[1] = None if given[1] is None else given[1][..., 0]
            pairs = [(x, grad) for x, grad in zip(results, given, strict=True) if x is not None and grad is not None]
            learning = [x if want else None for x, want in zip((*tensors, *rest), wanted, strict=True)]
            parts = iter(torch.autograd.grad([x for x, _ in pairs], [x for x in learning if x is not None],
                                             [grad for _, grad in pairs], allow_unused=True))  # fmt: skip
        for n, total in enumerate(sums):
            part = None if total is None else next(parts)
            if total is None or part is None:
                continue
            if n == 0:
                total[:, :, rows] = part[:, :, 0].unflatten(0, (len(total), -1)).transpose(1, 2)
            elif n < 3:
                _add_rows(total, part, places)
            else:
                total += part
    return [None if total is None else total.to(x.dtype) for total, x in zip(sums, leaves, strict=True)]


def _add_rows(total: Tensor, part: Tensor, places: Tensor) -> None:
    """Add gradients of gathered keys, (B R, heads, n, D), to those of all keys (B, K, S, D), query by query."""
    (B, K, S, D), heads = total.shape, part.shape[1]
    b = torch.arange(B, device=total.device).view(B, 1, 1, 1)
    k = torch.arange(heads, device=total.device).view(1, heads, 1, 1) // (heads // K)
    numbers = ((b * K + k) * S + places).flatten()
    rows = part.unflatten(0, (B, -1)).transpose(1, 2).reshape(-1, D)
    total.view(-1, D).index_add_(0, numbers, rows.to(total.dtype))


def _by_definition(
    how: _How, indices: Tensor, leaves: Sequence[Any], wanted: Sequence[bool], grads: _Grads
) -> list[Tensor | None]:
    """Return the same as functions that can be differentiated again, from the T x S matrix."""
    views = [x.view_as(x) if want else x for x, want in zip(leaves, wanted, strict=True)]
    call = _with_leaves(how, views)
    options = call.options._replace(mask=call.options.mask & Mask((Picked(indices),)))
    learning = [x for x, want in zip(views, wanted, strict=True) if want]
    parts = iter(by_reference(replace(call, options=options), learning, grads))
    return [next(parts) if want else None for want in wanted]
