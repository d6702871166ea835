"""Functions that torch's compiler calls without tracing them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)
REASON = "it reads or changes a key-value cache, which is a Python object"


def outside_graphs(function: FunctionT, reason: str = REASON) -> FunctionT:
    """Make torch.compile call a function without tracing it: the graph breaks before it and continues after it.

    Like `torch.compiler.disable`, but without an extra Python frame per call, and without the import of
    `torch._dynamo`, which takes 1 s and 70 MB.

    Args:
        function: a function written in Python.
        reason: why it is not traced, for the messages of torch.compile.

    Returns:
        The function itself.

    Example:
        >>> @outside_graphs
        ... def f(x):
        ...     return len(x)
        >>> f([3, 4])
        2
    """
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason  # for calls from a traced function
    frames = torch._C._dynamo.eval_frame  # for calls from an untraced function
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def methods_outside_graphs(cls: ClassT, traced: Collection[str] = ()) -> ClassT:
    """Make torch.compile call all methods and properties of a class without tracing, except the names in `traced`."""
    for name, member in vars(cls).items():
        accessors = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for function in accessors:
            if isinstance(function, FunctionType) and name not in traced:
                outside_graphs(function)
    return cls
