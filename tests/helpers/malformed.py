"""For the test of malformed calls: what takes the place of an argument, and what a refusal must be.

A target is a public function and arguments that fit it. One argument is replaced by a thing of the wrong type, dtype,
device, rank, size, layout or memory; then the call either works, where the thing serves after all, or raises TypeError
or ValueError from a `raise` of headwise's own, in words of its own.
"""

from __future__ import annotations

import ast
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import headwise
from headwise.cache import StaticCache, quantize

PACKAGE = Path(headwise.__file__).parent
Call = tuple[Callable[..., Any], dict[str, Any]]


def resized(x: Tensor, part: float) -> Tensor:
    """The tensor with a part of its memory taken away."""
    x = x.clone(memory_format=torch.contiguous_format)
    x.untyped_storage().resize_(int(x.untyped_storage().nbytes() * part))
    return x


def prototype(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Kinds of tensor at whose making torch warns."""

    def quietly(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(x)

    return quietly


# What becomes of a tensor; None where a kind has no such form.
NO_TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "csr": prototype(lambda x: x.to_sparse_csr()),
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "quantised by torch": prototype(lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)),
    "ragged": prototype(lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged)),
    "ragged of old": prototype(lambda x: torch.nested.nested_tensor([x[0], x[0]])),
    "freed": lambda x: resized(x, 0),
    "half freed": lambda x: resized(x, 0.5),
    "complex": lambda x: x.to(torch.complex64),
    "array": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
}
OTHER_TENSOR: dict[str, Callable[[Tensor], Any]] = {
    "on meta": lambda x: x.to("meta"),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "int64": lambda x: x.long(),
    "int8": lambda x: x.to(torch.int8),
    "uint16": lambda x: x.abs().to(torch.uint16),
    "bool": lambda x: x.bool(),
    "an axis less": lambda x: x[0],
    "an axis more": lambda x: x[None],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "rows twice": lambda x: torch.cat([x, x]),
    "columns twice": lambda x: torch.cat([x, x], -1),
    "one number": lambda x: x.flatten()[0],
    "NaN": lambda x: torch.full_like(x, math.nan if x.is_floating_point() else 99),
    "-1": lambda x: torch.full_like(x, -1 if x.is_floating_point() else -99),
    "huge": lambda x: torch.full_like(x, 1e30 if x.is_floating_point() else 2**62),
}

# What takes the place of any argument.
THINGS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "1.5": lambda: 1.5,
    "2.0": lambda: 2.0,
    "-1": lambda: -1,
    "0": lambda: 0,
    "3": lambda: 3,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,  # has more digits than Python writes
    "2**63": lambda: 2**63,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "np.float32": lambda: np.float32(0.5),
    "np.float32 nan": lambda: np.float32("nan"),
    "np.int64": lambda: np.int64(2),
    "np.bool": lambda: np.bool_(True),
    "1j": lambda: 1j,
    "text": lambda: "text",
    "no text": lambda: "",
    "bytes": lambda: b"x",
    "[]": lambda: [],
    "[1, 2]": lambda: [1, 2],
    "[0.9, 1.9]": lambda: [0.9, 1.9],
    "[True, False]": lambda: [True, False],
    "[[1]]": lambda: [[1]],
    "['a']": lambda: ["a"],
    "[None]": lambda: [None],
    "[10**400]": lambda: [10**400],
    "()": lambda: (),
    "(None, None)": lambda: (None, None),
    "{}": lambda: {},
    "{1: 2}": lambda: {1: 2},
    "{'a': 1}": lambda: {"a": 1},
    "{1}": lambda: {1},
    "range": lambda: range(2),
    "generator": lambda: (n for n in (1, 2)),
    "slice": lambda: slice(0, 2),
    "object": object,
    "ellipsis": lambda: ...,
    "function": lambda: lambda *args, **options: None,
    "tensor 2": lambda: torch.tensor(2),
    "tensor 2.0": lambda: torch.tensor(2.0),
    "tensor [1, 2]": lambda: torch.tensor([1, 2]),
    "tensor [1.0, 2.0]": lambda: torch.tensor([1.0, 2.0]),
    "tensor of bools": lambda: torch.tensor([True, False]),
    "array of floats": lambda: np.ones((2, 2)),
    "mask": headwise.causal,
    "cache": lambda: StaticCache(2, 3, 11, 13, capacity=9),
    "int8 keys": lambda: quantize(torch.ones(2, 3, 7, 11)),
    "module": lambda: nn.Linear(2, 2),
    "device": lambda: torch.device("cpu"),
    "dtype": lambda: torch.int32,
}

NUMBERS = {"1.5", "2.0", "-1", "0", "3", "2**63", "np.float32", "np.int64"}
INTS = {"[]", "()", "[1, 2]", "range", "generator", "tensor [1, 2]"}
# What may serve after all, by the type of the argument it replaces; a call says what else it takes. NaN and infinity,
# bools for numbers and numbers for bools, fractions for integers, and texts for lists never serve.
SERVES: dict[type, set[str]] = {
    bool: {"True", "False"},
    int: {"None", "0", "3"},
    float: {"None", *NUMBERS},
    str: {"text", "no text"},
    list: {"None", *INTS},
    tuple: {"None", *INTS},
    dict: {"None", "{}"},
    torch.dtype: set(),
    torch.device: {"None", "device"},
    headwise.Mask: {"None", "mask"},
    Tensor: {"None", *OTHER_TENSOR, *(name for name in THINGS if name.startswith("tensor"))},
}


def replacements(good: Any) -> dict[str, Callable[[], Any]]:
    """What may take the place of an argument, by name."""
    things = dict(THINGS)
    if callable(good):  # another function may be called, and says itself what it does not take
        del things["function"], things["module"]
    if isinstance(good, Tensor):
        kinds = {**NO_TENSOR, **OTHER_TENSOR}
        things |= {f"tensor, {name}": functools.partial(make, good) for name, make in kinds.items()}
    return things


def may_serve(name: str, good: Any, more: set[str]) -> bool:
    """Whether a call with this in place of an argument may give a result."""
    kind = next((kind for kind in SERVES if isinstance(good, kind)), None)
    allowed = {"None"} | more | (SERVES[kind] if kind is not None else set())
    return name.removeprefix("tensor, ") in allowed


@functools.cache
def raises_of(path: str) -> frozenset[int]:
    """The lines at which a file's `raise` statements begin."""
    tree = ast.parse(Path(path).read_text("utf8"))
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None)


def fault_of(error: BaseException) -> str | None:
    """What is wrong with a refusal; None where it is TypeError or ValueError, raised by headwise, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    path, line = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    description = f"{type(error).__name__} at {Path(path).name}:{line}: {str(error)[:200]}"
    if type(error) not in (TypeError, ValueError):
        return description
    if not Path(path).is_relative_to(PACKAGE) or line not in raises_of(path):
        return f"in the words of another: {description}"
    return f"long, or in several lines: {description}" if len(str(error)) > 900 or "\n" in str(error) else None
