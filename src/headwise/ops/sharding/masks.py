"""The part of a mask for some batch rows and some heads, for a rank that has only these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ...shapes.arguments import shown
from ..masks import (
    Alibi,
    AllOf,
    AnyOf,
    Band,
    Bias,
    Blocks,
    Dilated,
    Function,
    Keep,
    Lengths,
    Mask,
    Not,
    Relative,
    Rule,
    Segments,
)

_AXES: dict[type[Rule], dict[str, tuple[int | None, int | None]]] = {
    Band: {"offset": (0, None)},
    Lengths: {"stop": (0, None), "start": (0, None)},
    Segments: {"query_ids": (-2, None), "key_ids": (-2, None)},
    Keep: {"tensor": (-4, -3)},
    Bias: {"tensor": (-4, -3)},
    Alibi: {"slopes": (-2, -1), "offset": (0, None)},
    Relative: {"table": (None, 0), "offset": (0, None)},
    Dilated: {"offset": (0, None)},
    Blocks: {"offset": (0, None)},
}
"""The fields that may be tensors, with their axis of the batch and of the heads; a negative axis may be missing."""


def share_of_mask(mask: Mask, rows: slice, heads: slice) -> Mask:
    """Return the mask for some batch rows and some heads, with views of the whole tensors.

    It is cached while these tensors keep their memory, except if the mask needs a gradient.

    Raises:
        TypeError: a rule has tensors whose axes are unknown.

    >>> import torch
    >>> from headwise import alibi
    >>> share_of_mask(alibi(torch.tensor([0.5, 0.25, 0.125])), slice(0, 2), slice(1, 3)).parts[0].slopes
    tensor([0.2500, 0.1250])
    """
    if mask.learns:
        return Mask(tuple(_share(rule, rows, heads) for rule in mask.parts))
    which = (rows.start, rows.stop, heads.start, heads.stop)
    places = [(x.data_ptr(), x.shape, x.stride()) for x in pytree.tree_leaves(mask)]  # a tensor may get other memory
    known: dict[Any, tuple[Any, Mask]] = mask.__dict__.setdefault("_shares", {})
    if which not in known or known[which][0] != places:  # the mask is cached, because a mask caches its tile maps
        known[which] = places, Mask(tuple(_share(rule, rows, heads) for rule in mask.parts))
    return known[which][1]


def mapped(mask: Mask, function: Callable[[Tensor], Tensor]) -> Mask:
    """Return the mask with `function` applied to each of its tensors; the shapes stay the same."""
    leaves, shape = pytree.tree_flatten(mask)
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], shape)


def cut(x: Any, part: slice, axis: int | None) -> Any:
    """Return some rows or heads of a tensor; other objects, and tensors without this axis or with size 1, unchanged."""
    if axis is None or not isinstance(x, Tensor) or x.ndim < (-axis if axis < 0 else axis + 1) or x.shape[axis] == 1:
        return x
    return x[(slice(None),) * (axis % x.ndim) + (part,)]


def _share(rule: Rule, rows: slice, heads: slice) -> Rule:
    if isinstance(rule, AllOf | AnyOf | Not):
        return type(rule)(tuple(_share(part, rows, heads) for part in rule.rules))
    if isinstance(rule, Function):
        return Function(_From((rule.of or rule).function, rows.start or 0, heads.start or 0), keep=rule.keep)
    axes = _AXES.get(type(rule))
    if axes is None and any(isinstance(getattr(rule, field.name), Tensor) for field in fields(rule)):
        raise TypeError(
            f"a mask is dealt out by what is known of its rules' tensors; {shown(type(rule).__name__)} is none of "
            "those of headwise; write it as keep(tensor), bias(tensor) or rule(function)"
        )
    changed = {}
    for name, (batch, head) in (axes or {}).items():
        whole = getattr(rule, name)
        part = cut(cut(whole, rows, batch), heads, head)
        if part is not whole:
            changed[name] = part
    return replace(rule, **changed) if changed else rule


@dataclass(frozen=True, eq=False)
class _From:
    """A function of indices, called with indices shifted by a batch row and a head."""

    function: Callable[..., Any]
    row: int
    head: int

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return self.function(b + self.row, h + self.head, i, j)
