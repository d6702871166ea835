"""The keys of greatest weight for chosen rows, without the rest of the matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...shapes import check_query_key
from ...shapes.arguments import check_counts
from ..autocast import of_one_dtype, without_autocast
from ..masks.mask import Mask
from ..options import ScoreOptions
from ..row_blocks import BLOCK_ELEMENTS, mask_scores, score_rows, softcapped, softmax_rows, strips
from .weights import chosen, mask_of_rows


class TopKeys(NamedTuple):
    """The keys of greatest weight, in descending order.

    Attributes:
        keys: (B, heads, rows, n) long, n = min(k, S); -1 if the row may attend to fewer keys.
        weights: (B, heads, rows, n), the weight of each key; 0 if there is none. float32 (float64 for float64).

    >>> import headwise
    >>> same = torch.ones(1, 1, 3, 4)
    >>> headwise.top_keys(same, same, k=2, mask=headwise.causal()).keys[0, 0].tolist()
    [[0, -1], [0, 1], [0, 1]]
    """

    keys: Int[Tensor, "B h r n"]
    weights: Float[Tensor, "B h r n"]


def top_keys(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    k: int,
    *,
    rows: Sequence[int] | Tensor | slice | int | None = None,
    heads: Sequence[int] | Tensor | slice | int | None = None,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> TopKeys:
    """Return the k keys of greatest weight for each chosen query row of the chosen heads.

    Keys with equal scores are returned in ascending order. Rows are scored in blocks, so the memory is that of the
    result and of one block.

    Args:
        query: (B, H, T, D), as for `attention`.
        key: (B, K, S, D), as for `attention`.
        k: the number of keys, at least 1.
        rows: query positions (negative counts from the end); all by default. An int keeps its axis.
        heads: query heads, in the same forms as `rows`.
        mask: as for `attention`.
        scale: as for `attention`.
        softcap: as for `attention`.
        sinks: as for `attention`.

    Raises:
        TypeError, ValueError: shapes that do not fit, k below 1, a row or head that does not exist.

    >>> from headwise.ops.masks import causal
    >>> q = k = torch.eye(3).view(1, 1, 3, 3) * 100
    >>> top = top_keys(q, k, 2, rows=[0, 2], mask=causal())
    >>> top.keys[0, 0].tolist(), top.weights[0, 0].tolist()
    ([[0, -1], [2, 0]], [[1.0, 0.0], [1.0, 0.0]])
    """
    query, key = of_one_dtype(query, key)
    check_query_key(query, key)
    options = ScoreOptions.checked(query, key, mask, scale, softcap, sinks)
    check_counts(1, k=k)
    (H, T), (K, S) = query.shape[1:3], key.shape[1:3]
    row_index = chosen("rows", rows, T).to(query.device)
    head_index = chosen("heads", heads, H).to(query.device)
    q_BhTD, k_BhSD = query[:, head_index], key[:, head_index // (H // K)]
    sinks = None if sinks is None else sinks[head_index]
    pieces: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), without_autocast(query.device.type):
        for some in strips(len(row_index), max(1, BLOCK_ELEMENTS // max(S, 1))) if len(row_index) else [slice(0, 0)]:
            scores = softcapped(score_rows(q_BhTD[:, :, row_index[some]], k_BhSD, options.scale), options.softcap)
            allowed, added = mask_of_rows(options.mask, T, S, row_index[some], head_index)
            scores = mask_scores(scores, allowed, added)
            order = scores.argsort(stable=True, dim=-1, descending=True)[..., :k]
            weights = softmax_rows(scores, allowed, sinks)[0].gather(-1, order)
            if allowed is not None:
                order = order.masked_fill(~allowed.expand(scores.shape).gather(-1, order), -1)
            pieces.append((order, weights))
    return TopKeys(*(torch.cat(parts, 2) for parts in zip(*pieces, strict=True)))
