"""The kernel of `attend`: one pass over the keys gives the output, the lse and the statistics of each row."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .tile import LN2, LOG2E, SIDE, added_to, bits_of, interval, is_bad, softcapped


@triton.constexpr_function
def up_of(dtype):
    """Return a factor of weights, so that those far below 1 are not lost in float16."""
    return 4096.0 if dtype == tl.float16 else 1.0


@triton.jit
def _tile(
    q, K, V, Columns, Bits, Dense, Diagonals, Bad, slot, tile, rows, lo, hi, state,
    s_k, s_v, s_dt, s_ds, scale, softcap, T, S,
    MASKED: tl.constexpr, MAP: tl.constexpr, STATISTICS: tl.constexpr,
    NC: tl.constexpr, DENSE: tl.constexpr, DIAGONALS: tl.constexpr, CAP: tl.constexpr, CAREFUL: tl.constexpr,
    VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """One tile of keys. Scores are in base 2; the sums are those of exp2(score - m), m the largest score so far."""
    m, l, acc, plogp, distance, columns, keys, top_key, met = state  # noqa: E741
    near = tl.arange(0, SIDE)
    cols = (near + tile * SIDE).to(tl.int32)
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    inside = cols < S
    at = K + s_k * SIDE * tile + (near[None, :] * s_k + dk[:, None])  # the tile is int64, places in it are int32
    if MASKED:
        k = tl.load(at, mask=inside[None, :] & (dk < D)[:, None], other=0.0)
    else:
        k = tl.load(at, mask=(dk < D)[:, None], other=0.0)
    if CAREFUL:
        bad = tl.load(Bad + cols, mask=inside, other=0) != 0
        k = tl.where(bad[None, :], 0.0, k)
    s = tl.dot(q, k, input_precision="tf32x3")
    if CAP or DENSE or DIAGONALS:
        s *= scale
        if CAP:
            s = softcapped(s, softcap)
        pairs = inside[None, :] & (rows < T)[:, None]
        s = added_to(s, rows, cols, pairs, Dense, Diagonals, s_dt, s_ds, T, DENSE, DIAGONALS) * LOG2E
    else:
        s *= scale * LOG2E
    if MASKED:
        if MAP:
            seen = bits_of(Bits, slot, rows, cols) & inside[None, :]
        else:
            seen = (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
        s = tl.where(seen, s, float("-inf"))
    if CAREFUL:
        met = tl.maximum(met, tl.max((bad[None, :] & (s > float("-inf"))).to(tl.int32), 1))
    if STATISTICS and (MAP or DENSE):
        keys += tl.sum((s > float("-inf")).to(tl.int32), 1)
    m_new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - safe)
    s -= safe[:, None]
    p = tl.exp2(s)
    UP: tl.constexpr = up_of(V.dtype.element_ty)
    high = (p * UP).to(V.dtype.element_ty)
    if STATISTICS:  # sums of terms of one sign, so that nothing cancels; places as floats, which is cheaper
        z = tl.maximum(s, -1e30) if MASKED or DENSE else s  # 0 times -inf is NaN
        plogp = alpha * (plogp + l * (tl.maximum(m, -1e30) - safe)) + tl.sum(p * z, 1)
        place = (rows + (S - T)).to(tl.float32)
        distance = alpha * distance + tl.sum(p * tl.abs(place[:, None] - cols.to(tl.float32)[None, :]), 1)
        here = tl.min(tl.where(s == 0.0, cols[None, :], 2147483647), 1)
        top_key = tl.where(m_new > m, here, top_key)
        if NC > 0:  # further columns of values, 0 or 1: whether the key lies in a bin, and the features
            c = tl.arange(0, NC)
            at = Columns + (near[:, None] * NC + c[None, :]) + tile * (SIDE * NC)
            of_key = tl.load(at, mask=inside[:, None], other=0.0) if MASKED else tl.load(at)
            rest = (p * UP - high.to(tl.float32)).to(high.dtype)  # with zeros and ones the products of both are exact
            columns = columns * alpha[:, None] + tl.dot(high, of_key, input_precision="tf32x3")
            columns += tl.dot(rest, of_key, input_precision="tf32x3")
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    if VALUES:
        at = V + s_v * SIDE * tile + (near[:, None] * s_v + dv[None, :])
        if MASKED:
            v = tl.load(at, mask=inside[:, None] & (dv < VD)[None, :], other=0.0)
        else:
            v = tl.load(at, mask=(dv < VD)[None, :], other=0.0)
        if CAREFUL:
            v = tl.where(bad[:, None], 0.0, v)
        acc = acc * alpha[:, None] + tl.dot(high, v, input_precision="tf32x3")
    return m_new, l, acc, plogp, distance, columns, keys, top_key, met


@triton.jit
def _ranges(lo, hi, alive, S):
    """Return the tiles of BM rows: first <= tile < last, of which every row attends those from full to ends whole."""
    sees = alive & (hi > lo)
    first = tl.min(tl.where(sees, lo, S)) // SIDE
    last = tl.maximum((tl.max(tl.where(sees, hi, 0)) + SIDE - 1) // SIDE, first)
    full = (tl.max(tl.where(alive, lo, 0)) + SIDE - 1) // SIDE
    ends = tl.min(tl.where(alive, hi, S)) // SIDE
    full = tl.minimum(tl.maximum(full, first), last)
    ends = tl.minimum(tl.maximum(ends, full), last)
    return first.to(tl.int64), full.to(tl.int64), ends.to(tl.int64), last.to(tl.int64)


@triton.jit
def _write_statistics(
    Floats, Ints, Sums, b, h, rows, at, alive, empty, m, top, l, total, escaped, plogp, distance, sums, keys, top_key,  # noqa: E741
    B, H, T, BINS: tl.constexpr, USED: tl.constexpr, NC: tl.constexpr,
):  # fmt: skip
    """Write what is known of BM rows, from the sums over their keys."""
    n = B.to(tl.int64) * H * T
    mass = l / total
    faint = mass < 1.1754944e-38  # such a mass counts as none, as in the kernel for the CPU
    on_keys = tl.where(faint, 1.0, l + total * 0.0)  # NaN for a row that is spoiled
    tl.store(Floats + at, tl.where(empty, 0.0, (tl.log2(total) - plogp / total) * LN2), mask=alive)
    tl.store(Floats + n + at, tl.where(faint, 0.0, distance / on_keys), mask=alive)
    tl.store(Floats + 2 * n + at, escaped, mask=alive)
    tl.store(Floats + 3 * n + at, tl.where(empty, 0.0, m), mask=alive)
    tl.store(Floats + 4 * n + at, tl.where(empty, 0.0, tl.exp2(m - top) / total), mask=alive)
    tl.store(Ints + at, tl.where(empty, -1, top_key), mask=alive)
    tl.store(Ints + n + at, keys, mask=alive)
    if NC > 0:  # (T, B, H, USED): bins are those of the keys alone, features of the whole row
        c = tl.arange(0, NC)
        of_bins = tl.where(faint[:, None], 0.0, sums / on_keys[:, None])
        row = (rows.to(tl.int64) * B + b) * H + h
        to = Sums + row[:, None] * USED + c[None, :]
        written = tl.where((c < BINS)[None, :], of_bins, sums / total[:, None])
        tl.store(to, written, mask=alive[:, None] & (c < USED)[None, :])


@triton.jit
def attend(
    Q, K, V, Out, Lse, Floats, Ints, Sums, Columns, Order, Counts, Index, Bits, Dense, Diagonals, Sinks, Bad, Any,
    Low, High, Start, Stop, s_low, s_high, s_start, s_stop, low, high,
    s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, s_ob, s_oh, s_o, s_fb,
    s_mb, s_mh, s_db, s_dh, s_dt, s_ds, s_gb, s_gh, B, H, G, T, S, NQ, NK, scale, softcap,
    MAP: tl.constexpr, WHICH: tl.constexpr, STATISTICS: tl.constexpr, BINS: tl.constexpr, USED: tl.constexpr,
    NC: tl.constexpr, DENSE: tl.constexpr, DIAGONALS: tl.constexpr, CAP: tl.constexpr, SINK: tl.constexpr,
    CAREFUL: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, VD: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """BM query rows of one head; the last rows come first, for a causal mask gives them the most keys."""
    if CAREFUL:  # noqa: SIM102 - the second launch, which has nothing to do where every number is finite
        if tl.load(Any) == 0:
            return
    pid = tl.program_id(0)
    tile_q, bh = NQ - 1 - pid % NQ, pid // NQ
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = tile_q * BM + tl.arange(0, BM)
    alive = rows < T
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    at_q = Q + b * s_qb + h * s_qh + rows[:, None].to(tl.int64) * s_q + dk[None, :]
    q = tl.load(at_q, mask=alive[:, None] & (dk < D)[None, :], other=0.0)
    bad_row = tl.zeros([BM], tl.int32)
    if CAREFUL:
        bad_row = tl.max(is_bad(q).to(tl.int32), 1)
        q = tl.where(bad_row[:, None] > 0, 0.0, q)
    K += b * s_kb + (h // G) * s_kh
    V += b * s_vb + (h // G) * s_vh
    Columns += b * s_fb
    Dense += b * s_db + h * s_dh
    Diagonals += b * s_gb + h * s_gh
    Bad += (b * (H // G) + h // G) * S
    f32 = tl.float32
    m, l = tl.full([BM], float("-inf"), f32), tl.zeros([BM], f32)  # noqa: E741
    acc, sums = tl.zeros([BM, DV if VALUES else 16], f32), tl.zeros([BM, NC if NC > 0 else 16], f32)
    none = tl.zeros([BM], tl.int32)
    state = (m, l, acc, tl.zeros([BM], f32), tl.zeros([BM], f32), sums, none, none - 1, none)
    if MAP:  # BM is the map's 64: one row of it
        line = (b * s_mb + h * s_mh + tile_q).to(tl.int64)
        lo, hi = none, none
        for n in range(0, tl.load(Counts + line)):
            tile = tl.load(Order + line * NK + n).to(tl.int64)
            slot = tl.load(Index + line * NK + tile) - 2
            state = _tile(q, K, V, Columns, Bits, Dense, Diagonals, Bad, slot, tile, rows, lo, hi, state, s_k, s_v, s_dt, s_ds, scale, softcap, T, S, True, MAP, STATISTICS, NC, DENSE, DIAGONALS, CAP, CAREFUL, VALUES, DK, DV, D, VD)  # noqa: E501  # fmt: skip
    else:
        lo, hi = interval(rows, b, S, low, high, Low, High, Start, Stop, s_low, s_high, s_start, s_stop, WHICH)
        edges = _ranges(lo, hi, alive, S)
        for part in tl.static_range(3):  # tiles that some rows attend in part, whole tiles, and again some in part
            for tile in range(edges[part], edges[part + 1]):
                state = _tile(q, K, V, Columns, Bits, Dense, Diagonals, Bad, 0, tile, rows, lo, hi, state, s_k, s_v, s_dt, s_ds, scale, softcap, T, S, part != 1, MAP, STATISTICS, NC, DENSE, DIAGONALS, CAP, CAREFUL, VALUES, DK, DV, D, VD)  # noqa: E501  # fmt: skip
    m, l, acc, plogp, distance, sums, keys, top_key, met = state  # noqa: E741
    sums *= 1.0 / up_of(V.dtype.element_ty)
    acc *= 1.0 / up_of(V.dtype.element_ty)
    if STATISTICS and not (MAP or DENSE):
        keys = tl.maximum(hi - lo, 0)
    empty = (m == float("-inf")) & (l == 0.0)
    total, top, escaped = l, tl.where(empty, 0.0, m), tl.zeros([BM], f32)
    if SINK:
        sink = tl.load(Sinks + h) * LOG2E
        both = tl.maximum(top, sink)
        shrink = tl.exp2(top - both)
        acc, l, sums, distance = acc * shrink[:, None], l * shrink, sums * shrink[:, None], distance * shrink  # noqa: E741
        plogp = shrink * (plogp + total * (top - both))
        escaped = tl.exp2(sink - both)
        plogp += tl.where(escaped > 0.0, escaped * (sink - both), 0.0)
        total, top = l + escaped, both
    spoiled = (met > 0) | ((bad_row > 0) & (empty == 0))
    total = tl.where(empty, 1.0, tl.where(spoiled, float("nan"), total))
    at = bh.to(tl.int64) * T + rows
    if VALUES:
        to = Out + b * s_ob + h * s_oh + rows[:, None].to(tl.int64) * s_o + dv[None, :]
        tl.store(to, (acc / total[:, None]).to(Out.dtype.element_ty), mask=alive[:, None] & (dv < VD)[None, :])
    tl.store(Lse + at, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2), mask=alive)
    if STATISTICS:
        escaped = tl.where(empty, 0.0, escaped / total)
        _write_statistics(Floats, Ints, Sums, b, h, rows, at, alive, empty, m, top, l, total, escaped, plogp, distance, sums, keys, top_key, B, H, T, BINS, USED, NC)  # noqa: E501  # fmt: skip
