"""Comparison of results: error budgets against the exact result, and bitwise equality."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.shapes import DTYPES, INTEGERS, describe
from headwise.shapes.arguments import check_dtype, check_numbers, check_tensor, check_texts, is_finite, shown


@dataclass(frozen=True)
class Accuracy:
    """The largest absolute errors against float64, and the budget. Prints in one line.

    Attributes:
        ours: Error of the result under test.
        naive: Error of the plain PyTorch implementation (the largest, if several).
        floor: Error of rounding the exact result to the dtype.
        ulp: Spacing of the dtype at the largest entry; the budget includes it.
        budget: Upper limit for `ours`.
        where: Index of the entry with the largest error in the result under test.
    """

    ours: float
    naive: float
    floor: float
    ulp: float
    budget: float
    where: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"ours {self.ours:.3e}, naive {self.naive:.3e}, rounding floor {self.floor:.3e}; "
            f"budget {self.budget:.3e} (with 1 ulp = {self.ulp:.3e}); worst at {self.where}"
        )


def ulp(largest: float, dtype: torch.dtype) -> float:
    """Return the spacing of `dtype` just above `largest`; 0 for 0. Raises ValueError unless it is a finite number.

    >>> ulp(1.0, torch.float32) == 2**-23, ulp(3.0, torch.bfloat16) == 2**-6, ulp(0.0, torch.float32)
    (True, True, 0.0)
    """
    if not isinstance(largest, (int, float)) or isinstance(largest, bool) or not is_finite(largest):
        raise ValueError(f"largest is a finite number; got {shown(largest)}")
    check_dtype(dtype)
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0


def accuracy(
    ours: Float[Tensor, "*shape"],
    exact: Float[Tensor, "*shape"],
    naive: Tensor | Sequence[Tensor],
    *,
    values: Float[Tensor, "..."] | None = None,
    factor: float | None = None,
) -> Accuracy:
    """Compute the errors of `ours` and `naive` (the largest, if several) and the budget of `assert_close_like_torch`.

    Raises TypeError for an argument that is not a tensor, ValueError for shapes or dtypes that differ, an `exact` that
    is not float64, or a `naive` whose error is not finite.

    >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> accuracy(exact.float(), exact, exact.float()).ours
    0.0
    """
    naives: list[Any] = list(naive) if isinstance(naive, (list, tuple)) else [naive]
    if not naives:
        raise ValueError("naive is one tensor or several; got none")
    for name, x in (("ours", ours), ("exact", exact), *(("naive", x) for x in naives)):
        _check_readable(name, x)
    if values is not None:
        _check_readable("values", values)
    if factor is not None:
        check_numbers(0.0, factor=factor)
    if {ours.shape, *(x.shape for x in naives)} != {exact.shape}:
        raise ValueError(f"shapes differ: ours {ours.shape}, exact {exact.shape}, naive {[x.shape for x in naives]}")
    if {ours.dtype} != {x.dtype for x in naives} or exact.dtype != torch.float64:
        raise ValueError(
            f"ours, naive share a dtype, exact is float64; got {ours.dtype}, {naives[0].dtype}, {exact.dtype}"
        )
    dtype, half = ours.dtype, ours.dtype in (torch.float16, torch.bfloat16)
    if exact.numel() == 0:
        return Accuracy(0.0, 0.0, 0.0, 0.0, 0.0, ())
    errors = _errors(ours, exact)
    error_of_naive = max(float(_errors(x, exact).max()) for x in naives)
    floor = float(_errors(exact.to(dtype), exact).max())
    if not math.isfinite(error_of_naive):
        raise ValueError(
            f"naive's error is {error_of_naive}, so there is no budget; give inputs for which it is finite"
        )
    finite = (exact if values is None else values.detach().double()).abs()
    spacing = ulp(float(torch.where(finite.isfinite(), finite, 0).max()) if finite.numel() else 0.0, dtype)
    budget = factor * error_of_naive if factor else 1.5 * floor if half else 1.25 * error_of_naive
    place = tuple(int(n) for n in torch.unravel_index(errors.argmax(), errors.shape))
    return Accuracy(float(errors.max()), error_of_naive, floor, spacing, budget + spacing, place)


def assert_close_like_torch(
    ours: Float[Tensor, "*shape"],
    exact: Float[Tensor, "*shape"],
    naive: Tensor | Sequence[Tensor],
    *,
    values: Float[Tensor, "..."] | None = None,
    factor: float | None = None,
    what: str = "output",
) -> Accuracy:
    """Check that the error of `ours` against the exact result is within a budget derived from the data and the dtype.

    The budget for the largest absolute error is one ulp of the largest entry of `values` (of `exact` if None), plus:

    - float32 and float64: 1.25 times the error of `naive`, plain PyTorch in that dtype (the largest of several);
    - float16 and bfloat16: 1.5 times the error of rounding the exact result;
    - with a `factor`: that many times the error of `naive`, in every dtype; use 2 for gradients.

    NaN or infinity counts as an infinite error unless the exact result has the same. The error message contains the
    numbers that are returned. Raises AssertionError if the check fails, TypeError or ValueError for invalid arguments.

    >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> assert_close_like_torch(exact.float() + 1e-3, exact, exact.float())   # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: output: ours 1.000e-03, naive 0.000e+00, rounding floor 0.000e+00; budget 2.384e-07 (...
    """
    check_texts(what=what)
    seen = accuracy(ours, exact, naive, values=values, factor=factor)
    if not seen.ours <= seen.budget:
        raise AssertionError(f"{what}: {seen}")
    return seen


def _check_readable(name: str, x: Tensor, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    check_tensor(name, x)
    if x.dtype not in dtypes or x.is_meta:
        raise ValueError(f"{name} is a tensor of numbers that can be read; got {describe(x)}")


def _errors(approximate: Tensor, exact: Tensor) -> Tensor:
    """Compute |approximate - exact| in float64: 0 for equal infinities and for two NaN, infinite for any other NaN."""
    left, right = approximate.detach().double(), exact.detach()
    off = (left - right).abs()
    if bool(off.isfinite().all()):
        return off
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, off.nan_to_num(nan=math.inf, posinf=math.inf))


def assert_same_bits(ours: Tensor, other: Tensor, *, what: str = "output") -> None:
    """Raise AssertionError unless shape, dtype and all bits are equal (any two NaN are equal; 0.0 and -0.0 differ).

    >>> assert_same_bits(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    Traceback (most recent call last):
    AssertionError: output: 1 of 2 entries differ in their bits, first at (0,): 0.0 and -0.0
    """
    check_texts(what=what)
    for name, x in (("ours", ours), ("other", other)):
        _check_readable(name, x, (*DTYPES, *INTEGERS, torch.bool))
    if ours.shape != other.shape or ours.dtype != other.dtype:
        raise AssertionError(f"{what}: {ours.dtype} {tuple(ours.shape)} and {other.dtype} {tuple(other.shape)}")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    left, right = (x.detach().contiguous() for x in (ours, other))
    if torch.equal(left.view(bits), right.view(bits)):
        return
    differ = left.view(bits) != right.view(bits)
    if ours.dtype.is_floating_point:
        differ = differ & ~(left.isnan() & right.isnan())
    if bool(differ.any()):
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} entries differ in their bits, "
            f"first at {first}: {left[first].item()} and {right[first].item()}"
        )
