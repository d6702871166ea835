"""The kernels as operators of torch, so that torch.compile, torch.export and fake tensors know them.

Kernels are imported at the first call: triton takes half a second, and not every process has a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .launch import ends_of, halves, power, rows_of, shape_of, strides

RULES = (
    "float scale, float softcap, Tensor? sinks, SymInt low, SymInt high, Tensor?[] ends, Tensor[] tiles, "
    "Tensor? dense, Tensor? diagonals"
)
"""What acts on the scores: options, and a `KernelMask`. softcap 0 means none."""
SCHEMAS = {
    "triton_attend": f"(Tensor query, Tensor key, Tensor? value, {RULES}, Tensor? columns, int used, int bins, "
    "bool statistics) -> (Tensor out, Tensor lse, Tensor floats, Tensor ints, Tensor sums)",
    "triton_decode": "(Tensor query, Tensor key, Tensor value, Tensor? key_scale, Tensor? value_scale, Tensor? table, "
    f"SymInt length, SymInt always, {RULES}) -> (Tensor out, Tensor lse)",
    "triton_append": "(Tensor key, Tensor? value, Tensor(a!) to_key, Tensor(b!)? to_value, Tensor(c!)? key_scale, "
    "Tensor(d!)? value_scale, Tensor? table, Tensor? columns, SymInt column, SymInt row) -> ()",
    "triton_picks": f"(Tensor query, Tensor key, Tensor keys, Tensor floats, {RULES}) -> (Tensor weights, Tensor seen)",
    "triton_received": f"(Tensor query, Tensor key, Tensor floats, {RULES}) -> (Tensor mass, Tensor rows)",
}


UNFUSED = {"enable_fp_fusion": False}
"""Products and sums are rounded one by one, so that a row has the same bits in both launches of `attend`."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    low: int,
    high: int,
    ends: Sequence[Tensor | None],
    tiles: Sequence[Tensor],
    dense: Tensor | None,
    diagonals: Tensor | None,
    columns: Tensor | None,
    used: int,
    bins: int,
    statistics: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute out (B, H, T, V), lse (B, H, T) and with `statistics` what is known of each row.

    Returns also floats (5, B, H, T): entropy, distance, sink, largest score (in base 2), largest weight; ints
    (2, B, H, T): key with the largest weight, number of keys; sums (T, B, H, used): products of the weights with the
    first columns (B|1, S, a power of two), which are zeros and ones in the query's dtype; those with the first `bins`
    are a share of the mass on all keys. Without a value, V is 0.
    """
    from .kernels.attend_kernel import attend as kernel
    from .kernels.flags import flags

    query, key = rows_of(query), rows_of(key)
    value = None if value is None else rows_of(value)
    (B, H, T, D), (K, S), dev = query.shape, key.shape[1:3], query.device
    out, lse, floats, ints, sums = _made(query, value, used, statistics)
    VD = out.shape[3]
    DK, DV = power(D), power(max(VD, 1))
    rows, warps, stages = shape_of("statistics" if statistics else "attend", max(DK, DV), dev)
    rows = 64 if tiles else rows
    NQ, NK = -(-T // rows), -(-S // 64)
    bad = torch.empty(B, K, S, dtype=torch.uint8, device=dev)
    some = torch.zeros(1, dtype=torch.int32, device=dev)
    v = key if value is None else value
    places = (*strides(query, 0, 1, 2), *strides(key, 0, 1, 2), *strides(v, 0, 1, 2))
    tiles_q = -(-T // 64)
    sizes = {"VALUES": value is not None, "DK": DK, "DV": DV, "D": D, "VD": VD}
    flags[(B * K * NK + B * H * tiles_q,)](
        query, key, v, bad, some, *places, B, H, K, T, S, NK, tiles_q, **sizes, **UNFUSED
    )
    which, end_tensors, end_strides = ends_of(ends, some)
    order, counts, index, bits = tiles or (some, some, some, some)
    of_map = (strides(index, 0)[0] // NK, strides(index, 1)[0] // NK) if tiles else (0, 0)
    forms = {
        "MAP": bool(tiles), "WHICH": which, "STATISTICS": statistics, "BINS": bins, "USED": used,
        "NC": columns.shape[2] if columns is not None else 0, "DENSE": dense is not None,
        "DIAGONALS": diagonals is not None, "CAP": softcap != 0.0, "SINK": sinks is not None, "BM": rows,
        "num_warps": warps, "num_stages": stages, **UNFUSED,
    }  # fmt: skip
    absent = query.new_empty(1, dtype=torch.float32)
    given = [absent if x is None else x for x in (columns, dense, diagonals, sinks)]
    for careful in (False, True):
        kernel[(B * H * NQ,)](
            query, key, v, out, lse, floats, ints, sums, given[0], order, counts, index, bits, given[1], given[2],
            given[3], bad, some, *end_tensors, *end_strides, low, high, *places, *strides(out, 0, 1, 2),
            *strides(columns, 0), *of_map, *strides(dense, 0, 1, 2, 3), *strides(diagonals, 0, 1), B, H, H // K, T, S,
            NQ, NK, scale, softcap or 1.0, CAREFUL=careful, **forms, **sizes,
        )  # fmt: skip
    return out, lse, floats, ints, sums


def _made(
    query: Tensor, value: Tensor | None, used: int, statistics: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, H, T, _ = query.shape
    V = 0 if value is None else value.shape[3]
    of_rows = (B, H, T) if statistics else (0, 0, 0)
    return (
        _heads(query, V),
        query.new_empty((B, H, T), dtype=torch.float32),
        query.new_empty((5, *of_rows), dtype=torch.float32),
        query.new_empty((2, *of_rows), dtype=torch.int32),
        query.new_empty((T, B, H, used) if statistics else (0, 0, 0, 0), dtype=torch.float32),
    )


def _heads(query: Tensor, V: int) -> Tensor:
    """Return memory for out (B, H, T, V) in which the heads of a token are side by side, as projections read them."""
    B, H, T, _ = query.shape
    return query.new_empty(B, T, H, V).transpose(1, 2)


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    table: Tensor | None,
    length: int,
    always: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    low: int,
    high: int,
    ends: Sequence[Tensor | None],
    tiles: Sequence[Tensor],
    dense: Tensor | None,
    diagonals: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute out (B, H, T, V) and lse (B, H, T) of few queries.

    key: (B, K, S, D), or with a table pages (P, K, size, D); int8 with scales. always: keys j < always are attended
    outside of the interval, too. Values that are the first columns of the keys are not read again.
    """
    from .kernels.decode_kernel import SPLIT, combine, split

    query, key, value = rows_of(query), rows_of(key), rows_of(value)
    (B, H, T, D), K, dev = query.shape, key.shape[1], query.device
    S, V = (key.shape[2] if table is None else length), value.shape[3]
    shared = _is_shared(key, value, key_scale, value_scale)
    out, lse = _of_rows(query, key, value)
    D1, D2 = halves(D)
    DV = D1 if shared else power(V)
    rows, splits = H // K * T, -(-S // SPLIT.value)
    keys, most, warps, stages = shape_of("decode", max(D1, DV), dev)
    BM = min(most, power(rows))
    blocks = -(-rows // BM)
    part = query.new_empty((B, H, T, splits, V), dtype=torch.float32)
    part_lse = query.new_empty((B, H, T, splits), dtype=torch.float32)
    which, end_tensors, end_strides = ends_of(ends, part)
    given = [part if x is None else x for x in (key_scale, value_scale, table)]
    biases = [part if x is None else x for x in (dense, diagonals)]
    of_tables = (*strides(key_scale, 0, 1, 2), *strides(value_scale, 0, 1, 2), *strides(table, 0))
    split[(B * K * blocks * splits,)](
        query, key, value, *given, part, part_lse, *biases, *end_tensors, *end_strides, low, high, always,
        *strides(query, 0, 1, 2), *strides(key, 0, 1, 2), *strides(value, 0, 1, 2), *of_tables,
        key.shape[2], *strides(dense, 0, 1, 2, 3), *strides(diagonals, 0, 1), K, H // K, T, S, splits, blocks, scale,
        softcap or 1.0, PAGED=table is not None, INT8=key_scale is not None, SHARED=shared, WHICH=which,
        DENSE=dense is not None, DIAGONALS=diagonals is not None, CAP=softcap != 0.0, D1=D1, D2=D2, DV=DV, D=D, VD=V,
        BM=BM, BN=keys, num_warps=warps, num_stages=stages, **UNFUSED,
    )  # fmt: skip
    combine[(B * H * T,)](
        part, part_lse, part if sinks is None else sinks, out, lse, *strides(out, 0, 1, 2), H, T, splits,
        SINK=sinks is not None, DV=power(V), VD=V, **UNFUSED,
    )  # fmt: skip
    return out, lse


def _is_shared(key: Tensor, value: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> bool:
    """Return True if the values are the first columns of the keys (MLA)."""
    same_scales = key_scale is value_scale or (
        key_scale is not None and value_scale is not None and key_scale.data_ptr() == value_scale.data_ptr()
    )
    same_place = key.data_ptr() == value.data_ptr() and key.stride() == value.stride()
    return same_place and same_scales and value.shape[3] <= halves(key.shape[3])[0]


def _of_rows(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _heads(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


def append(
    key: Tensor,
    value: Tensor | None,
    to_key: Tensor,
    to_value: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    table: Tensor | None,
    columns: Tensor | None,
    column: int,
    row: int,
) -> None:
    """Write tokens key (B, K, T, D) and value (B, K, T, V) into a cache.

    Token t of row b goes to row `row + b` of the cache, and there to column `columns[b] + t`, or `column + t`.
    to_key: (N, K, L, D), or with a table pages. Scales are given for int8.
    """
    from .kernels.append_kernel import append as kernel

    key = rows_of(key)
    (B, K, T, D), y = key.shape, key if value is None else rows_of(value)
    if not key.numel():
        return
    v = to_key if to_value is None else to_value
    given = [to_key if x is None else x for x in (key_scale, value_scale, table, columns)]
    numbers = (
        *strides(key, 0, 1, 2), *strides(y, 0, 1, 2), *(to_key.stride()[:3]), *(v.stride()[:3]),
        *((0, 0, 0) if key_scale is None else key_scale.stride()),
        *((0, 0, 0) if value_scale is None else value_scale.stride()), 0 if table is None else table.stride(0),
        0 if columns is None else columns.stride(0), to_key.shape[2], column, row, K, T,
    )  # fmt: skip
    kernel[(B * K * T,)](
        key, y, to_key, v, *given, *numbers, PAGED=table is not None, PER_ROW=columns is not None,
        INT8=key_scale is not None, VALUES=value is not None, DK=power(D), DV=power(y.shape[3]), D=D, VD=y.shape[3],
        num_warps=1, **UNFUSED,
    )  # fmt: skip


def picks(
    query: Tensor, key: Tensor, keys: Tensor, floats: Tensor, scale: float, softcap: float, *rules: Any
) -> tuple[Tensor, Tensor]:
    """Compute the weights of each row on n keys, (B, H, T, n) float32, and which of them it may attend to, uint8.

    keys: (B|1, T, n) long; numbers that are no key are attended by no row. floats: from `attend`.
    """
    from .kernels.weights_kernels import picks as kernel

    query, key, keys = rows_of(query), rows_of(key), keys.contiguous()
    B, H, T, _ = query.shape
    n = keys.shape[2]
    weights, seen = _picked(query, key, keys)
    forms, sizes, tensors, numbers = _second_pass(query, key, softcap, *rules)
    if n:
        kernel[(B * H * -(-T // 64),)](
            query, key, keys, floats, weights, seen, *tensors, *numbers, *strides(keys, 0), *sizes, n, scale,
            softcap or 1.0, **forms,
        )  # fmt: skip
    return weights, seen


def received(
    query: Tensor, key: Tensor, floats: Tensor, scale: float, softcap: float, *rules: Any
) -> tuple[Tensor, Tensor]:
    """Compute the mass that each key receives, (B, H, S) float32, and how many rows may attend to it, int32."""
    from .kernels.weights_kernels import received as kernel

    query, key = rows_of(query), rows_of(key)
    (B, H, _, _), S = query.shape, key.shape[2]
    mass, rows = _of_keys(query, key)
    forms, sizes, tensors, numbers = _second_pass(query, key, softcap, *rules)
    kernel[(B * H * -(-S // 64),)](
        query, key, floats, mass, rows, *tensors, *numbers, *sizes, scale, softcap or 1.0, **forms
    )
    return mass, rows


def _second_pass(
    query: Tensor,
    key: Tensor,
    softcap: float,
    sinks: Tensor | None,
    low: int,
    high: int,
    ends: Sequence[Tensor | None],
    tiles: Sequence[Tensor],
    dense: Tensor | None,
    diagonals: Tensor | None,
) -> tuple[dict[str, Any], tuple[int, ...], list[Tensor], tuple[int, ...]]:
    """Return what the kernels of the second pass share: forms, sizes, the tensors of the mask, and numbers."""
    (B, H, T, D), (K, S) = query.shape, key.shape[1:3]
    absent = query.new_empty(1, dtype=torch.float32)
    which, end_tensors, end_strides = ends_of(ends, absent)
    index, bits = (tiles[2], tiles[3]) if tiles else (absent, absent)
    NQ, NK = -(-T // 64), -(-S // 64)
    forms = {
        "MAP": bool(tiles), "WHICH": which, "DENSE": dense is not None, "DIAGONALS": diagonals is not None,
        "CAP": softcap != 0.0, "DK": power(D), "D": D, **UNFUSED,
    }  # fmt: skip
    of_map = (strides(index, 0)[0] // NK, strides(index, 1)[0] // NK) if tiles else (0, 0)
    numbers = (
        *end_strides, low, high, *strides(query, 0, 1, 2), *strides(key, 0, 1, 2), *of_map,
        *strides(dense, 0, 1, 2, 3), *strides(diagonals, 0, 1),
    )  # fmt: skip
    given = [absent if x is None else x for x in (dense, diagonals)]
    return forms, (B, H, H // K, T, S, NQ, NK), [index, bits, *given, *end_tensors], numbers


def _picked(query: Tensor, key: Tensor, keys: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:3], keys.shape[2])
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.uint8)


def _of_keys(query: Tensor, key: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:2], key.shape[2])
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(shape, dtype=torch.int32)


def _define() -> torch.library.Library:
    """Register the operators; they exist as long as the returned library."""
    library = torch.library.Library("headwise", "FRAGMENT")
    functions: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "triton_attend": (attend, lambda query, key, value, *rest: _made(query, value, rest[-3], rest[-1])),
        "triton_decode": (decode, _of_rows),
        "triton_append": (append, lambda *_: None),
        "triton_picks": (picks, _picked),
        "triton_received": (received, _of_keys),
    }
    for name, (function, fake) in functions.items():
        library.define(name + SCHEMAS[name])
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"headwise::{name}", fake, lib=library)
    return library


_LIBRARY = _define()
