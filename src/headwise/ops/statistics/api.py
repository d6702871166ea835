"""Statistics of a head's attention matrix P, (B, H, T, S), computed without storing P.

On the CPU the native kernel computes them in the pass that makes the output (`native`), on NVIDIA GPUs kernels in
Triton do (`triton`); elsewhere one block of query rows at a time is scored and added to sums (`blockwise`). The memory
is O(T + S) in all cases, and every number is exact. "Row" means a query, "mass" a sum of weights. Two rules hold for
all statistics:

- A row that may attend to no key is left out of every mean.
- With `sinks` the softmax has one more column, which has no key. Masses count only keys, so they sum to less than 1;
  the rest is reported as `sink`. The entropy is that of the whole softmax, with that column. `distance` and `pooled`
  describe the distribution over the keys, so they are relative to the mass on the keys.

Position: query i has position i + S - T among the keys (bottom-right, as in `causal()`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...shapes import check_attention
from ..attention import attention
from ..autocast import of_one_dtype
from ..masks.mask import Mask
from ..options import ScoreKeywords
from ..torch_keywords import refuse
from . import blockwise as blocks
from . import native, triton
from .request import Request, StatisticsSums, checked


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Statistics of a head from one pass over the rows, in float32 (float64 for float64 inputs).

    Attributes:
        entropy: (B, H, T), nats: -sum P ln P of the row.
        largest: (B, H, T), the largest weight of the row; 0 if the row is empty.
        largest_key: (B, H, T) long, the key with that weight; -1 if the row is empty.
        distance: (B, H, T), tokens: mean |pos - j| under the row's weights.
        keys: (B, H, T) long, how many keys the row may attend to; 0 if the row is empty.
        sink: (B, H, T), mass on the sink column; 0 without `sinks`.
        offsets: (B, H, n), mass on the key at each of the n offsets from pos, mean over the rows that may attend to it.
        features: name -> (B, H), sum_j P_ij f_j, mean over rows.
        targets: name -> (B, H), mass on the row's targets, mean over rows that have one.
        pooled: (B, H, min(T, pool), min(S, pool)), the matrix in bins: sums over columns, means over rows; each row
            sums to 1, or to 0 if its bin has only empty rows. Index i of n is in bin i * bins // n.
        pooled_rows: (B, H, min(T, pool)) long, how many rows are averaged in each row of `pooled`.
        rows: (B, H) long, the number of non-empty rows.
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
    """The result of `statistics`: from a pass over the rows and a second pass over the keys.

    Attributes:
        received: (B, H, S), mass that a key receives, mean over the rows that may attend to it.

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
    """Compute statistics of softmax(scale * Q K^T) for every head, exactly, in O(T + S) memory.

    They describe the matrix that `headwise.attention` would apply with the same `mask`, `scale`, `softcap` and
    `sinks`, to 1e-5; half dtypes are computed in float32. The result is not differentiable.

    Args:
        query: (B, H, T, D).
        key: (B, K, S, D); query head h uses key head h // (H / K).
        mask: the keys that may be attended to: a Mask, a bool tensor with True = attend, or a float bias.
        scale: multiplies the scores; D ** -0.5 by default.
        softcap: bounds scores by softcap * tanh(score / softcap).
        sinks: (H,) logits of one more softmax column.
        offsets: the offsets whose mass is returned. An int k means the keys 0, 1, ... k places before the query; a
            sequence has key minus query: ``(-1, 0, 1)`` is the previous key, the query's own and the next one.
        features: name -> (S,) or (B, S), one number per key (bool, integer or float).
        targets: name -> (T, n) or (B, T, n) long, n keys per row, -1 = none; a key listed twice counts twice.
        pool: the maximum number of bins of the pooled map, per axis.

    Raises:
        TypeError: an argument is not a tensor of the right kind.
        ValueError: shapes, dtypes, devices or values do not fit; the message names the argument.

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
    sums: StatisticsSums = {"offsets": offsets, "features": features, "targets": targets, "pool": pool}
    request = checked(query, key, mask=mask, scale=scale, softcap=softcap, sinks=sinks, **sums)
    measured = _measured(request, received=True)[1]
    return HeadStatistics(**measured.fields_of(measured.sums))


class RowSums(NamedTuple):
    """What one pass has summed, on the device of the call, before it is divided into statistics."""

    sums: Any  # tensors, in dicts and tuples
    fields_of: Callable[[Any], dict[str, Any]]  # takes the sums, also after they were moved to another device

    def statistics(self, sums: Any) -> RowStatistics:
        """Return the statistics, on the device of the sums."""
        return RowStatistics(**self.fields_of(sums))


def _measured(
    request: Request, value: Tensor | None = None, *, received: bool = False
) -> tuple[Tensor | None, RowSums]:
    """Return the sums, with `received` if it is requested, and the output if the kernel computes it."""
    out: Tensor | None
    with torch.no_grad():
        if native.serves(request, value):
            out, fields = native.measure_natively(request, value, received=received)
            return out, RowSums(fields, dict)
        if triton.serves(request, value):
            out, sums = triton.sums_by_triton(request, value, received=received)
            return out, RowSums(sums, partial(triton.fields_of, request))
        fields = blocks.measure_in_blocks(request)
    if not received:
        del fields["received"]
    return None, RowSums(fields, dict)


class StatisticsOptions(ScoreKeywords, StatisticsSums, total=False):
    """The keywords of `statistics`."""


def _check_names(caller: str, options: Mapping[str, Any]) -> None:
    names = "mask, scale, softcap, sinks, offsets, features, targets and pool"
    refuse(caller, (name for name in options if name not in StatisticsOptions.__optional_keys__), {}, names)


def attention_statistics(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    **options: Unpack[StatisticsOptions],
) -> tuple[Float[Tensor, "B H T V"], RowStatistics]:
    """Compute `attention` and the statistics of its rows; on the CPU one pass computes both at little extra cost.

    Query, key and value are those of `attention`, the options and errors those of `statistics`.

    Returns:
        out (B, H, T, V) in the query's dtype, differentiable like that of `attention`, and the result of `statistics`
        without `received`, which needs a second pass. The statistics are detached: no gradient goes through them.
        If the output needs a gradient, the statistics need a separate pass.

    Example:
        >>> import torch
        >>> from headwise.ops.masks import causal
        >>> q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([2.0, 4.0]).view(1, 1, 2, 1)
        >>> out, rows = attention_statistics(q, k, v, mask=causal())
        >>> out.flatten().tolist(), rows.largest.flatten().tolist()
        ([2.0, 3.0], [1.0, 0.5])
    """
    _check_names("attention_statistics", options)
    out, measured = attention_sums(query, key, value, **options)
    return out, measured.statistics(measured.sums)


def row_statistics(
    query: Float[Tensor, "B H T D"], key: Float[Tensor, "B K S D"], **options: Unpack[StatisticsOptions]
) -> RowStatistics:
    """Compute `statistics`, with the same keywords, without `received`, which saves the second pass."""
    _check_names("row_statistics", options)
    measured = row_sums(query, key, **options)
    return measured.statistics(measured.sums)


def attention_sums(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StatisticsOptions]
) -> tuple[Tensor, RowSums]:
    """Return what `attention_statistics` does, but the statistics not yet divided."""
    query, key, value = of_one_dtype(query, key, value)
    check_attention(query, key, value)
    request = checked(query, key, **options)
    learns = request.options.learns or (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)))
    out, measured = _measured(request, None if learns else value)
    if learns or out is None:
        out = attention(query, key, value, **request.options._asdict())
    return out, measured


def row_sums(query: Tensor, key: Tensor, **options: Unpack[StatisticsOptions]) -> RowSums:
    """Return what `row_statistics` does, not yet divided."""
    return _measured(checked(query, key, **options))[1]
