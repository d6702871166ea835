"""Functions that create common masks: `causal()`, `window(4)`, `lengths(n)`, ... Each can be drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...shapes import check_integers, check_made, describe
from ...shapes.arguments import check_counts, check_flags, check_index, check_tensor, shown
from .mask import Mask
from .picked import Picked
from .positional_rules import Alibi, Blocks, Dilated, Function, Relative
from .rules import Band, Bias, Keep, Lengths, Segments


def causal(*, offset: int | Tensor | None = None) -> Mask:
    """Return a causal mask: query i may attend to key j if j <= i + offset.

    `offset` is the position of query 0 among the keys. By default it is S - T, so the last query may attend to the
    last key (bottom-right); it can be an int or a (B,) integer tensor.

    Raises TypeError for an offset that is not an integer, ValueError for one beyond 2**40 or a wrong shape.

    >>> print(causal().draw(2, 4))
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    if offset is None:
        return _CAUSAL
    check_integers("offset of causal()", offset, tensor=True)
    return Mask((Band(None, 0, offset),))


_CAUSAL = Mask((Band(None, 0, None),))  # one object, because it is frozen and caches its results


def causal_top_left() -> Mask:
    """Return a mask j <= i for any S: the convention of `is_causal` in torch's SDPA.

    >>> print(causal_top_left().draw(2, 4))
    ■ · · ·
    ■ ■ · ·
    """
    return causal(offset=0)


def window(left: int | None, right: int | None = 0, *, offset: int | Tensor | None = None, first: int = 0) -> Mask:
    """Return a window mask: the query at pos = i + offset may attend to pos - left < j <= pos + right.

    `left` counts keys with **self included**, `right` counts the keys after self; None = no limit on that side.
    `window(W)` is therefore W keys, self included, none in the future. Some libraries count W + 1, so convert there.
    The `first` keys are always allowed behind the window, as attention sinks (Xiao et al. 2023, arXiv 2309.17453);
    keys after pos + right stay forbidden. `offset`: as for `causal`.

    Raises TypeError for a size that is not an int, ValueError for `left` < 1, `right` < 0 or `first` < 0.

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
    """Return a mask: batch row b may attend to the keys start[b] <= j < stop[b]; `stop`, `start`: integer (B,).

    Right padding needs only `stop`; left padding needs `start`, with stop = S. Raises TypeError for an argument that is
    not an integer tensor, ValueError for a wrong shape.

    >>> print(lengths(torch.tensor([2])).draw(2, 3))
    ■ ■ ·
    ■ ■ ·
    """
    ends = {"stop": stop} if start is None else {"stop": stop, "start": start}
    check_index("an integer tensor (B,) for lengths()", (1,), "one number a row of the batch", **ends)
    return Mask((Lengths(stop, start),))


def segments(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Return a mask in which a query may attend to the keys with its own id: packed documents.

    `query_ids`: integer (T,) or (B, T); `key_ids`: (S,) or (B, S), the same as `query_ids` by default. Raises TypeError
    for an argument that is not an integer tensor, ValueError for a wrong shape.

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
    """Return a mask from a bool tensor, True = attend, that broadcasts from the right to (B, H, T, S).

    Raises TypeError for another argument.

    >>> print(keep(torch.tensor([[True, False, True], [False, True, True]])).draw(2, 3))
    ■ · ■
    · ■ ■
    """
    check_made("keep()", tensor, "bool", "True = attend; a float mask goes to bias()")
    return Mask((Keep(tensor),))


def bias(tensor: Tensor) -> Mask:
    """Return a bias from a float tensor, added to the scaled (and softcapped) scores; -inf forbids.

    The tensor broadcasts to (B, H, T, S) and is added in float32, or in float64 for float64 scores: a number that is
    -inf in that dtype forbids. Raises TypeError for an argument that is not a float tensor.

    >>> print(bias(torch.tensor([0.5, 0.0, -torch.inf])).draw(2, 3))
    0.5   0   ·
    0.5   0   ·
    """
    check_made("bias()", tensor, "float", "a bool mask goes to keep()")
    return Mask((Bias(tensor),))


def alibi(slopes: Tensor, *, offset: int | Tensor | None = None) -> Mask:
    """Return the ALiBi bias -slope * |pos - j|, pos = i + offset (S - T by default); slopes: float (H,) or (B, H).

    Press et al. 2021, "Train Short, Test Long", arXiv 2108.12409. Raises TypeError for other slopes.

    >>> print(alibi(torch.tensor([0.5])).draw(2, 3))
    -0.5    0 -0.5
      -1 -0.5    0
    """
    check_tensor("slopes of alibi()", slopes, "a float tensor (H,) or (B, H)")
    check_integers("offset of alibi()", offset, tensor=True)
    if not slopes.is_floating_point() or slopes.ndim not in (1, 2):
        raise TypeError(f"alibi() takes float slopes (H,) or (B, H); got {slopes.dtype} {tuple(slopes.shape)}")
    return Mask((Alibi(slopes, offset=offset),))


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the geometric slopes of the ALiBi paper, float32 (num_heads,).

    If the number of heads is not a power of 2, every other slope of twice as many heads is added, as in the authors'
    code. Raises TypeError if it is not an int, ValueError if it is below 1.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    check_counts(1, 2**20, num_heads=num_heads)
    floor = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (n + 1) / floor) for n in range(floor)]
    extra = [2.0 ** (-4.0 * (n + 1) / floor) for n in range(0, 2 * (num_heads - floor), 2)]
    return torch.tensor(slopes + extra)


def picked(indices: Tensor) -> Mask:
    """Return a mask in which query i may attend to the keys that are listed for it; the list is all that is stored.

    This is sparse attention whose keys an indexer chooses for each query (arXiv 2512.02556). The native kernel gathers
    the listed keys, so that time and memory do not grow with T x S; other rules, joined by `&`, are evaluated for these
    keys only. In `~picked(...)` and ``picked(...) | ...`` it is a rule like any other, with a map of tiles.

    `indices`: integer (B, H, T, n); B and H may be 1. A key is 0 <= j < S, -1 is none, and one that is listed twice
    counts once. Raises TypeError for an argument that is not an integer tensor, ValueError for other axes.

    >>> print(picked(torch.tensor([[[[0, -1], [0, 2], [1, 3]]]])).draw(3, 4))
    ■ · · ·
    ■ · ■ ·
    · ■ · ■
    """
    check_index("an integer tensor (B, H or 1, T, n) for picked()", (4,), "n keys a query", indices=indices)
    return Mask((Picked(indices),))


def prefix(n: int | Tensor) -> Mask:
    """Return a mask in which every query may attend to the keys j < n; n: an int, or a (B,) integer tensor.

    Raises TypeError for another type, ValueError below 0. A prefix language model attends in both directions within
    the prefix and causally after it (Raffel et al. 2020, arXiv 1910.10683):

    >>> print((causal() | prefix(2)).draw(4, 4))
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    if isinstance(n, Tensor):
        check_integers("n of prefix()", n, tensor=True)
    elif isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
        raise TypeError(f"n of prefix() is an int, or an integer tensor (B,); got {shown(n)}")
    else:
        check_counts(n=n)
    return Mask((Lengths(n),))


def dilated(step: int, *, offset: int | Tensor | None = None) -> Mask:
    """Return a mask in which the query at pos = i + offset may attend to the keys j with (pos - j) % step == 0.

    This is the strided pattern of sparse transformers (Child et al. 2019, arXiv 1904.10509); with `window` it is the
    dilated window of Longformer (Beltagy et al. 2020, arXiv 2004.05150). `offset`: as for `causal`.

    Raises TypeError for a step that is not an int, ValueError below 1.

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
    """Return a mask for chunked attention: a query may attend to the keys of its own block, pos // size == j // size.

    pos = i + offset; `offset`: as for `causal`. Raises TypeError for a size that is not an int, ValueError below 1.

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
    """Return the bias table[h, R + clamp(j - pos, -R, R)], pos = i + offset; table: float (H, 2 R + 1).

    The table may be learned. These are relative position biases (Shaw et al. 2018, arXiv 1803.02155; Raffel et al.
    2020, arXiv 1910.10683) without a T x S tensor: column R is distance 0; keys farther than R have the bias at R.

    Raises TypeError for an argument that is not a float tensor, ValueError for a wrong shape.

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
    """Return a mask from a function: `function(b, h, i, j)` is True if query i of head h in row b may attend to key j.

    The function gets integer tensors that broadcast, i = 0 .. T - 1 and j = 0 .. S - 1, like a `mask_mod` of
    FlexAttention, and returns a bool tensor. It may use indexing, comparisons, `&`, `|`, `~`, but no `if`. Its tensors
    must be on the query's device. Raises TypeError for an argument that cannot be called with four arguments.

    The tensors and numbers that the function uses may change between calls. A cached result for the same sizes is used
    if a run for the first query and key has the same torch operators, the same numbers and tensors with the same data;
    this run takes about 0.1 ms per call of attention. If the function creates tensors itself, for example by
    `torch.tensor([...])` or NumPy, this cannot be tracked: it is then evaluated in full at every call.

    Args:
        function: the function.
        keep: True if the function's result never changes while the mask exists: it is then evaluated once per size.

    >>> document = torch.tensor([0, 0, 1, 1])
    >>> print(rule(lambda b, h, i, j: (document[i] == document[j]) & (j <= i)).draw(4, 4))
    ■ · · ·
    ■ ■ · ·
    · · ■ ·
    · · ■ ■
    """
    if not callable(function):
        raise TypeError(f"rule() takes a function of (b, h, i, j); got {type(function).__name__}")
    if not _takes_four(function):
        raise TypeError(f"rule() takes a function of (b, h, i, j); got one of {inspect.signature(function)}")
    check_flags(keep=keep)
    return Mask((Function(function, keep=keep),))


def _takes_four(function: Callable[..., Any]) -> bool:
    """Return whether a function can be called with (b, h, i, j); True if Python does not know its parameters."""
    if torch.compiler.is_compiling():  # inspect.signature cannot be traced; a wrong function fails at its call
        return True
    try:
        inspect.signature(function).bind(None, None, None, None)
    except TypeError:
        return False
    except ValueError:  # some functions in C have no signature
        return True
    return True
