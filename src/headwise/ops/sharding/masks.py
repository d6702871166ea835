"""The part of a mask for some batch rows and some heads, for a rank that has only these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..masks.indexing import Span
from ..masks.mask import Mask


def share_of_mask(mask: Mask, batch: Span | None, heads: Span | None) -> Mask:
    """Return `mask.part` for some batch rows and some heads, with views of the whole tensors.

    It is cached while these tensors keep their memory, except if the mask needs a gradient.

    >>> import torch
    >>> from headwise import alibi
    >>> share_of_mask(alibi(torch.tensor([0.5, 0.25, 0.125])), (0, 2), (1, 3)).parts[0].slopes
    tensor([0.2500, 0.1250])
    """
    if mask.learns:
        return mask.part(batch=batch, heads=heads)
    which = (batch, heads)
    places = [(x.data_ptr(), x.shape, x.stride()) for x in pytree.tree_leaves(mask)]  # a tensor may get other memory
    known: dict[Any, tuple[Any, Mask]] = mask.__dict__.setdefault("_shares", {})
    if which not in known or known[which][0] != places:  # the mask is cached, because a mask caches its tile maps
        known[which] = places, mask.part(batch=batch, heads=heads)
    return known[which][1]


def mapped(mask: Mask, function: Callable[[Tensor], Tensor]) -> Mask:
    """Return the mask with `function` applied to each of its tensors; the shapes stay the same."""
    leaves, shape = pytree.tree_flatten(mask)
    return pytree.tree_unflatten([function(leaf) for leaf in leaves], shape)
