"""Checks of arguments by kind (size, number, flag, tensor, ...), and their error messages.

Each check raises TypeError for another kind, and ValueError for a value of the right kind that is not allowed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST = 2**31 - 1  # the maximum of sizes and positions
FAR = 1 << 40  # greater than any key position; sums of such positions stay within int64


def describe(tensor: Tensor) -> str:
    """Return dtype, shape and device in one short phrase, for error messages."""
    shape = f"({tensor.ndim} axes, ragged)" if tensor.is_nested else tuple(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape} on {tensor.device}"


def shown(value: object) -> str:
    """Return a value as short text on one line, for error messages."""
    if isinstance(value, Tensor):
        return f"a tensor, {describe(value)}"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print very long integers
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value.item() if isinstance(value, Real) and hasattr(value, "item") else value)
    except Exception:  # an object whose repr fails
        text = ""
    plain = 0 < len(text) <= 60 and "\n" not in text and not text.startswith("<")
    return text if plain else f"a value of type {type(value).__name__}"


def check_dense(name: str, tensor: Tensor) -> None:
    """Check that a tensor's data is in memory with strides: it is not sparse, packed, ragged or freed."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "ragged" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").lstrip("_")
        way = "torch.nested.to_padded_tensor, and a mask for the padding" if tensor.is_nested else ".to_dense()"
        raise ValueError(f"{name} is a dense tensor; got a {kind} one; make it dense with {way}")
    if torch.compiler.is_compiling() or type(tensor) not in (Tensor, Parameter) or not tensor.numel():
        return
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((n - 1) * step for n, step in steps)
    try:
        there, needed = tensor.untyped_storage().nbytes(), (last + 1) * tensor.element_size()
    except NotImplementedError:  # inside torch.func a tensor has no storage of its own
        return
    if there < needed:
        raise ValueError(
            f"the numbers of {name} are not in memory: {describe(tensor)} needs {needed} bytes, and its storage has "
            f"{there}; was it freed (resize_) while in use?"
        )


def check_tensor(name: str, value: Any, what: str = "a tensor") -> None:
    """Check that a value is a dense tensor; raise TypeError if it is not a tensor."""
    if not isinstance(value, Tensor):
        numbers = isinstance(value, (list, tuple)) or hasattr(value, "__array__")
        way = "; make a tensor of it with torch.as_tensor()" if numbers else ""
        raise TypeError(f"{name} is {what}; got {type(value).__name__}{way}")
    check_dense(name, value)


def check_index(what: str, axes: tuple[int, ...] = (), way: str = "", /, **indices: Any) -> None:
    """Check dense integer tensors. `what` describes them; `way` is the remedy for a number of axes not in `axes`."""
    for name, index in indices.items():
        check_tensor(name, index, what)
        if index.dtype not in INTEGERS:
            raise TypeError(f"{name} is {what}; got {describe(index)}; convert with .long()")
    for name, index in indices.items():
        if axes and index.ndim not in axes:
            raise ValueError(f"{name} is {what}; got {describe(index)}; {way}")


def check_counts(least: int = 0, most: int = MOST, /, **counts: Any) -> None:
    """Check that sizes, positions or counts are ints from `least` to `most`."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
            if torch.jit.is_tracing():  # in a trace, sizes are tensors
                raise TypeError(
                    f"{name} is an int; torch.jit.trace and torch.onnx.export(dynamo=False) have tensors for sizes: "
                    "use torch.export, torch.compile or torch.onnx.export(dynamo=True)"
                )
            raise TypeError(f"{name} is an int; got {shown(count)}{_as_int(count)}")
        if count < least:
            raise ValueError(f"{name} is at least {least}; got {shown(count)}")
        # A symbolic size keeps its full range, which torch.export needs. For dynamo (strict=True) it is an int.
        if isinstance(count, int) and not torch.compiler.is_dynamo_compiling() and count > most:
            raise ValueError(f"{name} is at most {most}; got {shown(count)}")


def _as_int(count: Any) -> str:
    """Return the remedy for a whole number that is not an int, such as numpy's, which may overflow."""
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    return f" of type {type(count).__name__}; convert with int()" if whole else ""


def fits(n: int, to: int) -> bool:
    """Return whether an axis of size n broadcasts to size `to`.

    It does not use `in`, for which torch.compile treats a number and a symbol as different.
    """
    return n == 1 or n == to


def is_one_of(shape: Sequence[int], forms: Iterable[Sequence[int]]) -> bool:
    """Return whether a shape is one of `forms`; sizes are compared one by one, for the same reason as in `fits`."""
    return any(len(shape) == len(form) and all(n == m for n, m in zip(shape, form, strict=True)) for form in forms)


def check_span(name: str, span: Any, size: int) -> tuple[int, int]:
    """Return (start, stop) after a check that 0 <= start <= stop <= size."""
    numbers = list(span) if isinstance(span, tuple | list) else []
    if len(numbers) != 2 or not all(_is_whole(n) for n in numbers) or not 0 <= numbers[0] <= numbers[1] <= size:
        raise ValueError(f"{name} is (start, stop) with 0 <= start <= stop <= {size}; got {shown(span)}")
    return int(numbers[0]), int(numbers[1])


def is_finite(number: Any) -> bool:
    """Return whether a real number is finite in float64; True for symbols of torch.compile."""
    try:
        return isinstance(number, (torch.SymFloat, torch.SymInt)) or math.isfinite(number)
    except OverflowError:  # an int that is too large for a float
        return False


def check_numbers(above: float = -math.inf, **numbers: Any) -> None:
    """Check that numbers are finite and greater than a limit."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{name} is a number; got {shown(number)}")
        if not is_finite(number) or not number > above:  # type: ignore[operator]
            more = f" above {above:g}" if above > -math.inf else ""
            raise ValueError(f"{name} is a finite number{more}; got {shown(number)}")


def check_flags(**flags: Any) -> None:
    """Check that flags are True or False; other values, such as 0 and 1, are errors."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is True or False; got {shown(flag)}")


def check_texts(**texts: Any) -> None:
    """Check that values are strings."""
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} is a text; got {shown(text)}")


def check_functions(**functions: Any) -> None:
    """Check that values are callable."""
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} is a function; got {shown(function)}")


def check_paths(**paths: Any) -> None:
    """Check that values are names of files or folders: strings that are not empty, or `pathlib` paths."""
    for name, path in paths.items():
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"{name} is a path, a string or a pathlib.Path; got {shown(path)}")
        if path == "":  # a Path turns an empty name into "."
            raise ValueError(f"{name}: the name is empty; give a file or a folder")


def check_device(device: Any) -> None:
    """Check that a value is a torch.device, a device name, or None."""
    try:
        if device is not None:
            torch.device(device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f'device is a torch.device or its name, such as "cpu" or "cuda:0"; got {shown(device)}'
        ) from None


def check_dtype(dtype: Any, among: Sequence[torch.dtype] = DTYPES) -> None:
    """Check that a value is one of the allowed dtypes."""
    if not isinstance(dtype, torch.dtype) or dtype not in among:
        names = ", ".join(str(x).removeprefix("torch.") for x in among)
        raise ValueError(f"dtype is one of {names}; got {shown(dtype)}")


def whole_numbers(name: str, values: Any) -> list[int]:
    """Return a list of ints from a sequence of ints, or from an integer tensor or array of one axis.

    Raises TypeError for anything else: fractions are not rounded, and True and False are not numbers here.
    """
    rule = f"{name} are whole numbers: a sequence of ints, or an integer tensor of one axis"
    if isinstance(values, Tensor):
        check_dense(name, values)
        if values.dtype not in INTEGERS or values.ndim != 1 or values.is_meta:
            raise TypeError(f"{rule}; got {describe(values)}")
    elif isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{rule}; got {shown(values)}")
    numbers = values.tolist() if hasattr(values, "tolist") else list(values)
    if not isinstance(numbers, list) or not all(_is_whole(n) for n in numbers):
        raise TypeError(f"{rule}; got {shown(values)}")
    if any(not -FAR <= n <= FAR for n in numbers):
        raise ValueError(f"{name} are at most {FAR}; got {shown(values)}")
    return [int(n) for n in numbers]


def real_numbers(name: str, values: Any) -> list[float]:
    """Return a list of finite floats from a sequence of numbers, or from a tensor or array of one axis."""
    rule = f"{name} are finite numbers: a sequence, or a tensor of one axis"
    if isinstance(values, Tensor):
        check_dense(name, values)
        values = (
            values.tolist() if values.ndim == 1 and values.dtype in DTYPES + INTEGERS and not values.is_meta else None
        )
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise TypeError(f"{rule}; got {shown(values)}")
    numbers = list(values)
    if not all(isinstance(n, Real) and not isinstance(n, bool) and is_finite(n) for n in numbers):
        raise ValueError(f"{rule}; got {shown(numbers)}")
    return [float(n) for n in numbers]


def _is_whole(n: object) -> bool:
    if isinstance(n, Tensor):
        return n.ndim == 0 and n.dtype in INTEGERS and not n.is_meta
    return isinstance(n, Integral) and not isinstance(n, bool)
