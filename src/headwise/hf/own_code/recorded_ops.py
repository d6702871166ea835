"""The torch operations on scores that are recorded instead of computed, one function for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...ops.masks.constructors import keep
from ...ops.native.mask_arguments import FORMS
from ..attention.call_mask import mask_of
from ..attention.function import attend, stored_pair
from ..attention.lazy_tensors import LazyKeys, LazyView
from ..attention.mask import Hidden, StructuralMask
from ..returned import Returned
from .lazy_scores import Added, LazyScores, RecordedScores

HIDDEN = -1e4
"""Scores filled with this number or less are hidden: models write finite numbers instead of minus infinity."""


class Tracer:
    """The state of a running attention module.

    Attributes:
        module: The module.
        heads: Its number of heads, or None if it has no such attribute.
        wanted: True if the caller requested its weights.
        calls: The number of its attention calls.
        weights: The weights of each call that were computed for the caller, by the record of their scores.
    """

    def __init__(self, module: nn.Module, heads: int | None, wanted: bool = False) -> None:
        self.module, self.heads, self.wanted, self.calls = module, heads, wanted, 0
        self.weights: dict[RecordedScores, Tensor] = {}


# -- products ---------------------------------------------------------------------------------------------------------


def _product(seam: Tracer, a: Any, b: Any) -> Any:
    """Start lazy scores for a product of queries and keys, or run attention for a product of weights and values."""
    if isinstance(a, LazyScores):
        return _attended(seam, a, b) if a.chain.weighted else NotImplemented
    chain = _begun(seam, a, b)
    if chain is None:
        return NotImplemented
    shape = chain.sizes if a.ndim == 4 else (a.shape[0], a.shape[1], b.shape[2])
    return LazyScores(chain, shape, torch.result_type(a, b), partial(torch.matmul, a, b))


def _begun(seam: Tracer, a: Any, b: Any) -> RecordedScores | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or isinstance(b, LazyScores):
        return None
    if a.ndim != b.ndim or a.ndim not in (3, 4) or a.shape[-1] != b.shape[-2]:
        return None
    if isinstance(b, LazyView) and not b.turned:
        return None
    key = b.keys if isinstance(b, LazyView) else b.transpose(-1, -2)
    if a.ndim == 3:
        if seam.heads is None or a.shape[0] % seam.heads or a.shape[0] != b.shape[0]:
            return None
        a = a.unflatten(0, (-1, seam.heads))
        key = key if key.ndim == 4 else key.unflatten(0, (-1, seam.heads))
    heads_fit = a.shape[1] == (seam.heads or a.shape[1]) and key.shape[1] in (1, a.shape[1])
    return RecordedScores(a, key) if heads_fit and a.shape[0] == key.shape[0] else None


def _einsum(seam: Tracer, equation: Any, *operands: Any) -> Any:
    """Handle a product of two tensors with any order of axes: permute to (batch, head, ..), then as `_product`."""
    if len(operands) != 2 or not isinstance(equation, str) or equation.count("->") != 1 or equation.count(",") != 1:
        return NotImplemented
    (left, right), out = (part.strip() for part in equation.split("->")[0].split(",")), equation.split("->")[1].strip()
    both, a, b = set(left) & set(right), *operands
    sums, shared = both - set(out), [x for x in out if x in both]
    rows, columns = ([x for x in out if x in one and x not in both] for one in (left, right))
    kept = len(left) == len(right) == len(out) == 4 and [len(x) for x in (sums, shared, rows, columns)] == [1, 2, 1, 1]
    if not kept or [n.ndim for n in operands] != [4, 4]:
        return NotImplemented
    order, summed = shared + rows + columns, sums.pop()
    a = a if isinstance(a, LazyScores) else a.permute([left.index(x) for x in (*shared, *rows, summed)])
    if (isinstance(a, LazyScores) and list(left) != [*shared, *rows, summed]) or isinstance(b, LazyScores):
        return NotImplemented
    result = _product(seam, a, b.permute([right.index(x) for x in (*shared, summed, *columns)]))
    if isinstance(result, LazyScores):
        return result if list(out) == order else NotImplemented
    return result if result is NotImplemented else result.permute([order.index(x) for x in out])


def _attended(seam: Tracer, scores: LazyScores, value: Tensor) -> Any:
    chain, dtype = scores.chain, value.dtype
    flat = scores.ndim == 3
    if isinstance(value, LazyView):
        value = value.keys
    elif value.ndim != scores.ndim:
        return NotImplemented
    elif flat:
        value = value.unflatten(0, chain.sizes[:2])
    query = chain.query.to(dtype)  # some models compute scores in float32 and everything else in a half dtype
    key = chain.key if isinstance(chain.key, LazyKeys) else chain.key.to(dtype)
    # The "blocks" backend makes a bias of such rules by strips of rows; a fused kernel would need all T x S of it.
    backend = "blocks" if any(part.biases and type(part) not in FORMS for part in chain.mask.parts) else "auto"
    returned = Returned(chain.sizes[3], scores.dtype) if seam.wanted else None
    stored = stored_pair(key, value, query.dtype)
    out, matrix = attend(seam.module, query, *stored, chain.dropout, backend, returned=returned, **chain.options())
    if matrix is not None:
        seam.weights[chain] = matrix
    seam.calls += 1
    return out.flatten(0, 1) if flat else out


def _added_product(
    seam: Tracer, x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    scores = _product(seam, batch1, batch2)
    if not isinstance(scores, LazyScores):
        return NotImplemented
    return _add(seam, _scale(seam, scores, alpha), x * beta)


# -- what happens to scores -------------------------------------------------------------------------------------------


def _number(x: Any) -> float | None:
    """Return a factor as a float, or None if it is not a single number or is learned."""
    if isinstance(x, (int, float)):
        return float(x)
    return float(x) if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad else None


def _scale(seam: Tracer, scores: Any, by: Any, divide: bool = False) -> Any:
    """Multiply by a number, or by one number for each head or query, which is the same as scaling the query."""
    if isinstance(by, LazyScores) and not divide:
        scores, by = by, scores
    if not isinstance(scores, LazyScores) or scores.chain.weighted:
        return NotImplemented
    chain, factor = scores.chain, _number(by)
    again = partial(torch.div if divide else torch.mul, other=by)
    if factor is None and isinstance(by, Tensor) and by.is_floating_point() and by.ndim and by.shape[-1] == 1:
        if chain.mask.parts or chain.biases or chain.scale < 0:
            return NotImplemented
        spread = scores.spread(by)
        return scores.next(again, replace(chain, query=chain.query / spread if divide else chain.query * spread))
    if not factor or factor < 0 or any(part.biases for part in chain.mask.parts):
        return NotImplemented
    factor = 1 / factor if divide else factor
    chain = replace(chain, scale=chain.scale * factor, biases=tuple(x * factor for x in chain.biases))
    return scores.next(again, chain)


def _divide(seam: Tracer, scores: Any, by: Any) -> Any:
    return _scale(seam, scores, by, divide=True) if isinstance(scores, LazyScores) else NotImplemented


def _add(seam: Tracer, scores: Any, other: Any) -> Any:
    if isinstance(other, LazyScores):
        scores, other = other, scores
    if not isinstance(scores, LazyScores) or isinstance(other, LazyScores) or scores.chain.weighted:
        return NotImplemented
    if not isinstance(other, Tensor):
        return scores if other == 0 else NotImplemented
    chain, (T, S) = scores.chain, scores.chain.sizes[2:]
    if isinstance(other, StructuralMask) and other.shape[2] == 1 < T and other.shape[3] == S:
        other = other.plain()  # one row for all queries
    if isinstance(other, (StructuralMask, Added)) and not other.exposed:
        mask = mask_of(seam.module, other, T, S) if isinstance(other, StructuralMask) else other.mask
        chain = replace(chain, mask=chain.mask & mask)
    elif other.is_floating_point():
        chain = replace(chain, biases=(*chain.biases, scores.spread(other)))
    else:
        return NotImplemented
    return scores.next(lambda x: x + other, chain)


def _subtract(seam: Tracer, scores: Any, other: Any) -> Any:
    takes = isinstance(scores, LazyScores) and isinstance(other, Tensor) and not isinstance(other, LazyScores)
    return _add(seam, scores, -other) if takes else NotImplemented


def _fill(seam: Tracer, scores: Any, hidden: Any, value: Any) -> Any:
    """Record masked_fill with a number that hides."""
    number = _number(value)
    if not isinstance(scores, LazyScores) or scores.chain.weighted or number is None or number > HIDDEN:
        return NotImplemented
    is_rules = isinstance(hidden, Hidden) and not hidden.exposed
    mask = hidden.mask if is_rules else keep(~scores.spread(hidden))
    chain = replace(scores.chain, mask=scores.chain.mask & mask)
    return scores.next(lambda x: x.masked_fill(hidden, value), chain)


def _where(seam: Tracer, seen: Any, scores: Any, other: Any) -> Any:
    if not isinstance(scores, LazyScores) or not isinstance(seen, Tensor) or isinstance(other, LazyScores):
        return NotImplemented
    number = _number(other)
    if scores.chain.weighted or number is None or number > HIDDEN:
        return NotImplemented
    chain = replace(scores.chain, mask=scores.chain.mask & keep(scores.spread(seen)))
    return scores.next(lambda x: torch.where(seen, x, other), chain)


def _at_least(seam: Tracer, scores: Any, other: Any = None, *args: Any) -> Any:
    """Leave scores unchanged for a maximum with the lowest number, which code uses against overflow."""
    number = _number(other)
    if args or not isinstance(scores, LazyScores) or number is None or number > torch.finfo(scores.dtype).min:
        return NotImplemented
    return scores.next(lambda x: torch.maximum(x, other))


def _softmax(
    seam: Tracer, scores: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if not isinstance(scores, LazyScores) or scores.chain.weighted or dim not in (-1, scores.ndim - 1):
        return NotImplemented
    chain = replace(scores.chain, weighted=True)
    return scores.next(lambda x: x.softmax(-1, dtype=dtype), chain, dtype=dtype or scores.dtype)


def _dropout(seam: Tracer, scores: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not isinstance(scores, LazyScores) or (scores.chain.dropout and training and p):
        return NotImplemented
    if not training or not p:
        return scores
    if not scores.chain.weighted:
        return NotImplemented
    return scores.next(partial(F.dropout, p=p), replace(scores.chain, dropout=p))


def _cast(seam: Tracer, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Convert the dtype: for scores it is the dtype of returned weights; keys of a cache stay in their stored form."""
    if not isinstance(x, (LazyScores, LazyKeys)):
        return NotImplemented
    kinds = [y for y in (*args, *kwargs.values()) if isinstance(y, (torch.dtype, Tensor))]
    if len(kinds) != 1 or len(kinds) != len(args) + len(kwargs):
        return NotImplemented
    dtype = kinds[0].dtype if isinstance(kinds[0], Tensor) else kinds[0]
    if isinstance(x, LazyKeys):
        return NotImplemented if x.exposed else LazyKeys(x.stored, dtype, x.expired)
    return x.next(lambda y: y.to(dtype), dtype=dtype)


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda seam, x: _cast(seam, x, dtype)


def _view(seam: Tracer, x: Any, *shape: Any) -> Any:
    """Reshape between separate axes of batch and heads and one joined axis."""
    if not isinstance(x, (LazyScores, LazyKeys)):
        return NotImplemented
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if sizes.count(-1) == 1:
        rest = -torch.Size(sizes).numel()
        sizes[sizes.index(-1)] = x.numel() // rest if rest else 0
    B, H, T, S = x.chain.sizes if isinstance(x, LazyScores) else x.shape
    if tuple(sizes) not in ((B, H, T, S), (B * H, T, S)):
        return NotImplemented
    if isinstance(x, LazyScores):
        return x.next(lambda y: y.reshape(sizes), shape=tuple(sizes))
    return x if len(sizes) == 4 else LazyView(x, turned=False, flat=True)


def _turn(seam: Tracer, x: Any, a: int, b: int) -> Any:
    """Transpose the last two axes of cached keys that are not a plain tensor."""
    if not isinstance(x, (LazyKeys, LazyView)) or x.exposed or {a % x.ndim, b % x.ndim} != {x.ndim - 1, x.ndim - 2}:
        return NotImplemented
    flat = isinstance(x, LazyView) and x.flat
    return LazyView(x.keys if isinstance(x, LazyView) else x, not (isinstance(x, LazyView) and x.turned), flat)


STEPS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__), _product),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _added_product),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__imul__, Tensor.__rmul__), _scale),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__), _divide),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__), _add),
    **dict.fromkeys((torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_), _fill),
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.max, torch.maximum, Tensor.max, Tensor.maximum), _at_least),
    **dict.fromkeys((Tensor.to, Tensor.type, Tensor.type_as), _cast),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    **dict.fromkeys((Tensor.transpose, torch.transpose), _turn),
    **dict.fromkeys(
        (Tensor.contiguous, Tensor.clone),
        lambda seam, x, *args, **kwargs: x if isinstance(x, LazyScores) else NotImplemented,
    ),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_), _subtract),
    torch.einsum: _einsum,
    torch.where: _where,
    F.dropout: _dropout,
    Tensor.float: _cast_to(torch.float32),
    Tensor.double: _cast_to(torch.float64),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
}
"""The recording function of each torch operation; if it returns NotImplemented, the scores are computed."""
IN_PLACE = {f for f in STEPS if f.__name__.endswith("_") and not f.__name__.startswith("_")}
