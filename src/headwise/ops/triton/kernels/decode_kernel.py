"""Kernels of `decode`: few queries on many keys, which are dense, in pages, in int8, or values as well (MLA).

A program takes one key-value head, the query heads that share it as rows of one product, and 256 keys. So keys are read
once, and where a row's keys are split depends on nothing else in the batch. `combine` joins the splits.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .tile import LN2, LOG2E, interval, is_bad, softcapped

SPLIT = tl.constexpr(256)
JOINED = tl.constexpr(16)  # splits that are joined at a time, whatever their number


@triton.jit
def _good_values(v, at_scales, inside, INT8: tl.constexpr):
    """Values without NaN and Inf, their scales, and which keys have a bad one."""
    vs = tl.full(inside.shape, 1.0, tl.float32)
    if INT8:
        vs = tl.load(at_scales, mask=inside, other=0.0)
        bad = is_bad(vs)
        vs = tl.where(bad, 0.0, vs)
    else:
        bad_at = is_bad(v)
        bad = tl.max(bad_at.to(tl.int32), 1) > 0
        v = tl.where(bad_at, 0.0, v)
    return v, vs, bad


@triton.jit
def _biased(s, seen, at_dense, at_diagonals, DENSE: tl.constexpr, DIAGONALS: tl.constexpr):
    """Scores with the biases added, and the pairs that they leave allowed."""
    if DENSE:
        s += tl.load(at_dense, mask=seen, other=0.0).to(tl.float32)
        seen = seen & (s != float("-inf"))
    if DIAGONALS:
        s += tl.load(at_diagonals, mask=seen, other=0.0)
    return s, seen


@triton.jit
def split(
    Q, K, V, KS, VS, Table, Part, PartLse, Dense, Diagonals, Low, High, Start, Stop,
    s_low, s_high, s_start, s_stop, low, high, always, s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v,
    s_ksb, s_ksh, s_ks, s_vsb, s_vsh, s_vs, s_t, size, s_db, s_dh, s_dt, s_ds, s_gb, s_gh,
    KH, G, T, S, SPLITS, BLOCKS, scale, softcap,
    PAGED: tl.constexpr, INT8: tl.constexpr, SHARED: tl.constexpr, WHICH: tl.constexpr, DENSE: tl.constexpr,
    DIAGONALS: tl.constexpr, CAP: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    D: tl.constexpr, VD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one key-value head; BM rows, each a query head of the group and a query."""
    n, place = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    block, bk = place % BLOCKS, place // BLOCKS
    b, kh = (bk // KH).to(tl.int64), (bk % KH).to(tl.int64)
    r = block * BM + tl.arange(0, BM)
    t, h = r % T, kh * G + r // T
    alive = r < G * T
    d1, d2, dv = tl.arange(0, D1), D1 + tl.arange(0, D2 if D2 > 0 else 16), tl.arange(0, DV)
    at_q = Q + b * s_qb + h[:, None] * s_qh + t[:, None] * s_q
    q1 = tl.load(at_q + d1[None, :], mask=alive[:, None] & (d1 < D)[None, :], other=0.0)
    if D2 > 0:
        q2 = tl.load(at_q + d2[None, :], mask=alive[:, None] & (d2 < D)[None, :], other=0.0)
    lo, hi = interval(t, b, S, low, high, Low, High, Start, Stop, s_low, s_high, s_start, s_stop, WHICH)
    begin, end = n * SPLIT, tl.minimum((n + 1) * SPLIT, tl.max(tl.where(alive, hi, 0)))
    nearest = tl.min(tl.where(alive, lo, S)) // BN * BN
    begin = tl.where(begin < always, begin, tl.maximum(begin, nearest))
    f32 = tl.float32
    m, l, acc = tl.full([BM], float("-inf"), f32), tl.zeros([BM], f32), tl.zeros([BM, DV], f32)  # noqa: E741
    met = tl.zeros([BM], tl.int32)
    for j0 in range(begin, end, BN):
        j = j0 + tl.arange(0, BN)
        inside = j < end
        if PAGED:  # a tile lies within one page
            page = tl.load(Table + b * s_t + j0 // size).to(tl.int64)
            at_k, at_v, at_ks, at_vs = page * s_kb, page * s_vb, page * s_ksb, page * s_vsb
            row = (j0 % size + tl.arange(0, BN)).to(tl.int64)
        else:
            at_k, at_v, at_ks, at_vs = b * s_kb, b * s_vb, b * s_ksb, b * s_vsb
            row = j.to(tl.int64)
        at_k = K + at_k + kh * s_kh + row[:, None] * s_k
        k = tl.load(at_k + d1[None, :], mask=inside[:, None] & (d1 < D)[None, :], other=0).to(q1.dtype)
        s = tl.dot(q1, tl.trans(k), input_precision="tf32x3")
        if D2 > 0:
            k2 = tl.load(at_k + d2[None, :], mask=inside[:, None] & (d2 < D)[None, :], other=0).to(q1.dtype)
            s += tl.dot(q2, tl.trans(k2), input_precision="tf32x3")
        if INT8:  # the numbers are exact in every dtype of a query, and scales go to scores and weights
            s *= tl.load(KS + at_ks + kh * s_ksh + row * s_ks, mask=inside, other=0.0)[None, :]
        seen = alive[:, None] & inside[None, :] & (j[None, :] < hi[:, None])
        seen = seen & ((j[None, :] >= lo[:, None]) | (j < always)[None, :])
        spoiled = is_bad(s)
        s *= scale
        if CAP:
            s = softcapped(s, softcap)
        at_d = Dense + b * s_db + h[:, None] * s_dh + t[:, None] * s_dt + j[None, :].to(tl.int64) * s_ds
        at_g = Diagonals + b * s_gb + h[:, None] * s_gh + (T - 1 + j[None, :] - t[:, None])
        s, seen = _biased(s, seen, at_d, at_g, DENSE, DIAGONALS)
        s = tl.where(seen, s * LOG2E, float("-inf"))
        v = k  # where values are the first columns of the keys
        if not SHARED:
            at_v = V + at_v + kh * s_vh + row[:, None] * s_v + dv[None, :]
            v = tl.load(at_v, mask=inside[:, None] & (dv < VD)[None, :], other=0).to(q1.dtype)
        at_vs = VS + at_vs + kh * s_vsh + row * s_vs
        v, vs, bad = _good_values(v, at_vs, inside, INT8)
        met = tl.maximum(met, tl.max((seen & (spoiled | bad[None, :])).to(tl.int32), 1))
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, alpha = tl.exp2(s - safe[:, None]), tl.exp2(m - safe)
        l = l * alpha + tl.sum(p, 1)  # noqa: E741
        if INT8:
            p *= vs[None, :]
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        m = m_new
    out = ((b * KH * G + h) * T + t) * SPLITS + n
    to = Part + out[:, None] * VD + dv[None, :]
    some = tl.where(l > 0, l, 1.0)
    tl.store(to, acc / some[:, None], mask=alive[:, None] & (dv < VD)[None, :])
    lse = tl.where(met > 0, float("nan"), tl.where(l > 0, m + tl.log2(some), float("-inf")))
    tl.store(PartLse + out, lse, mask=alive)


@triton.jit
def combine(
    Part, PartLse, Sinks, Out, Lse, s_ob, s_oh, s_o, H, T, SPLITS,
    SINK: tl.constexpr, DV: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """One row: its splits, weighted by their sums, and the sink. Splits without keys add nothing, not even a bit."""
    row, dv, n0 = tl.program_id(0).to(tl.int64), tl.arange(0, DV), tl.arange(0, JOINED)
    top, nan = float("-inf"), 0
    for first in range(0, SPLITS, JOINED):
        n = first + n0
        lse = tl.load(PartLse + row * SPLITS + n, mask=n < SPLITS, other=float("-inf"))
        nan = tl.maximum(nan, tl.max((lse != lse).to(tl.int32), 0))
        top = tl.maximum(top, tl.max(tl.where(lse != lse, float("-inf"), lse), 0))
    empty = (top == float("-inf")) & (nan == 0)
    t, h, b = row % T, (row // T) % H, row // T // H
    sink = float("-inf")
    if SINK:
        sink = tl.load(Sinks + h) * LOG2E
    safe = tl.maximum(top, sink)
    safe = tl.where(safe == float("-inf"), 0.0, safe)
    total, acc = tl.exp2(sink - safe), tl.zeros([DV], tl.float32)
    for first in range(0, SPLITS, JOINED):
        n = first + n0
        lse = tl.load(PartLse + row * SPLITS + n, mask=n < SPLITS, other=float("-inf"))
        w = tl.exp2(lse - safe)
        at = Part + (row * SPLITS + n[:, None]) * VD + dv[None, :]
        x = tl.load(at, mask=(n < SPLITS)[:, None] & (dv < VD)[None, :], other=0.0)
        total += tl.sum(w, 0)
        acc += tl.sum(x * w[:, None], 0)
    total = tl.where(nan > 0, float("nan"), tl.where(empty, 1.0, total))
    out = tl.where(empty, 0.0, acc / total)
    tl.store(Out + b * s_ob + h * s_oh + t * s_o + dv, out.to(Out.dtype.element_ty), mask=dv < VD)
    tl.store(Lse + row, tl.where(empty, float("-inf"), (safe + tl.log2(total)) * LN2))
