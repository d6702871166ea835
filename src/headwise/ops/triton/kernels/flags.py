"""Which keys are NaN or infinite, found in one pass, so that the host need not wait to know it."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .tile import SIDE, is_bad


@triton.jit
def _bad_rows(X, rows, n, s_x, D: tl.constexpr, DK: tl.constexpr):
    d = tl.arange(0, DK)
    inside = (rows < n)[:, None] & (d < D)[None, :]
    x = tl.load(X + rows[:, None].to(tl.int64) * s_x + d[None, :], mask=inside, other=0.0)
    return tl.max(is_bad(x).to(tl.int32), 1)


@triton.jit
def flags(
    Q, K, V, Bad, Any, s_qb, s_qh, s_q, s_kb, s_kh, s_k, s_vb, s_vh, s_v, B, H, KH, T, S, NK, NQ,
    VALUES: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """64 keys or 64 queries of one head. Any becomes 1 where one of them is bad; all that write it write 1."""
    pid = tl.program_id(0)
    if pid < B * KH * NK:
        bh, rows = pid // NK, (pid % NK) * SIDE + tl.arange(0, SIDE)
        b, h = (bh // KH).to(tl.int64), (bh % KH).to(tl.int64)
        bad = _bad_rows(K + b * s_kb + h * s_kh, rows, S, s_k, D, DK)
        if VALUES:
            bad = tl.maximum(bad, _bad_rows(V + b * s_vb + h * s_vh, rows, S, s_v, VD, DV))
        tl.store(Bad + bh.to(tl.int64) * S + rows, bad.to(tl.uint8), mask=rows < S)
    else:
        bh, rows = (pid - B * KH * NK) // NQ, ((pid - B * KH * NK) % NQ) * SIDE + tl.arange(0, SIDE)
        b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
        bad = _bad_rows(Q + b * s_qb + h * s_qh, rows, T, s_q, D, DK)
    if tl.max(bad) > 0:
        tl.store(Any, 1)
