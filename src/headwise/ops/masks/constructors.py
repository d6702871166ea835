"""The masks that people say: `causal()`, `window(4)`, `lengths(n)`, ... Each draws itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...shapes import MASK_RULE, check_integers, check_made, describe
from ...shapes.arguments import check_counts, check_flags, check_index, check_tensor
from .mask import Mask
from .positional_rules import Alibi, Blocks, Dilated, Function, Relative
from .rules import Band, Bias, Keep, Lengths, Segments


def causal(*, offset: int | Tensor | None = None) -> Mask:
    """Query i sees key j iff j <= i + offset.

    `offset` is the position of query 0 among the keys: by default S - T, so the last query sees the last key
    (bottom-right); an int or a (B,) integer tensor says otherwise.

    Raises TypeError for an offset that is no integer, ValueError for one beyond 2**40 or of another shape.

    >>> print(causal().draw(2, 4))
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    if offset is None:
        return _CAUSAL
    check_integers("offset of causal()", offset, tensor=True)
    return Mask((Band(None, 0, offset),))


_CAUSAL = Mask((Band(None, 0, None),))  # one for all: frozen, and what it has worked out it need not again


def causal_top_left() -> Mask:
    """Query i sees key j iff j <= i, whatever S: the convention of `is_causal` in torch's SDPA.

    >>> print(causal_top_left().draw(2, 4))
    ■ · · ·
    ■ ■ · ·
    """
    return causal(offset=0)


def window(left: int | None, right: int | None = 0, *, offset: int | Tensor | None = None, first: int = 0) -> Mask:
    """Query at pos = i + offset sees pos - left < j <= pos + right.

    `left` counts keys with **self included**, `right` counts the keys after self; None = no limit on that side.
    `window(W)` is therefore W keys, self included, none in the future. Others count W + 1: convert at the edge.
    The `first` keys stay in sight however far the window has moved on, as attention sinks (Xiao et al. 2023,
    arXiv 2309.17453); no key after pos + right is seen for that. `offset`: as for `causal`.

    Raises TypeError for a size that is no int, ValueError for `left` < 1, `right` < 0 or `first` < 0.

    >>> print(window(2).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    >>> print(window(2, first=1).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ · ■ ■
    >>> print(window(1, 1).draw(3, 3))
    ■ ■ ·
    · ■ ■
    · · ■
    """
    for side, keys in (("left", left), ("right", right)):
        check_integers(f"{side} of window()", keys, tensor=False)
    check_integers("offset of window()", offset, tensor=True)
    check_counts(first=first)
    if left is not None and left < 1:
        raise ValueError(f"window(left) counts keys with self included, so left >= 1 or None; got {left}")
    if right is not None and right < 0:
        raise ValueError(f"window(right) counts the keys after self, so right >= 0 or None; got {right}")
    return Mask((Band(left, right, offset, first),))


def lengths(stop: Tensor, start: Tensor | None = None) -> Mask:
    """Row b of the batch may attend the keys start[b] <= j < stop[b]; `stop`, `start`: integer (B,).

    Right padding needs `stop` alone; left padding gives `start`, with stop = S. Raises TypeError for what is no integer
    tensor, ValueError for another shape.

    >>> print(lengths(torch.tensor([2])).draw(2, 3))
    ■ ■ ·
    ■ ■ ·
    """
    ends = {"stop": stop} if start is None else {"stop": stop, "start": start}
    check_index("an integer tensor (B,) for lengths()", (1,), "one number a row of the batch", **ends)
    return Mask((Lengths(stop, start),))


def segments(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """A query attends the keys that have its own id: packed documents.

    `query_ids`: integer (T,) or (B, T); `key_ids`: (S,) or (B, S), the same as `query_ids` by default. Raises TypeError
    for what is no integer tensor, ValueError for another shape.

    >>> print(segments(torch.tensor([0, 0, 1])).draw(3, 3))
    ■ ■ ·
    ■ ■ ·
    · · ■
    """
    key_ids = query_ids if key_ids is None else key_ids
    what = "an integer tensor (n,) or (B, n) for segments()"
    check_index(what, (1, 2), "one id a token", query_ids=query_ids, key_ids=key_ids)
    return Mask((Segments(query_ids, key_ids),))


def keep(tensor: Tensor) -> Mask:
    """A boolean tensor, True = attend, that broadcasts from the right to (B, H, T, S). Raises TypeError for any other.

    >>> print(keep(torch.tensor([[True, False, True], [False, True, True]])).draw(2, 3))
    ■ · ■
    · ■ ■
    """
    check_made("keep()", tensor, "bool", "True = attend; a float mask goes to bias()")
    return Mask((Keep(tensor),))


def bias(tensor: Tensor) -> Mask:
    """A float tensor added to the scaled (and softcapped) scores; broadcasts to (B, H, T, S); -inf forbids.

    It is added in float32, in float64 to float64 scores: what is -inf there forbids. Raises TypeError for what is no
    float tensor.

    >>> print(bias(torch.tensor([0.5, 0.0, -torch.inf])).draw(2, 3))
    0.5   0   ·
    0.5   0   ·
    """
    check_made("bias()", tensor, "float", "a bool mask goes to keep()")
    return Mask((Bias(tensor),))


def alibi(slopes: Tensor, *, offset: int | Tensor | None = None) -> Mask:
    """Adds -slope * |pos - j|, pos = i + offset (S - T by default); slopes: float (H,) or (B, H).

    Press et al. 2021, "Train Short, Test Long", arXiv 2108.12409. Raises TypeError for slopes that are no such tensor.

    >>> print(alibi(torch.tensor([0.5])).draw(2, 3))
    -0.5    0 -0.5
      -1 -0.5    0
    """
    check_tensor("slopes of alibi()", slopes, "a float tensor (H,) or (B, H)")
    check_integers("offset of alibi()", offset, tensor=True)
    if not slopes.is_floating_point() or slopes.ndim not in (1, 2):
        raise TypeError(f"alibi() takes float slopes (H,) or (B, H); got {slopes.dtype} {tuple(slopes.shape)}")
    return Mask((Alibi(slopes, offset),))


def alibi_slopes(num_heads: int) -> Tensor:
    """The geometric slopes of the ALiBi paper, float32 (num_heads,); a number of heads that is no power of 2 is filled
    up with every other slope of twice as many, as its authors do. Raises TypeError for no int, ValueError below 1.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    check_counts(1, 2**20, num_heads=num_heads)
    floor = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / floor) for n in range(floor)]
    extra = [2.0 ** (-4.0 * (n + 1) / floor) for n in range(0, 2 * (num_heads - floor), 2)]
    return torch.tensor(slopes + extra)


def prefix(n: int | Tensor) -> Mask:
    """Every query sees the keys j < n; n: an int, or a (B,) integer tensor. TypeError for others, ValueError below 0.

    A prefix language model, both ways within the prefix and causal after it (Raffel et al. 2020, arXiv 1910.10683):

    >>> print((causal() | prefix(2)).draw(4, 4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    if isinstance(n, Tensor):
        check_integers("n of prefix()", n, tensor=True)
    else:
        check_counts(n=n)
    return Mask((Lengths(n),))


def dilated(step: int, *, offset: int | Tensor | None = None) -> Mask:
    """Query at pos = i + offset sees the keys j with (pos - j) % step == 0: every step-th, itself among them.

    The strided pattern of sparse transformers (Child et al. 2019, arXiv 1904.10509); joined with `window` it is the
    dilated window of Longformer (Beltagy et al. 2020, arXiv 2004.05150). `offset`: as for `causal`.

    Raises TypeError for a step that is no int, ValueError below 1.

    >>> print((causal() & dilated(2)).draw(4, 4))
    ■ · · ·
    · ■ · ·
    ■ · ■ ·
    · ■ · ■
    """
    check_integers("offset of dilated()", offset, tensor=True)
    check_counts(1, step=step)
    return Mask((Dilated(step, offset=offset),))


def blocks(size: int, *, offset: int | Tensor | None = None) -> Mask:
    """Query at pos = i + offset sees the keys of its own block: pos // size == j // size. Chunked attention.

    `offset`: as for `causal`. Raises TypeError for a size that is no int, ValueError below 1.

    >>> print((causal() & blocks(2)).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · · ■ ·
    · · ■ ■
    """
    check_integers("offset of blocks()", offset, tensor=True)
    check_counts(1, size=size)
    return Mask((Blocks(size, offset=offset),))


def relative(table: Tensor, *, offset: int | Tensor | None = None) -> Mask:
    """Adds the bias table[h, R + clamp(j - pos, -R, R)], pos = i + offset; table: float (H, 2 R + 1), learned or not.

    Relative position biases (Shaw et al. 2018, arXiv 1803.02155; Raffel et al. 2020, arXiv 1910.10683) without their
    T x S tensor: column R is a key's own place, farther keys than R share the bias at R.

    Raises TypeError for what is no float tensor, ValueError for another shape.

    >>> print(relative(torch.tensor([[-2.0, 0.0, 1.0]])).draw(3, 3))
     0  1  1
    -2  0  1
    -2 -2  0
    """
    rule = "relative() takes a float table (H, 2 R + 1), a row a query head"
    check_tensor("table of relative()", table, "a float tensor (H, 2 R + 1)")
    if not table.is_floating_point():
        raise TypeError(f"{rule}; got {describe(table)}; convert with .float()")
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise ValueError(f"{rule}: an odd number of columns, j - pos = 0 in the middle; got {describe(table)}")
    check_integers("offset of relative()", offset, tensor=True)
    return Mask((Relative(table, offset=offset),))


def rule(function: Callable[..., Any], *, keep: bool = False) -> Mask:
    """Any rule: `function(b, h, i, j)` gives True where query i of head h in batch row b may attend key j.

    It is called with integer tensors that broadcast, i = 0 .. T - 1 and j = 0 .. S - 1, as FlexAttention calls its
    `mask_mod`, and gives a bool tensor: indexing, comparisons, `&`, `|`, `~`; no `if`. Tensors that it reads live on
    the query's device. Raises TypeError for what cannot be called.

    The tensors and numbers that it reads, wherever it takes them from, may change between calls. What was worked out
    for its sizes is used again if a run for the first query and key meets the same operators of torch, the same
    numbers and tensors that hold the same; this run takes about 0.1 ms a call of attention. What the function makes
    itself, as by `torch.tensor([...])` or NumPy, cannot be followed: it is evaluated in full at every call.

    Args:
        function: the function.
        keep: it says the same as long as the mask lives, whatever changes: then it is evaluated once for its sizes.

    >>> document = torch.tensor([0, 0, 1, 1])
    >>> print(rule(lambda b, h, i, j: (document[i] == document[j]) & (j <= i)).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · · ■ ·
    · · ■ ■
    """
    if not callable(function):
        raise TypeError(f"{MASK_RULE}: rule() takes a function of (b, h, i, j); got {type(function).__name__}")
    check_flags(keep=keep)
    return Mask((Function(function, keep=keep),))
