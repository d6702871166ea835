"""Exact scores of chosen rows and heads at any stage before or after the softmax, without the rest of the matrix."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...shapes import INTEGERS, check_query_key, describe
from ...shapes.arguments import check_dense, shown
from ..autocast import of_one_dtype, without_autocast
from ..masks.mask import Mask, as_mask
from ..nonfinite import clean, fence_pairs, is_finite_hint, show
from ..options import ScoreOptions
from ..row_blocks import mask_scores, score_rows, softcapped, softmax_rows, whole_axis
from ..tracing import without_numbers

STAGES = ("raw", "softcapped", "biased", "probabilities")


def weights(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    *,
    rows: Sequence[int] | Tensor | slice | int | None = None,
    heads: Sequence[int] | Tensor | slice | int | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    stage: Literal["raw", "softcapped", "biased", "probabilities"] = "probabilities",
) -> Float[Tensor, "B h r S"]:
    """Return the attention weights of the chosen query rows and heads on each key.

    Args:
        query: (B, H, T, D), as for `attention`.
        key: (B, K, S, D), as for `attention`.
        rows: query positions (negative counts from the end); all by default. An int keeps its axis.
        heads: query heads, in the same forms as `rows`.
        mask: as for `attention`.
        scale: as for `attention`.
        softcap: as for `attention`.
        sinks: as for `attention`.
        stage: `raw` = scaled scores; `softcapped`; `biased` = with biases added and -inf on masked keys;
            `probabilities` = the weights (0 on masked keys; with `sinks` a row sums to less than 1).

    Returns:
        float32 (float64 for float64) (B, heads, rows, S). The memory is that of the result.

    Raises:
        TypeError, ValueError: shapes that do not fit, an unknown stage, a row or head that does not exist.

    >>> from headwise.ops.masks import causal
    >>> q = k = torch.eye(3).view(1, 1, 3, 3) * 100
    >>> weights(q, k, rows=-1, mask=causal())
    tensor([[[[0., 0., 1.]]]])
    """
    query, key = of_one_dtype(query, key)
    check_query_key(query, key)
    options = ScoreOptions.checked(query, key, mask, scale, softcap, sinks)
    if not isinstance(stage, str) or stage not in STAGES:
        raise ValueError(f"stage is one of {', '.join(STAGES)}; got {shown(stage)}")
    (H, T), (K, S) = query.shape[1:3], key.shape[1:3]
    row_index, head_index = chosen("rows", rows, T), chosen("heads", heads, H)
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    seen = whole_axis(S) if learns or stage != "probabilities" else _reach(options.mask, row_index, T, S)
    row_index, head_index = row_index.to(query.device), head_index.to(query.device)
    # One group of heads after another would read each key once; the chosen few are simply picked.
    q_BhrD = query[:, head_index][:, :, row_index]
    k_BhSD = key[:, :, seen][:, head_index // (H // K)]
    bad: Tensor | None = None
    if learns and stage in STAGES[2:] and not is_finite_hint(q_BhrD, k_BhSD):  # 0 * NaN would be in the gradient
        q_BhrD, k_BhSD, bad = fence_pairs(q_BhrD, k_BhSD)
    with without_autocast(query.device.type):
        scores = score_rows(q_BhrD, k_BhSD, options.scale)
    if stage in ("raw", "softcapped"):
        return softcapped(scores, None if stage == "raw" else options.softcap)
    allowed, added = mask_of_rows(options.mask, T, S, row_index, head_index, seen)
    scores = mask_scores(softcapped(scores, options.softcap, allowed), allowed, added)
    met = bad if bad is None or allowed is None else bad & allowed
    if stage == "biased":
        return scores if met is None else show(scores, met)
    probabilities = softmax_rows(scores, allowed, None if sinks is None else sinks[head_index])[0]
    if met is None:
        beyond = (seen.start or 0, 0 if seen.stop is None else S - seen.stop)
        return torch.nn.functional.pad(probabilities, beyond) if any(beyond) else probabilities
    spoiled = met.any(-1, keepdim=True)
    return show(probabilities, spoiled if allowed is None else spoiled & allowed)


def weighted_values(
    weights: Float[Tensor, "B H T S"], value: Float[Tensor, "B K S V"], mask: Mask | Tensor | None = None
) -> Float[Tensor, "B H T V"]:
    """Return ``weights @ value``, the output of attention as a function of its weights, which get its gradient.

    Args:
        weights: (B, H, T, S), the result of `weights`, with or without dropout.
        value: (B, K, S, V); query head h reads key-value head ``h // (H // K)``.
        mask: The mask of the weights. A NaN or Inf in a value makes exactly the rows NaN that may attend to it.

    Returns:
        (B, H, T, V) in the dtype of the weights.

    >>> w, v = torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[4.0], [8.0]]]])
    >>> weighted_values(w, v)
    tensor([[[[7.]]]])
    """
    H, T, S = weights.shape[1:]
    groups = H // value.shape[1]
    bad = None if is_finite_hint(value) else ~value.isfinite().all(-1)
    value = value.to(weights.dtype) if bad is None else clean(value, bad).to(weights.dtype)
    out = (weights.unflatten(1, (-1, groups)) @ value[:, :, None]).flatten(1, 2)
    if bad is None:
        return out
    allowed, met = as_mask(mask).allowed(T, S, device=value.device), bad.repeat_interleave(groups, dim=1)[:, :, None]
    return show(out, (met if allowed is None else met & allowed).any(-1, keepdim=True))


def _reach(mask: Mask, row_index: Tensor, T: int, S: int) -> slice:
    """Return a slice that has all keys which the chosen rows may attend to; other keys need no score."""
    if without_numbers() or not row_index.numel() or row_index.is_meta:
        return whole_axis(S)
    return slice(*mask.reach(int(row_index.min()), int(row_index.max()) + 1, T, S))


def mask_of_rows(
    mask: Mask, T: int, S: int, row_index: Tensor, head_index: Tensor, cols: slice | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return `allowed` and `added` of a mask for the chosen rows and heads, and keys (all by default)."""
    allowed = mask.allowed(T, S, rows=row_index, cols=cols, device=row_index.device)
    added = mask.added(T, S, rows=row_index, cols=cols, device=row_index.device)
    return _of_heads(allowed, head_index), _of_heads(added, head_index)


def _of_heads(rule: Tensor | None, head_index: Tensor) -> Tensor | None:
    return rule if rule is None or rule.shape[1] == 1 else rule[:, head_index]


def chosen(name: str, pick: Sequence[int] | Tensor | slice | int | None, length: int) -> Tensor:
    """Return the chosen indices of an axis, counted from the start: where `pick` is, or else on the CPU.

    A check of numbers on another device would wait for it.
    """
    rule = f"{name} are integer positions: an int, several, a slice, or an integer tensor"
    whole = pick is None or isinstance(pick, slice)
    device = pick.device if isinstance(pick, Tensor) else "cpu"
    try:
        if whole:
            pick = torch.arange(length, device=device)[pick or slice(None)]
        index = torch.as_tensor(pick, device=device).reshape(-1)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{rule}; got {shown(pick)}") from None
    check_dense(name, index)
    if index.dtype not in INTEGERS and index.numel():
        raise TypeError(f"{rule}; got {describe(index)}; a bool mask gives them by .nonzero()")
    index = index.long()
    if name == "heads" and not index.numel():
        raise ValueError("heads are one or more; got none")
    if whole or not index.numel() or without_numbers():
        return index % max(length, 1)
    if not bool(((index >= -length) & (index < length)).all()):
        raise ValueError(f"{name} lie in -{length} <= index < {length} here; got {index.tolist()}")
    return index % max(length, 1)
