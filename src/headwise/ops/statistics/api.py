"""What a head did: the statistics of its attention matrix P, (B, H, T, S), without ever holding P.

On the CPU the native kernel adds the numbers up in the pass that makes the output (`native`); elsewhere a
block of query rows is scored, folded into sums, and forgotten (`blocks`). Memory is O(T + S) either way, and
every number is exact. "Row" means a query, "mass" a sum of weights. Two rules hold for all statistics:

- A row that may attend nothing contributes nothing: no mean counts it.
- With `sinks` the softmax has a further column that holds no key. Masses are of the keys alone, so they sum to less
  than 1; the rest is reported as `sink`. Entropy is that of the whole softmax, that column included. `distance` and
  `pooled` describe where the mass on the keys lies, so they are taken relative to it.

Position: query i stands at pos = i + S - T among the keys (bottom-right, as `causal()`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...shapes import check_attention
from ..attention import attention
from ..autocast import of_one_dtype
from ..masks.mask import Mask
from ..options import ScoringOptions
from ..torch_keywords import refuse
from . import blockwise as blocks
from . import native
from .request import Request, StatisticsSums, checked


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """What one pass over the rows tells of a head, in float32 (float64 for float64 inputs).

    Attributes:
        entropy: (B, H, T), nats: -sum P ln P of the row.
        largest: (B, H, T), the largest weight of the row; 0 where the row is empty.
        largest_key: (B, H, T) long, the key that has it; -1 where the row is empty.
        distance: (B, H, T), tokens: mean |pos - j| under the row's weights.
        keys: (B, H, T) long, how many keys the row may attend; 0 marks an empty row.
        sink: (B, H, T), mass that went to the sink column; 0 without `sinks`.
        offsets: (B, H, n), mass on the key at each of the n offsets from pos, mean over the rows that may attend it.
        features: name -> (B, H), sum_j P_ij f_j, mean over rows.
        targets: name -> (B, H), mass on the row's targets, mean over rows that have one.
        pooled: (B, H, min(T, pool), min(S, pool)), the matrix in bins: columns are summed, rows averaged; a row of it
            sums to 1, or to 0 where its bin holds empty rows only. Index i of n falls into bin i * bins // n.
        pooled_rows: (B, H, min(T, pool)) long, how many rows each row of `pooled` is the mean of.
        rows: (B, H) long, non-empty rows.
    """

    entropy: Float[Tensor, "B H T"]
    largest: Float[Tensor, "B H T"]
    largest_key: Int[Tensor, "B H T"]
    distance: Float[Tensor, "B H T"]
    keys: Int[Tensor, "B H T"]
    sink: Float[Tensor, "B H T"]
    offsets: Float[Tensor, "B H O"]
    features: dict[str, Tensor]
    targets: dict[str, Tensor]
    pooled: Float[Tensor, "B H X Y"]
    pooled_rows: Int[Tensor, "B H X"]
    rows: Int[Tensor, "B H"]


@dataclass(frozen=True, eq=False)
class HeadStatistics(RowStatistics):
    """What `statistics` measured: a pass over the rows, and a second one over the keys.

    Attributes:
        received: (B, H, S), mass that a key receives, mean over the rows that may attend it.

    >>> import headwise
    >>> same = torch.zeros(1, 1, 2, 4)
    >>> headwise.statistics(same, same, mask=headwise.causal()).received.tolist()
    [[[0.75, 0.5]]]
    """

    received: Float[Tensor, "B H S"]


def statistics(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    offsets: int | Iterable[int] = 8,
    features: Mapping[str, Tensor] | None = None,
    targets: Mapping[str, Tensor] | None = None,
    pool: int = 32,
) -> HeadStatistics:
    """Statistics of softmax(scale * Q K^T) for every head, exact, in O(T + S) memory.

    They are those of the matrix that `headwise.attention` would apply with the same `mask`, `scale`, `softcap`
    and `sinks`, to 1e-5; half dtypes are computed in float32. Nothing here is differentiable.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D); query head h reads key head h // (H / K).
        mask: what may be attended: a Mask, a bool tensor with True = attend, or a float bias.
        scale: multiplies the scores; D ** -0.5 by default.
        softcap: bounds scores by softcap * tanh(score / softcap).
        sinks: (H,) logits of a further softmax column.
        offsets: whose mass is wanted: k stands for the keys 0, 1, ... k places before the query; or a sequence, key
            minus query: ``(-1, 0, 1)`` is the one before it, its own, and the one after it.
        features: name -> (S,) or (B, S), a number a key (bool, integer or float).
        targets: name -> (T, n) or (B, T, n) long, n keys a row, -1 = none; a key named twice counts twice.
        pool: most bins of the pooled map, per axis.

    Raises:
        TypeError: something is not a tensor of the right kind.
        ValueError: shapes, dtypes, devices or values do not fit; the text says which.

    Example:
        >>> import torch
        >>> from headwise.ops.masks import causal
        >>> q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)       # uniform attention
        >>> heads = statistics(q, k, mask=causal(), offsets=1)
        >>> heads.entropy[0, 0].exp().tolist()                          # row i sees i + 1 keys
        [1.0, 2.0, 3.0, 4.0]
        >>> heads.offsets[0, 0]        # (1 + 1/2 + 1/3 + 1/4) / 4 on itself, (1/2 + 1/3 + 1/4) / 3 on the one before
        tensor([0.5208, 0.3611])
    """
    request = checked(
        query,
        key,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        offsets=offsets,
        features=features,
        targets=targets,
        pool=pool,
    )
    return HeadStatistics(**_measured(request, received=True)[1])


def _measured(
    request: Request, value: Tensor | None = None, *, received: bool = False
) -> tuple[Tensor | None, dict[str, Any]]:
    """The fields of `RowStatistics`, with `received` of `HeadStatistics`; the output too where the kernel makes it."""
    with torch.no_grad():
        if native.serves(request, value):
            return native.measure_natively(request, value, received=received)
        fields = blocks.measure_in_blocks(request)
    if not received:
        del fields["received"]
    return None, fields


class StatisticsOptions(ScoringOptions, StatisticsSums, total=False):
    """The keywords of `statistics`."""


def _check_names(caller: str, options: Mapping[str, Any]) -> None:
    names = "mask, scale, softcap, sinks, offsets, features, targets and pool"
    refuse(caller, {name: None for name in options if name not in StatisticsOptions.__optional_keys__}, {}, names)


def attention_statistics(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    **options: Unpack[StatisticsOptions],
) -> tuple[Float[Tensor, "B H T V"], RowStatistics]:
    """`attention` and the statistics of its rows, on the CPU in one pass: little dearer than attention alone.

    Args:
        query, key, value: as for `attention`.
        options: mask, scale, softcap, sinks, offsets, features, targets and pool, as for `statistics`.

    Returns:
        out (B, H, T, V) in the query's dtype, differentiable as that of `attention`, and what `statistics` gives, but
        for `received`, which takes a pass of its own. The statistics are detached: no gradient goes through them.
        Where one is wanted of the output, these are a pass of their own, too.

    Raises:
        TypeError, ValueError: as `attention` and `statistics` raise them.

    Example:
        >>> import torch
        >>> from headwise.ops.masks import causal
        >>> q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([2.0, 4.0]).view(1, 1, 2, 1)
        >>> out, rows = attention_statistics(q, k, v, mask=causal())
        >>> out.flatten().tolist(), rows.largest.flatten().tolist()
        ([2.0, 3.0], [1.0, 0.5])
    """
    _check_names("attention_statistics", options)
    query, key, value = of_one_dtype(query, key, value)
    check_attention(query, key, value)
    request = checked(query, key, **options)
    scoring = request.scoring
    learns = scoring.learns or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
    out, fields = _measured(request, None if learns else value)
    if learns or out is None:
        out = attention(
            query,
            key,
            value,
            mask=scoring.mask,
            scale=scoring.scale,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
        )
    return out, RowStatistics(**fields)


def row_statistics(
    query: Float[Tensor, "B H T D"], key: Float[Tensor, "B K S D"], **options: Unpack[StatisticsOptions]
) -> RowStatistics:
    """`statistics`, with the same keywords, without `received`, which saves the second pass."""
    _check_names("row_statistics", options)
    return RowStatistics(**_measured(checked(query, key, **options))[1])
