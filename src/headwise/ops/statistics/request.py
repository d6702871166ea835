"""A checked call for statistics, the input of both implementations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from ...shapes import DTYPES, INTEGERS, check_query_key, describe
from ...shapes.arguments import check_counts, check_dense, is_one_of, shown, whole_numbers
from ..autocast import of_one_dtype
from ..masks.mask import Mask
from ..options import ScoreOptions
from ..tracing import without_numbers

MOST_OFFSETS = 1 << 20  # because each has its own column


class StatisticsSums(TypedDict, total=False):
    """The keywords of `statistics` that define the sums over the weights."""

    offsets: int | Iterable[int]
    features: Mapping[str, Tensor] | None
    targets: Mapping[str, Tensor] | None
    pool: int


class Request(NamedTuple):
    """A checked call. Each feature is (B, S), each target (B, T, n) long, on the query's device.

    Offsets are key minus query: negative before the query, positive after it.
    """

    query: Tensor
    key: Tensor
    options: ScoreOptions
    offsets: tuple[int, ...]
    features: dict[str, Tensor]
    targets: dict[str, Tensor]
    pool: int

    @property
    def bins(self) -> tuple[int, int]:
        """The number of bins of the pooled map: along the queries, along the keys."""
        return min(self.query.shape[2], self.pool), min(self.key.shape[2], self.pool)


def checked(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    offsets: int | Iterable[int] = 8,
    features: Mapping[str, Tensor] | None = None,
    targets: Mapping[str, Tensor] | None = None,
    pool: int = 32,
) -> Request:
    """Return the checked call, or raise the error that names the wrong argument."""
    query, key = of_one_dtype(query, key)
    check_query_key(query, key)
    T, S = query.shape[2], key.shape[2]
    options = ScoreOptions.checked(query, key, mask, scale, softcap, sinks).trimmed(T, S)
    places = tuple(max(-T - S, min(o, T + S)) for o in _checked_offsets(offsets))  # farther offsets match no key
    check_counts(1, pool=pool)
    columns, lists = _checked_features(features, query, S), _checked_targets(targets, query, S)
    return Request(query, key, options, places, columns, lists, pool)


def _checked_offsets(offsets: int | Iterable[int]) -> Iterable[int]:
    """Return each offset as key minus query; a number k means 0, -1, ... -k."""
    rule = (
        "offsets are a whole number k >= 0, for the keys 0 to k places before the query, or whole numbers, key minus "
        f"query (negative = before), such as range(-3, 4); got {shown(offsets)}"
    )
    try:
        if isinstance(offsets, (int, Integral)):
            [back] = whole_numbers("offsets", [offsets])
            if not 0 <= back <= MOST_OFFSETS:
                raise ValueError(f"{rule}; {MOST_OFFSETS} is the most" if back > 0 else rule)
            return range(0, -back - 1, -1)
        return whole_numbers("offsets", offsets)
    except TypeError:
        raise TypeError(rule) from None


def _checked_features(features: Mapping[str, Tensor] | None, query: Tensor, S: int) -> dict[str, Tensor]:
    """Return each feature as (B, S) on the query's device."""
    B = query.shape[0]
    out = {}
    for name, feature in _named("features", features).items():
        if not isinstance(feature, Tensor):
            raise TypeError(
                f"feature {name!r} is a tensor (S,) or (B, S), a number a key; got {type(feature).__name__}"
            )
        _check_numbers(f"feature {name!r}", feature, query)
        fits = is_one_of(feature.shape, [(S,), (1, S), (B, S)])
        if not fits or feature.dtype not in (*DTYPES, *INTEGERS, torch.bool):
            raise ValueError(
                f"feature {name!r} is a number a key: (S,) or (B, S) with B = {B}, S = {S}; got {describe(feature)}"
            )
        out[name] = feature.to(query.device).expand(B, S)
    return out


def _checked_targets(targets: Mapping[str, Tensor] | None, query: Tensor, S: int) -> dict[str, Tensor]:
    """Return each list of targets as (B, T, n) long on the query's device."""
    B, T = query.shape[0], query.shape[2]
    out = {}
    for name, keys in _named("targets", targets).items():
        if not isinstance(keys, Tensor) or keys.dtype not in INTEGERS:
            got = describe(keys) if isinstance(keys, Tensor) else type(keys).__name__
            raise TypeError(f"targets {name!r} are key positions, an integer tensor (T, n) or (B, T, n); got {got}")
        _check_numbers(f"targets {name!r}", keys, query)
        if keys.ndim not in (2, 3) or keys.shape[-2] != T or not is_one_of(keys.shape[:-2], [(), (1,), (B,)]):
            raise ValueError(
                f"targets {name!r} list n keys a row: (T, n) or (B, T, n) with B = {B}, T = {T}; got {describe(keys)}"
            )
        if keys.numel() and not without_numbers() and (int(keys.min()) < -1 or int(keys.max()) >= S):
            raise ValueError(
                f"targets {name!r} are positions 0 <= j < S = {S}, or -1 for none; "
                f"got {int(keys.min())} to {int(keys.max())}"
            )
        out[name] = keys.to(query.device, torch.long).expand(B, T, keys.shape[-1])
    return out


def _named(what: str, tensors: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if tensors is not None and not isinstance(tensors, Mapping):
        raise TypeError(f"{what} are a dict, name -> tensor; got {shown(tensors)}")
    return tensors or {}


def _check_numbers(name: str, tensor: Tensor, query: Tensor) -> None:
    """Check that a tensor has data that can be moved to the query's device."""
    check_dense(name, tensor)
    if tensor.is_meta and not query.is_meta:
        raise ValueError(f"{name} has no data: it is on the meta device, the query on {query.device}")
