"""The kernel of `append`: new tokens go to their places in a cache, in int8 with a scale for each token and head."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .tile import is_bad

MOST = tl.constexpr(127.0)


@triton.jit
def _put(X, To, Scales, at, to, at_scale, d, D: tl.constexpr, INT8: tl.constexpr):
    x = tl.load(X + at + d, mask=d < D, other=0.0)
    if INT8:  # as `headwise.cache.quantize`: the scale is max |x| / 127, and NaN for a token that is not finite
        x = x.to(tl.float32)
        bad = tl.max(is_bad(x).to(tl.int32), 0) > 0
        scale = tl.max(tl.abs(tl.where(bad, 0.0, x)), 0) / MOST
        unit = tl.div_rn(tl.where(bad, 0.0, x), tl.zeros_like(x) + tl.where(scale > 0.0, scale, 1.0))
        # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
        small = tl.minimum(tl.maximum((unit + 12582912.0) - 12582912.0, -MOST), MOST)
        tl.store(To + to + d, small.to(tl.int8), mask=d < D)
        tl.store(Scales + at_scale, tl.where(bad, float("nan"), scale))
    else:
        tl.store(To + to + d, x.to(To.dtype.element_ty), mask=d < D)


@triton.jit
def append(
    Key, Value, K, V, KS, VS, Table, Columns, s_xb, s_xh, s_x, s_yb, s_yh, s_y, s_kb, s_kh, s_k, s_vb, s_vh, s_v,
    s_ksb, s_ksh, s_ks, s_vsb, s_vsh, s_vs, s_t, s_c, size, column, first_row, KH, T,
    PAGED: tl.constexpr, PER_ROW: tl.constexpr, INT8: tl.constexpr, VALUES: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, D: tl.constexpr, VD: tl.constexpr,
):  # fmt: skip
    """One token of one head: token t of row b goes to the column of the row, plus t."""
    pid = tl.program_id(0)
    t, h, b = pid % T, (pid // T % KH).to(tl.int64), (pid // T // KH).to(tl.int64)
    place = column + t
    if PER_ROW:
        place = tl.load(Columns + b * s_c) + t
    row = b + first_row
    if PAGED:
        row = tl.load(Table + row * s_t + place // size)
        place = place % size
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    _put(Key, K, KS, b * s_xb + h * s_xh + t * s_x, row * s_kb + h * s_kh + place * s_k, row * s_ksb + h * s_ksh + place * s_ks, dk, D, INT8)  # noqa: E501  # fmt: skip
    if VALUES:
        _put(Value, V, VS, b * s_yb + h * s_yh + t * s_y, row * s_vb + h * s_vh + place * s_v, row * s_vsb + h * s_vsh + place * s_vs, dv, VD, INT8)  # noqa: E501  # fmt: skip
