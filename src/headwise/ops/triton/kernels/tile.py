"""What the Triton kernels share: the keys of a row as an interval, bounded scores, bad numbers, biases, maps."""

# mypy: ignore-errors
# Kernels take many arguments, named as pointers are in Triton: capital letters for tensors.

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
FARTHEST = tl.constexpr(1 << 30)
SIDE = tl.constexpr(64)  # keys of a tile, and rows of a tile of a map


@triton.jit
def _near(x):
    """Return a place as int32, no farther away than `FARTHEST`."""
    return tl.minimum(tl.maximum(x.to(tl.int64), -FARTHEST), FARTHEST).to(tl.int32)


@triton.jit
def interval(rows, b, S, low, high, Low, High, Start, Stop, s_low, s_high, s_start, s_stop, WHICH: tl.constexpr):
    """Return the keys lo <= j < hi of each row, int32, from numbers and tensors with a number a row of the batch."""
    if WHICH & 1:
        low = _near(_near(tl.load(Low + b * s_low)).to(tl.int64) + low)
    if WHICH & 2:
        high = _near(_near(tl.load(High + b * s_high)).to(tl.int64) + high)
    lo, hi = tl.maximum(rows + low, 0), tl.minimum(rows + high, S)
    if WHICH & 4:
        lo = tl.maximum(lo, _near(tl.load(Start + b * s_start)))
    if WHICH & 8:
        hi = tl.minimum(hi, _near(tl.load(Stop + b * s_stop)))
    return tl.minimum(lo, S), tl.minimum(tl.maximum(hi, 0), S)


@triton.jit
def softcapped(s, cap):
    """Cap * tanh(s / cap). Near 0 by a polynomial (Cephes), for there 1 - 2 / (exp + 1) has lost its digits."""
    x = s / cap
    z = x * x
    near = ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            - 3.33332819422e-1) * z * x + x  # fmt: skip
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return cap * tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def is_bad(x):
    """Where a number is NaN or infinite."""
    return (tl.abs(x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def added_to(s, rows, cols, inside, Dense, Diagonals, s_dt, s_ds, T, DENSE: tl.constexpr, DIAGONALS: tl.constexpr):
    """Scores with the biases: a dense tensor, and a table with a number for each diagonal j - i."""
    if DENSE:
        at = Dense + rows[:, None].to(tl.int64) * s_dt + cols[None, :].to(tl.int64) * s_ds
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if DIAGONALS:
        s += tl.load(Diagonals + (T - 1 + cols[None, :] - rows[:, None]), mask=inside, other=0.0)
    return s


@triton.jit
def bits_of(Bits, slot, rows, cols):
    """Which pairs of a tile a map allows; a slot below 0 is a tile in which it allows all."""
    places = slot.to(tl.int64) * SIDE + rows % SIDE
    words = tl.load(Bits + places, mask=places >= 0, other=-1)
    return ((words[:, None] >> (cols % SIDE)[None, :].to(tl.int64)) & 1) != 0
