"""What the operators of the Triton kernels compute, by definition: whole matrices in plain torch, in float64.

On pretend CUDA they stand in for the kernels, which take a hundredth of a second a tile in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.cache.quantize import rounded
from headwise.ops.masks.tiles import TileMap, unpacked
from headwise.ops.storage.paged import gathered


class _Rows(NamedTuple):
    scores: Tensor  # (B, H, T, S), of queries and keys without bad numbers
    seen: Tensor  # (B, H, T, S)
    bad: Tensor  # (B, H, T): the row is NaN


def _rows(
    q: Tensor,
    k: Tensor,
    bad_key: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    low: int,
    high: int,
    ends: list[Tensor | None],
    tiles: list[Tensor],
    dense: Tensor | None,
    diagonals: Tensor | None,
    always: int = 0,
) -> _Rows:
    (B, H, T, _), S, G = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    i, j = torch.arange(T)[:, None], torch.arange(S)[None]
    if tiles:
        seen = unpacked(TileMap(tiles[2].long(), tiles[3]), T, S)
    else:
        lows, highs, start, stop = (None if x is None else x.view(-1, 1, 1, 1) for x in ends)
        seen = (j >= i + low + (0 if lows is None else lows)) | (j < always)
        seen = seen & (j < i + high + (0 if highs is None else highs))
        seen = seen if start is None else seen & (j >= start)
        seen = seen if stop is None else seen & (j < stop)
    seen = seen.expand(B, H, T, S)
    bad_query, bad_key = ~q.isfinite().all(-1), bad_key.repeat_interleave(G, 1)
    q, k = q.double().nan_to_num(0, 0, 0), k.double().nan_to_num(0, 0, 0).repeat_interleave(G, 1)
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if dense is not None:
        s, seen = s + dense, seen & (dense > -math.inf)
    if diagonals is not None:
        s = s + diagonals[:, :, T - 1 + j - i]
    bad = (seen & bad_key[:, :, None]).any(-1) | (bad_query & seen.any(-1))
    return _Rows(s.masked_fill(~seen, -math.inf), seen, bad)


def _softmax(rows: _Rows, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights and the lse; of rows without keys 0 and -inf."""
    empty = ~rows.seen.any(-1)
    of_sink = [] if sinks is None else [sinks.double().view(1, -1, 1, 1).expand(*rows.scores.shape[:3], 1)]
    logits = torch.cat([rows.scores, *of_sink], -1)
    lse = logits.logsumexp(-1).masked_fill(empty, -math.inf)
    weights = (rows.scores - lse.masked_fill(empty, 0.0)[..., None]).exp()
    weights = weights.masked_fill(rows.bad[..., None], math.nan).masked_fill(~rows.seen, 0.0)
    return weights, lse.masked_fill(rows.bad, math.nan)


def attend(
    query: Tensor, key: Tensor, value: Tensor | None, scale: float, softcap: float, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *mask, columns, used, bins, statistics = rest
    bad_key = ~key.isfinite().all(-1)
    bad_key = bad_key if value is None else bad_key | ~value.isfinite().all(-1)
    rows = _rows(query, key, bad_key, scale, softcap, sinks, *mask)
    p, lse = _softmax(rows, sinks)
    (B, H, T, S), G = p.shape, query.shape[1] // key.shape[1]
    out = query.new_empty(B, H, T, 0)
    if value is not None:
        out = p @ value.double().nan_to_num(0, 0, 0).repeat_interleave(G, 1)
        out = _side_by_side(out.masked_fill(rows.bad[..., None], math.nan).to(query.dtype))
    empty = out.new_empty(0)
    if not statistics:
        return out, lse.float(), empty, empty.int(), empty
    none = ~rows.seen.any(-1)
    sink = torch.zeros_like(lse) if sinks is None else (sinks.double().view(-1, 1) - lse).exp().masked_fill(none, 0)
    terms = torch.xlogy(p, p).sum(-1) + torch.xlogy(sink, sink)
    mass = p.sum(-1)
    place, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    share = torch.where(mass[..., None] == 0, 0.0, p / mass[..., None])
    top = rows.scores.amax(-1).masked_fill(none, 0.0)
    largest = p.amax(-1)
    floats = [-terms, (share * (place - j).abs()).sum(-1), sink, top / math.log(2), largest]
    ints = [p.nan_to_num(0).argmax(-1).masked_fill(none, -1), rows.seen.sum(-1)]
    wide = columns[:, None, :, :used].double()
    sums = torch.cat([share @ wide[..., :bins], p @ wide[..., bins:]], -1).permute(2, 0, 1, 3).float().contiguous()
    return out, lse.float(), torch.stack(floats).float(), torch.stack(ints).int(), sums


def decode(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Any, value_scale: Any, table: Any, length: int,
    always: int, scale: float, softcap: float, sinks: Tensor | None, *mask: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parts = [(key, key_scale), (value, value_scale)]
    if table is not None:
        parts = [(gathered(x, table, length), None if y is None else gathered(y, table, length)) for x, y in parts]
    k, v = (x if y is None else x.float() * y[..., None] for x, y in parts)
    rows = _rows(query, k, ~(k.isfinite().all(-1) & v.isfinite().all(-1)), scale, softcap, sinks, *mask, always)
    p, lse = _softmax(rows, sinks)
    out = p @ v.double().nan_to_num(0, 0, 0).repeat_interleave(query.shape[1] // k.shape[1], 1)
    return _side_by_side(out.masked_fill(rows.bad[..., None], math.nan).to(query.dtype)), lse.float()


def _side_by_side(out: Tensor) -> Tensor:
    """The same in memory where the heads of a token are side by side."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def append(
    key: Tensor, value: Tensor | None, to_key: Tensor, to_value: Any, key_scale: Any, value_scale: Any, table: Any,
    columns: Any, column: int, row: int,
) -> None:  # fmt: skip
    for x, to, scales in ((key, to_key, key_scale), (value, to_value, value_scale)):
        for b in range(0 if x is None else len(x)):
            for t in range(x.shape[2]):
                at, n = row + b, (column if columns is None else int(columns[b])) + t
                if table is not None:
                    at, n = int(table[at, n // to.shape[2]]), n % to.shape[2]
                token = x[b : b + 1, :, t : t + 1]
                if scales is None:
                    to[at, :, n] = token[0, :, 0]
                else:
                    data, scale = rounded(token)
                    to[at, :, n], scales[at, :, n] = data[0, :, 0], scale[0, :, 0]


def _weights(query: Tensor, key: Tensor, floats: Tensor, rules: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    rows = _rows(query, key, ~key.isfinite().all(-1), *rules)
    top, largest = floats[3].double() * math.log(2), floats[4].double()
    p = (rows.scores - top[..., None]).exp() * largest[..., None]
    return torch.where(rows.seen, p, 0.0), rows.seen


def picks(query: Tensor, key: Tensor, keys: Tensor, floats: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    p, seen = _weights(query, key, floats, rules)
    exists = ((keys >= 0) & (keys < key.shape[2]))[:, None]
    at = keys.clamp(0, key.shape[2] - 1)[:, None].expand(*p.shape[:3], keys.shape[2])
    return p.gather(-1, at).masked_fill(~exists, 0.0).float(), (seen.gather(-1, at) & exists).to(torch.uint8)


def received(query: Tensor, key: Tensor, floats: Tensor, *rules: Any) -> tuple[Tensor, Tensor]:
    p, seen = _weights(query, key, floats, rules)
    return p.sum(2).float(), seen.sum(2, dtype=torch.int32)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "triton_attend": attend,
    "triton_decode": decode,
    "triton_append": append,
    "triton_picks": picks,
    "triton_received": received,
}
LAUNCHES = {"triton_attend": 4, "triton_decode": 2, "triton_append": 1, "triton_picks": 1, "triton_received": 1}
"""Kernel launches of each operator: `triton_attend` is a number set to 0, `flags`, and `attend` twice."""
