"""What a rule reads when it is evaluated, so that a result of it is used again only where it would be the same.

A rule's tensors change in place (`lengths += 1`, a buffer that `load_state_dict` fills, memory shared with NumPy), and
a function reads tensors and numbers through closures, globals and attributes. Versions of tensors do not tell of all
that, so the numbers themselves are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from .algebra import AllOf, AnyOf, Not
from .positional_rules import Blocks, Dilated, Function
from .rules import Band, Keep, Lengths, Rule, Segments

_OWN = (Band, Lengths, Segments, Keep, Dilated, Blocks)
"""Rules that read their fields alone."""


class Reads(NamedTuple):
    """What a rule reads.

    Attributes:
        steps: operators and numbers, in their order, of the rules whose code is not ours.
        tensors: the tensors; in what is kept, copies of them.
    """

    steps: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def copied(self) -> Reads:
        """The same with copies of the tensors, which nobody changes."""
        return Reads(self.steps, tuple(x.detach().clone(memory_format=torch.contiguous_format) for x in self.tensors))

    def equals(self, other: Reads) -> bool:
        """Whether these are the same operators, the same numbers, and tensors that hold the same."""
        return (
            len(self.tensors) == len(other.tensors)
            and self.steps == other.steps
            and all(map(_equal, self.tensors, other.tensors))
        )

    def is_at(self, other: Reads) -> bool:
        """Whether the tensors lie where those of the other do: they were there before the rule was evaluated."""
        return [_place(x) for x in self.tensors] == [_place(x) for x in other.tensors]


def reads_of(rule: Rule, T: int, S: int) -> Reads:
    """What a rule reads now; code that is not ours is run for the first query and key, and followed."""
    steps: list[Any] = []
    tensors: list[Tensor] = []
    for part in _parts(rule):
        if type(part) in _OWN:
            tensors += [x for x in vars(part).values() if isinstance(x, Tensor)]
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


def _parts(rule: Rule) -> Iterator[Rule]:
    if isinstance(rule, AllOf | AnyOf | Not):
        for part in rule.rules:
            yield from _parts(part)
    else:
        yield rule


class _Follower(TorchDispatchMode):
    """Follows torch's operators: which run, with which numbers, on which tensors that none of them made."""

    def __init__(self, *made: Tensor) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self.tensors: list[Tensor] = []
        self._made = {_place(x): x for x in made}  # kept, or others would come to lie in their places

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
        """Notes a tensor, unless an operator made it."""
        if _place(x) not in self._made:
            self.tensors.append(x)


def _leaves(values: tuple[Any, ...]) -> Iterator[Any]:
    """What an operator takes or gives, one by one: tensors, numbers, and lists of them."""
    for x in values:
        if isinstance(x, tuple | list):
            yield from x
        else:
            yield x


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor's numbers lie."""
    return x.data_ptr(), x.dtype, tuple(x.shape), x.stride()


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether tensors hold the same, bit for bit where they are contiguous; a NaN otherwise differs from itself."""
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    if x.ndim and x.is_contiguous() and y.is_contiguous() and x.nbytes % 8 == 0 and x.data_ptr() % 8 == 0:
        x, y = (z.view(-1).view(torch.int64) for z in (x, y))  # bools are compared one by one, at a tenth of the speed
    return torch.equal(x, y)
