"""Attention of a model's own code, run by headwise: its scores are told what happens to them, and never made.

While such a module runs, a product of queries and keys gives `Scores`: a tensor of which there is only the size. What
the code then does to it (a scale, a mask, a bias, softmax, dropout) is written down, and the product with the values
runs headwise's attention with all of it. Anything else that is done to scores makes them, as the code would have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..ops.masks.compose import Mask
from ..ops.masks.make import bias, keep
from ..ops.native.lowering import FORMS
from ..ops.statistics.weights import weights
from ..ops.storage.layout import in_one_piece
from .attention import attend, attentions_are_collected, mask_of, without_lowest
from .errors import ModelError
from .lazy import Lazy, LazyKeys, LazyView
from .masks import Hidden, StructuralMask

HIDDEN = -1e4
"""Scores filled with this number or less are hidden: models write finite numbers for minus infinity."""


@dataclass(frozen=True, eq=False)
class Chain:
    """What has happened to a product of query (B, H, T, D) and key (B, K, S, D) so far, as `attention` takes it."""

    query: Tensor
    key: Tensor
    scale: float = 1.0
    mask: Mask = Mask(())
    biases: tuple[Tensor, ...] = ()
    weighted: bool = False
    dropout: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, T, S)."""
        return (*self.query.shape[:3], self.key.shape[2])

    def options(self) -> dict[str, Any]:
        """Keywords of `attention` and `weights`."""
        mask = self.mask
        for added in self.biases:
            mask = mask & bias(without_lowest(added))
        return {"mask": mask, "scale": self.scale}


class Scores(Lazy):
    """Scores, or weights after the softmax, (B, H, T, S) or (B * H, T, S) as the model's code has them."""

    chain: Chain
    replay: Callable[[], Tensor]
    """Makes them by the model's own operations, with gradients."""

    def __new__(cls, chain: Chain, shape: Any, dtype: torch.dtype, replay: Callable[[], Tensor]) -> Scores:
        """`shape`: one of the two."""
        scores: Scores = cls._of(replay, shape, dtype, chain.query.device)
        scores.chain, scores.replay = chain, replay
        return scores

    def become(self, other: Scores) -> Scores:
        """What an operation in place leaves."""
        vars(self).update(vars(other))
        return self

    def spread(self, x: Tensor) -> Tensor:
        """What the code adds to the scores, as it broadcasts to (B, H, T, S)."""
        if self.ndim == 3 and x.ndim == 3 and x.shape[0] != 1:
            return x.unflatten(0, self.chain.sizes[:2])
        return x.reshape((1,) * (4 - x.ndim) + x.shape)


_asked_for: ContextVar[bool] = ContextVar("headwise_attentions_asked_for", default=False)


@contextmanager
def attentions_asked_for(asked: bool) -> Iterator[None]:
    """For calls of modules that are not told themselves whether to return their weights."""
    before = _asked_for.set(asked)
    try:
        yield
    finally:
        _asked_for.reset(before)


class Seam(TorchFunctionMode):
    """Runs a module of attention, with every product of queries and keys in it as `Scores`."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0
        names = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
        counts = [getattr(module, name, None) for name in names]
        self.heads = next((n for n in counts if isinstance(n, int)), None)
        super().__init__()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's own code; attentions that it returns are the weights, made where the caller asked for them."""
        with self:
            result = function(*args, **kwargs)
        if not self.calls:
            raise ModelError(
                f"{type(self.module).__name__} ran without a product of queries and keys that headwise can read, so "
                "its attention did not run on headwise; switch back by model.set_attn_implementation('eager')"
            )
        wanted = attentions_are_collected() or _asked_for.get() or _asked(type(self.module).forward, args, kwargs)
        return tree_map(lambda x: _returned(x, wanted) if isinstance(x, Scores) else x, result)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation of torch inside of the module."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        step = _STEPS.get(func)
        known = step is not None and (not kwargs or _takes(step, frozenset(kwargs)))
        result = step(self, *args, **kwargs) if known else NotImplemented
        if result is NotImplemented:
            args, kwargs = _made(args), _made(kwargs)
            return func(*args, **kwargs)
        if isinstance(result, Scores) and func in _IN_PLACE and isinstance(args[0], Scores):
            return args[0].become(result)
        return result

    def next(self, scores: Scores, op: Callable[..., Tensor], chain: Chain | None = None, **changes: Any) -> Scores:
        """The scores after an operation; `op` is that operation on the scores themselves."""
        shape, dtype = changes.get("shape", scores.shape), changes.get("dtype", scores.dtype)
        return Scores(chain or scores.chain, shape, dtype, lambda: op(scores.replay()))


@cache
def _takes(step: Callable[..., Any], keywords: frozenset[str]) -> bool:
    parameters = inspect.signature(step).parameters
    return keywords <= parameters.keys() or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _asked(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a module asks for attentions."""
    names = list(inspect.signature(forward).parameters)[1:]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("output_attentions"))


def _made(x: Any) -> Any:
    """With the scores as tensors."""
    if not any(isinstance(leaf, Scores) for leaf in tree_leaves(x)):
        return x
    return tree_map(lambda leaf: leaf.replay() if isinstance(leaf, Scores) else leaf, x)


def _returned(scores: Scores, wanted: bool) -> Tensor:
    chain = scores.chain
    if not chain.weighted:
        return scores.replay()
    key = in_one_piece(_stored(chain.key), chain.query.dtype)
    make = partial(_weights, chain.query, key, chain.options(), scores.shape, scores.dtype)
    return make() if wanted else Lazy._of(make, scores.shape, scores.dtype, scores.device)


def _weights(query: Tensor, key: Tensor, options: dict[str, Any], shape: Any, dtype: torch.dtype) -> Tensor:
    return weights(query, key, **options).to(dtype).reshape(shape)


def _stored(keys: Tensor) -> Any:
    return keys.stored if isinstance(keys, LazyKeys) and not keys.exposed else keys


# -- products ---------------------------------------------------------------------------------------------------------


def _product(seam: Seam, a: Any, b: Any) -> Any:
    """The product of queries and keys, which begins scores; and that of weights and values, which ends them."""
    if isinstance(a, Scores):
        return _attended(seam, a, b) if a.chain.weighted else NotImplemented
    chain = _begun(seam, a, b)
    if chain is None:
        return NotImplemented
    shape = chain.sizes if a.ndim == 4 else (a.shape[0], a.shape[1], b.shape[2])
    return Scores(chain, shape, torch.result_type(a, b), partial(torch.matmul, a, b))


def _begun(seam: Seam, a: Any, b: Any) -> Chain | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or isinstance(b, Scores):
        return None
    if a.ndim != b.ndim or a.ndim not in (3, 4) or a.shape[-1] != b.shape[-2]:
        return None
    if isinstance(b, LazyView):
        key = b.keys if b.turned else None
    else:
        key = b.transpose(-1, -2)
    if key is None:
        return None
    if a.ndim == 3:
        if seam.heads is None or a.shape[0] % seam.heads or a.shape[0] != b.shape[0]:
            return None
        a = a.unflatten(0, (-1, seam.heads))
        key = key if key.ndim == 4 else key.unflatten(0, (-1, seam.heads))
    heads_fit = a.shape[1] == (seam.heads or a.shape[1]) and key.shape[1] in (1, a.shape[1])
    return Chain(a, key) if heads_fit and a.shape[0] == key.shape[0] else None


def _attended(seam: Seam, scores: Scores, value: Tensor) -> Any:
    chain, dtype = scores.chain, value.dtype
    flat = scores.ndim == 3
    if isinstance(value, LazyView):
        value = value.keys
    elif value.ndim != scores.ndim:
        return NotImplemented
    elif flat:
        value = value.unflatten(0, chain.sizes[:2])
    query = chain.query.to(dtype)  # some models compute their scores in float32 and all else in a half dtype
    key = chain.key if isinstance(chain.key, LazyKeys) else chain.key.to(dtype)
    # A bias of the model's own rules is made a strip of rows at a time; a fused kernel would be handed all T x S of it.
    backend = "blocks" if any(part.biases and type(part) not in FORMS for part in chain.mask.parts) else "auto"
    out = attend(seam.module, query, key, value, chain.dropout, backend, **chain.options())
    seam.calls += 1
    return out.flatten(0, 1) if flat else out


def _added_product(seam: Seam, x: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    scores = _product(seam, batch1, batch2)
    if not isinstance(scores, Scores):
        return NotImplemented
    return _add(seam, _scale(seam, scores, alpha), x * beta)


# -- what happens to scores -------------------------------------------------------------------------------------------


def _number(x: Any) -> float | None:
    """A factor as a number; None where it is none, or learns."""
    if isinstance(x, (int, float)):
        return float(x)
    return float(x) if isinstance(x, Tensor) and x.numel() == 1 and not x.requires_grad else None


def _scale(seam: Seam, scores: Any, by: Any, divide: bool = False) -> Any:
    if isinstance(by, Scores) and not divide:
        scores, by = by, scores
    factor = _number(by)
    if not isinstance(scores, Scores) or scores.chain.weighted or not factor or factor < 0:
        return NotImplemented
    factor = 1 / factor if divide else factor
    chain = scores.chain
    if any(part.biases for part in chain.mask.parts):
        return NotImplemented
    chain = replace(chain, scale=chain.scale * factor, biases=tuple(x * factor for x in chain.biases))
    return seam.next(scores, lambda x: x / by if divide else x * by, chain)


def _divide(seam: Seam, scores: Any, by: Any) -> Any:
    return _scale(seam, scores, by, divide=True) if isinstance(scores, Scores) else NotImplemented


def _add(seam: Seam, scores: Any, other: Any) -> Any:
    if isinstance(other, Scores):
        scores, other = other, scores
    if not isinstance(scores, Scores) or not isinstance(other, Tensor) or scores.chain.weighted:
        return NotImplemented
    chain = scores.chain
    if isinstance(other, (StructuralMask, Added)) and not other.exposed:
        T, S = chain.sizes[2:]
        mask = mask_of(seam.module, other, T, S) if isinstance(other, StructuralMask) else other.mask
        chain = replace(chain, mask=chain.mask & mask)
    elif other.is_floating_point() and not isinstance(other, Scores):
        chain = replace(chain, biases=(*chain.biases, scores.spread(other)))
    else:
        return NotImplemented
    return seam.next(scores, lambda x: x + other, chain)


def _fill(seam: Seam, scores: Any, hidden: Any, value: Any) -> Any:
    """masked_fill."""
    number = _number(value)
    if not isinstance(scores, Scores) or scores.chain.weighted or number is None or number > HIDDEN:
        return NotImplemented
    is_rules = isinstance(hidden, Hidden) and not hidden.exposed
    mask = hidden.mask if is_rules else keep(~scores.spread(hidden))
    chain = replace(scores.chain, mask=scores.chain.mask & mask)
    return seam.next(scores, lambda x: x.masked_fill(hidden, value), chain)


def _where(seam: Seam, seen: Any, scores: Any, other: Any) -> Any:
    if not isinstance(scores, Scores) or not isinstance(seen, Tensor) or isinstance(other, Scores):
        return NotImplemented
    number = _number(other)
    if scores.chain.weighted or number is None or number > HIDDEN:
        return NotImplemented
    chain = replace(scores.chain, mask=scores.chain.mask & keep(scores.spread(seen)))
    return seam.next(scores, lambda x: torch.where(seen, x, other), chain)


def _at_least(seam: Seam, scores: Any, other: Any = None, *args: Any) -> Any:
    """The larger of scores and the lowest number: what guards against overflow leaves them as they are."""
    number = _number(other)
    if args or not isinstance(scores, Scores) or number is None or number > torch.finfo(scores.dtype).min:
        return NotImplemented
    return seam.next(scores, lambda x: torch.maximum(x, other))


def _softmax(
    seam: Seam, scores: Any, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if not isinstance(scores, Scores) or scores.chain.weighted or dim not in (-1, scores.ndim - 1):
        return NotImplemented
    chain = replace(scores.chain, weighted=True)
    return seam.next(scores, lambda x: x.softmax(-1, dtype=dtype), chain, dtype=dtype or scores.dtype)


def _dropout(seam: Seam, scores: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not isinstance(scores, Scores) or (scores.chain.dropout and training and p):
        return NotImplemented
    if not training or not p:
        return scores
    if not scores.chain.weighted:
        return NotImplemented
    return seam.next(scores, partial(F.dropout, p=p), replace(scores.chain, dropout=p))


def _cast(seam: Seam, x: Any, *args: Any, **kwargs: Any) -> Any:
    """To another dtype: of scores it says what weights are returned in; keys of a cache are read as they are stored."""
    if not isinstance(x, (Scores, LazyKeys)):
        return NotImplemented
    kinds = [y for y in (*args, *kwargs.values()) if isinstance(y, (torch.dtype, Tensor))]
    if len(kinds) != 1 or len(kinds) != len(args) + len(kwargs):
        return NotImplemented
    dtype = kinds[0].dtype if isinstance(kinds[0], Tensor) else kinds[0]
    if isinstance(x, LazyKeys):
        return NotImplemented if x.exposed else LazyKeys(x.stored, dtype, x.expired)
    return seam.next(x, lambda y: y.to(dtype), dtype=dtype)


def _float(seam: Seam, x: Any) -> Any:
    return _cast(seam, x, torch.float32)


def _view(seam: Seam, x: Any, *shape: Any) -> Any:
    """Heads beside the batch or within it."""
    if not isinstance(x, (Scores, LazyKeys)):
        return NotImplemented
    sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if sizes.count(-1) == 1:
        rest = -torch.Size(sizes).numel()
        sizes[sizes.index(-1)] = x.numel() // rest if rest else 0
    B, H, T, S = x.chain.sizes if isinstance(x, Scores) else x.shape
    if tuple(sizes) not in ((B, H, T, S), (B * H, T, S)):
        return NotImplemented
    if isinstance(x, Scores):
        return seam.next(x, lambda y: y.reshape(sizes), shape=tuple(sizes))
    return x if len(sizes) == 4 else LazyView(x, turned=False, flat=True)


def _turn(seam: Seam, x: Any, a: int, b: int) -> Any:
    """transpose, of keys that a cache keeps in a form of its own."""
    if not isinstance(x, (LazyKeys, LazyView)) or x.exposed or {a % x.ndim, b % x.ndim} != {x.ndim - 1, x.ndim - 2}:
        return NotImplemented
    flat = isinstance(x, LazyView) and x.flat
    return LazyView(x.keys if isinstance(x, LazyView) else x, not (isinstance(x, LazyView) and x.turned), flat)


def _same(seam: Seam, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x if isinstance(x, Scores) else NotImplemented


class Added(Lazy):
    """A bias of rules, where the model's code expects the tensor that it adds to its scores."""

    mask: Mask

    def __new__(cls, mask: Mask, shape: Any, dtype: torch.dtype, device: torch.device) -> Added:
        """`shape`: (B, H, T, S) or (B * H, T, S)."""
        added: Added = cls._of(partial(_dense, mask, shape, dtype, device), shape, dtype, device)
        added.mask = mask
        return added


def _dense(mask: Mask, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = mask.added(shape[-2], shape[-1], device=device)
    assert whole is not None
    return whole.to(dtype).reshape(-1, *shape[1:]).expand(shape)


_STEPS: dict[Any, Callable[..., Any]] = {
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
    **dict.fromkeys((Tensor.contiguous, Tensor.clone), _same),
    torch.where: _where,
    F.dropout: _dropout,
    Tensor.float: _float,
}
"""What the code of models does to scores -> how it is written down; NotImplemented makes the scores."""
_IN_PLACE = {f for f in _STEPS if f.__name__.endswith("_") and not f.__name__.startswith("_")}
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}
"""What is known of scores without making them."""
