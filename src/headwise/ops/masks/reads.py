"""Tracking of the inputs of a rule, so that a cached result is used again only if it would be the same.

The tensors of a rule can change in place (`lengths += 1`, a buffer that `load_state_dict` fills, memory shared with
NumPy), and a function uses tensors and numbers from closures, globals and attributes. Version counters of tensors do
not record all of this, so the data itself is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from ..tracing import without_numbers
from .algebra import AllOf, AnyOf, Not
from .picked import Picked
from .positional_rules import Blocks, Dilated, Function
from .rule import Rule
from .rules import Band, Keep, Lengths, Segments

_OWN = (Band, Lengths, Segments, Keep, Picked, Dilated, Blocks)
"""Rules that depend only on their fields."""
KEPT = 32  # results of `kept_for_rules`: those of a model's layers at a few sizes

Made = TypeVar("Made")
_kept: dict[Hashable, Any] = {}


class Reads(NamedTuple):
    """The inputs of a rule.

    Attributes:
        steps: operators and numbers, in order, from rules whose code is not part of headwise.
        tensors: the tensors; copies of them in a cached entry.
    """

    steps: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def copied(self) -> Reads:
        """Return the same inputs with copies of the tensors, which no other code can change."""
        return Reads(self.steps, tuple(x.detach().clone(memory_format=torch.contiguous_format) for x in self.tensors))

    def equals(self, other: Reads) -> bool:
        """Return whether operators, numbers and the data of tensors are equal."""
        return (
            len(self.tensors) == len(other.tensors)
            and self.steps == other.steps
            and all(map(_equal, self.tensors, other.tensors))
        )

    def is_at(self, other: Reads) -> bool:
        """Return whether the tensors have the same memory as those of `other`, so the rule did not create them."""
        return [_place(x) for x in self.tensors] == [_place(x) for x in other.tensors]


def reads_of(rule: Rule, T: int, S: int) -> Reads:
    """Return the current inputs of a rule; foreign code is run for the first query and key and traced."""
    steps: list[Any] = []
    tensors: list[Tensor] = []
    for part in _parts(rule):
        if type(part) in _OWN:
            tensors += _tensors(part)
        elif not (isinstance(part, Function) and part.keep):
            b, h, i, j = (torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu") for _ in range(4))
            follower = _Follower(b, h, i, j)
            with torch.no_grad(), follower:
                seen = part.function(b, h, i, j) if isinstance(part, Function) else part.at(i, j, T, S)
            if isinstance(seen, Tensor):
                follower.read(seen)
            steps += follower.steps
            tensors += follower.tensors
    return Reads(tuple(steps), tuple(tensors))


def is_constant(rule: Rule) -> bool:
    """Return whether no input of a rule can change: it has only numbers, or functions that are declared to keep."""
    return all(
        part.keep if isinstance(part, Function) else type(part) in _OWN and not _tensors(part) for part in _parts(rule)
    )


def kept_for_rules(
    rules: tuple[Rule, ...],
    T: int,
    S: int,
    device: torch.device,
    make: Callable[[tuple[Rule, ...], int, int, torch.device], Made],
) -> Made:
    """Return ``make(rules, T, S, device)``, made once if no input of the rules can change.

    Tensors may change, and comparing them would wait for the device. While operators are counted (selective
    checkpointing) or tensors have no data, nothing is kept either.
    """
    if torch._C._len_torch_dispatch_stack() or without_numbers() or not all(map(is_constant, rules)):
        return make(rules, T, S, device)
    about = make, pytree.tree_structure(rules), T, S, device
    made: Made | None = _kept.get(about)
    if made is None:
        with torch.inference_mode(False), torch.no_grad():  # it also serves calls with a gradient
            made = _kept[about] = make(rules, T, S, device)
        for old in list(_kept)[:-KEPT]:
            _kept.pop(old, None)  # another thread may have removed it
    return made


def tensors_in(rule: Rule) -> Iterator[Tensor]:
    """Yield the tensors of a rule and of the rules that it consists of.

    `pytree.tree_leaves` finds the same ones, but takes several times as long, and every call that is checked runs this.
    """
    for x in vars(rule).values():
        for part in x if isinstance(x, tuple) else (x,):
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, Rule):
                yield from tensors_in(part)


def _tensors(rule: Rule) -> list[Tensor]:
    return [x for x in vars(rule).values() if isinstance(x, Tensor)]


def _parts(rule: Rule) -> Iterator[Rule]:
    if isinstance(rule, AllOf | AnyOf | Not):
        for part in rule.rules:
            yield from _parts(part)
    else:
        yield rule


class _Follower(TorchDispatchMode):
    """A dispatch mode that records operators, their numbers, and the tensors that no recorded operator created."""

    def __init__(self, *made: Tensor) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.tensors: list[Tensor] = []
        self._made = {_place(x): x for x in made}  # kept alive, because other tensors could get their memory

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.steps.append(func)
        for x in _leaves((*args, *kwargs.values())):
            if isinstance(x, Tensor):
                self.read(x)
            else:
                self.steps += (type(x), x)
        for x in _leaves((out,)):
            if isinstance(x, Tensor):
                self._made[_place(x)] = x
        return out

    def read(self, x: Tensor) -> None:
        """Record a tensor, except if a recorded operator created it."""
        if _place(x) not in self._made:
            self.tensors.append(x)


def _leaves(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments or results of an operator one by one: tensors, numbers, and the items of lists."""
    for x in values:
        if isinstance(x, tuple | list):
            yield from x
        else:
            yield x


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return the memory address, dtype, shape and strides of a tensor."""
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def _equal(x: Tensor, y: Tensor) -> bool:
    """Return whether tensors are equal, bit for bit if they are contiguous; otherwise a NaN differs from itself."""
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    if x.ndim and x.is_contiguous() and y.is_contiguous() and x.nbytes % 8 == 0 and x.data_ptr() % 8 == 0:
        x, y = (z.view(-1).view(torch.int64) for z in (x, y))  # a comparison of bools is ten times slower
    return torch.equal(x, y)
