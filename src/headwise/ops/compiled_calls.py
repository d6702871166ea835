"""What torch's compiler is to call as it is and never to trace."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)
REASON = "it reads or changes a key-value cache, which is a Python object"


def outside_graphs(function: FunctionT) -> FunctionT:
    """Make torch.compile call a function as it is: the graph ends before it and another begins behind it.

    As `torch.compiler.disable`, but without a frame of its own at every call, and without the import of
    `torch._dynamo`, which takes a second and 70 MB.

    Args:
        function: a function written in Python.

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
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, REASON  # where a traced function calls it
    frames = torch._C._dynamo.eval_frame  # where an untraced one does
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def methods_outside_graphs(cls: ClassT, traced: Collection[str] = ()) -> ClassT:
    """Make torch.compile call all methods and properties of a class as they are, but for the ones to be traced."""
    for name, member in vars(cls).items():
        accessors = (member.fget, member.fset) if isinstance(member, property) else (member,)
        for function in accessors:
            if isinstance(function, FunctionType) and name not in traced:
                outside_graphs(function)
    return cls
