"""Kernels for weights after their rows are known: on listed keys (`picks`), and summed over queries (`received`).

A weight is exp2(score - largest score) * largest weight, of the numbers that `attend` returned for the row.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .tile import LOG2E, SIDE, added_to, bits_of, interval, is_bad, softcapped


@triton.jit
def picks(
    Q, K, Keys, Floats, Weights, Seen, Index, Bits, Dense, Diagonals, Low, High, Start, Stop,
    s_low, s_high, s_start, s_stop, low, high, s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_mb, s_mh, s_db, s_dh, s_dt, s_ds,
    s_gb, s_gh, s_pb, B, H, G, T, S, NQ, NK, N, scale, softcap,
    MAP: tl.constexpr, WHICH: tl.constexpr, DENSE: tl.constexpr, DIAGONALS: tl.constexpr, CAP: tl.constexpr,
    DK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the weights of 64 query rows of one head on N keys each, -1 or a key that does not exist for none."""
    bh = tl.program_id(0) // NQ
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = (tl.program_id(0) % NQ) * SIDE + tl.arange(0, SIDE)
    alive = rows < T
    d = tl.arange(0, DK)
    far = rows[:, None].to(tl.int64)
    q = tl.load(Q + b * s_qb + h * s_qh + far * s_q + d[None, :], mask=alive[:, None] & (d < D)[None, :], other=0.0)
    q = q.to(tl.float32)
    n = B.to(tl.int64) * H * T
    at = bh.to(tl.int64) * T + rows
    top = tl.load(Floats + 3 * n + at, mask=alive, other=0.0)
    largest = tl.load(Floats + 4 * n + at, mask=alive, other=0.0)
    if MAP:
        line = (b * s_mb + h * s_mh + tl.program_id(0) % NQ).to(tl.int64) * NK
    else:
        lo, hi = interval(rows, b, S, low, high, Low, High, Start, Stop, s_low, s_high, s_start, s_stop, WHICH)
    K += b * s_kb + (h // G) * s_kh
    for i in range(0, N):
        j = tl.load(Keys + b * s_pb + rows.to(tl.int64) * N + i, mask=alive, other=-1)
        seen = alive & (j >= 0) & (j < S)
        if MAP:
            kind = tl.load(Index + line + j // SIDE, mask=seen, other=0)
            word = tl.load(Bits + (kind - 2).to(tl.int64) * SIDE + rows % SIDE, mask=kind >= 2, other=-1)
            seen = seen & (kind > 0) & (((word >> (j % SIDE)) & 1) != 0)
        else:
            seen = seen & (j >= lo) & (j < hi)
        k = tl.load(K + j[:, None] * s_k + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        s = tl.sum(q * k, 1) * scale
        if CAP:
            s = softcapped(s, softcap)
        if DENSE:
            add = Dense + b * s_db + h * s_dh + rows.to(tl.int64) * s_dt + j * s_ds
            added = tl.load(add, mask=seen, other=0.0).to(tl.float32)
            seen = seen & (added > float("-inf"))
            s += added
        if DIAGONALS:
            s += tl.load(Diagonals + b * s_gb + h * s_gh + (T - 1 + j - rows), mask=seen, other=0.0)
        p = tl.exp2(s * LOG2E - top) * largest
        tl.store(Weights + at * N + i, tl.where(seen, p, 0.0), mask=alive)
        tl.store(Seen + at * N + i, seen.to(tl.uint8), mask=alive)


@triton.jit
def received(
    Q, K, Floats, Mass, Rows, Index, Bits, Dense, Diagonals, Low, High, Start, Stop,
    s_low, s_high, s_start, s_stop, low, high, s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_mb, s_mh, s_db, s_dh, s_dt, s_ds,
    s_gb, s_gh, B, H, G, T, S, NQ, NK, scale, softcap,
    MAP: tl.constexpr, WHICH: tl.constexpr, DENSE: tl.constexpr, DIAGONALS: tl.constexpr, CAP: tl.constexpr,
    DK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Compute the mass that 64 keys receive from all queries of one head, and how many may attend to each."""
    bh = tl.program_id(0) // NK
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    tile = tl.program_id(0) % NK
    cols = tile * SIDE + tl.arange(0, SIDE)
    inside = cols < S
    d = tl.arange(0, DK)
    at_k = K + b * s_kb + (h // G) * s_kh + cols[None, :].to(tl.int64) * s_k + d[:, None]
    k = tl.load(at_k, mask=inside[None, :] & (d < D)[:, None], other=0.0)
    bad_key = tl.max(is_bad(k).to(tl.int32), 0)
    k = tl.where(bad_key[None, :] > 0, 0.0, k)
    n = B.to(tl.int64) * H * T
    mass, count = tl.zeros([SIDE], tl.float32), tl.zeros([SIDE], tl.int32)
    for row in range(0, NQ):
        rows = row * SIDE + tl.arange(0, SIDE)
        alive = rows < T
        if MAP:
            kind = tl.load(Index + (b * s_mb + h * s_mh + row) * NK + tile)
            lo, hi = rows * 0, rows * 0 + tl.where(kind > 0, S, 0)
        else:
            kind = 1
            lo, hi = interval(rows, b, S, low, high, Low, High, Start, Stop, s_low, s_high, s_start, s_stop, WHICH)
        met = alive & (lo < (tile + 1) * SIDE) & (hi > tile * SIDE) & (hi > lo)
        if tl.max(met.to(tl.int32), 0) > 0:
            at = bh.to(tl.int64) * T + rows
            top = tl.load(Floats + 3 * n + at, mask=alive, other=0.0)
            largest = tl.load(Floats + 4 * n + at, mask=alive, other=0.0)
            at_q = Q + b * s_qb + h * s_qh + rows[:, None].to(tl.int64) * s_q + d[None, :]
            q = tl.load(at_q, mask=alive[:, None] & (d < D)[None, :], other=0.0)
            s = tl.dot(q, k, input_precision="tf32x3") * scale
            if CAP:
                s = softcapped(s, softcap)
            pairs = alive[:, None] & inside[None, :]
            s = added_to(s, rows, cols, pairs, Dense + b * s_db + h * s_dh, Diagonals + b * s_gb + h * s_gh, s_dt, s_ds, T, DENSE, DIAGONALS)  # noqa: E501  # fmt: skip
            if MAP:
                seen = pairs & bits_of(Bits, kind - 2, rows, cols)
            else:
                seen = pairs & (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
            if DENSE:
                seen = seen & (s != float("-inf"))
            p = tl.where(seen, tl.exp2(s * LOG2E - top[:, None]) * largest[:, None], 0.0)
            mass += tl.sum(p, 0)
            count += tl.sum(seen.to(tl.int32), 0)
    to = bh.to(tl.int64) * S + cols
    tl.store(Mass + to, mass, mask=inside)
    tl.store(Rows + to, count, mask=inside)
