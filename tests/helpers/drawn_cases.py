"""Cases drawn from a number alone, so that a failure names the number and repeats: sizes, masks, options, what learns.

`Drawn` is a call. `spoiled` of one is the same call with poison wherever nothing may look: in queries that may attend
nothing, in keys, values and biases that nobody may attend, in what comes from behind to rows that attend nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, reduce
from operator import and_
from typing import Any

import pytest
import torch
from backends import attend
from mask_cases import MASKS, SHORT, Sizes, as_tensor
from torch import Tensor

import headwise
from headwise import Mask
from headwise.testing import make_qkv, poison

LENGTHS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33)
# One length of queries and keys is many times the other, beyond the tiles of 16, 32 and 64 and off their edges.
UNEQUAL = ((1, 67), (1, 131), (2, 131), (3, 67), (67, 3), (67, 5), (131, 4))
GATES = ("H", "BH", "BHT", "BHTV")
BIASES = ("S", "TS", "H1S", "B1TS", "BHTS", "BHT1")
INTERVALS = tuple(name for name in sorted(MASKS) if MASKS[name](SHORT).interval)
Leaves = dict[str, Tensor]


def _shape(n: Sizes, axes: str) -> tuple[int, ...]:
    return tuple(1 if axis == "1" else getattr(n, axis) for axis in axes)


class Drawn:
    """One drawn case: sizes, tensors, a mask, options."""

    def __init__(self, number: int, masks: tuple[str, ...] = tuple(sorted(MASKS))) -> None:
        draw = self.random = random.Random(number)
        self.source = torch.Generator().manual_seed(number)
        K, G = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
        S = draw.choice([3, 4, *LENGTHS[3:]])
        self.n = Sizes(
            draw.choice([1, 2, 3]),
            K * G,
            K,
            draw.choice(LENGTHS),
            S,
            draw.choice([1, 4, 7, 16]),
            draw.choice([1, 3, 8]),
        )
        if number % 3 == 0:
            T, S = draw.choice(UNEQUAL)
            self.n = self.n._replace(T=T, S=S)
        self.names = draw.sample(masks, draw.choice([0, 1, 1, 2, 3]))
        self.qkv = make_qkv(*self.n, seed=number, kind=draw.choice(["normal", "sink", "duplicates"]))
        parts = [MASKS[name](self.n).mask for name in self.names]
        self.mask = reduce(and_, parts) if parts else None
        self.options: dict[str, Any] = {}
        if draw.random() < 0.3:
            self.options["softcap"] = draw.choice([0.5, 2.0, 30.0])
        if draw.random() < 0.3:
            self.options["scale"] = draw.choice([0.0, -0.5, 1.0])
        if draw.random() < 0.3:
            self.options["sinks"] = torch.randn(self.n.H, generator=self.source)

    def dense(self) -> Tensor | None:
        """The masks' definitions as loops, joined."""
        if not self.names:
            return None
        tensors = [as_tensor(name, self.n) for name in self.names]
        floats = [x.double().log() if x.dtype == torch.bool else x for x in tensors]  # True -> 0, False -> -inf
        return sum(floats[1:], floats[0])

    def __repr__(self) -> str:
        return f"{self.n}, {self.names}, {sorted(self.options)}"


class Learning:
    """A drawn call with leaves: query, key, value always, and some of sinks, gate, bias, slopes.

    Every second one is plain, so that a backend with few options takes it, too. In two of five the keys of each row are
    an interval; in the others there are holes: rows that may attend nothing, keys that nobody may attend.
    """

    def __init__(self, number: int) -> None:
        interval = number % 5 < 2
        case = Drawn(number, INTERVALS if interval else tuple(sorted(MASKS)))
        self.n, self.names, self.source = case.n, case.names, case.source
        draw = self.draw = case.random
        n, plain = case.n, number % 2 == 0
        self.dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        self.rules = () if case.mask is None else case.mask.parts
        if not interval:
            hole = self.random(n.B, draw.choice([1, n.H]), n.T, n.S) > 0.2
            gone = [self.random(n.T) < 0.3, self.random(n.S) < 0.3]
            self.rules += headwise.keep(hole & ~gone[0][:, None] & ~gone[1]).parts
        self.leaves = dict(zip(("query", "key", "value"), (x.to(self.dtype) for x in case.qkv), strict=True))
        self.options = {"scale": draw.choice([0.7, 0.7, -0.5, 0.0])}
        self.lse = not plain and draw.random() < 0.5
        shapes = {"gate": _shape(n, draw.choice(GATES))}
        if not plain:
            self.options["softcap"] = draw.choice([None, 1.3, 1.3])
            shapes |= {"sinks": (n.H,), "bias": _shape(n, draw.choice(BIASES)), "slopes": (n.H,)}
        for name, shape in shapes.items():
            if draw.random() < 0.5:
                made = torch.randn(shape, generator=case.source)
                self.leaves[name] = made.abs() / n.S if name == "slopes" else made.to(self.dtype)
        up = torch.randn(n.B, n.H, n.T, n.V + 1, generator=case.source)
        self.upstream = {"out": up[..., :-1].to(self.dtype), "lse": up[..., -1]}

    def random(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.source)

    @cached_property
    def sees(self) -> Tensor:
        """What may be attended, by all rules but the leaves': bool (B, H, T, S)."""
        n = self.n
        allowed = Mask(self.rules).allowed(n.T, n.S) if self.rules else None
        every = torch.ones(n.B, n.H, n.T, n.S, dtype=torch.bool)
        return every if allowed is None else every & allowed

    @property
    def unseen(self) -> Tensor:
        """The keys that no query of their group may attend: bool (B, K, S)."""
        return ~self.sees.unflatten(1, (self.n.K, -1)).any(2).any(2)

    def clean(self) -> Leaves:
        """The leaves and what comes from behind."""
        return {**self.leaves, **{f"from {name}": x for name, x in self.upstream.items()}}

    def run(
        self, backend: str, leaves: Leaves, learns: tuple[str, ...] | None = None, *, autocast: bool = False
    ) -> Leaves | None:
        """out, lse where it is looked at, and the gradient of each leaf that learns, of all by default.

        The forward runs under autocast where that is asked. None where the backend refuses.
        """
        tensors = {name: x for name, x in leaves.items() if not name.startswith("from ")}
        learns = tuple(tensors) if learns is None else learns
        tensors = {name: x.detach().requires_grad_(name in learns) for name, x in tensors.items()}
        rules = list(self.rules)
        if "bias" in tensors:
            rules += headwise.bias(tensors["bias"]).parts
        if "slopes" in tensors:
            rules += headwise.alibi(tensors["slopes"]).parts
        options = {name: x for name, x in tensors.items() if name not in ("bias", "slopes")}
        mask = Mask(tuple(rules)) if rules else None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = attend(
                backend, **options, mask=mask, **self.options, **({"return_lse": True} if self.lse else {})
            )
        if outputs is None:
            return None
        results = dict(zip(("out", "lse"), outputs if self.lse else (outputs,), strict=False))
        results = {name: x for name, x in results.items() if x.requires_grad}
        up = [leaves.get(f"from {name}", self.upstream[name]) for name in results]
        grads = torch.autograd.grad(list(results.values()), [tensors[x] for x in learns], up, materialize_grads=True)
        outputs = {name: x.detach() for name, x in results.items()}
        return outputs | {f"d{name}": x for name, x in zip(learns, grads, strict=True)}

    def spoiled(self, number: int, poisons: tuple[float, ...]) -> tuple[Leaves, list[str]]:
        """The leaves, and what comes from behind, with poison in some of the places where nothing may look."""
        draw, empty = random.Random(number), ~self.sees.any(-1)
        places = {
            "query": empty[..., None],
            "key": self.unseen[..., None],
            "value": self.unseen[..., None],
            "from out": empty[..., None],
            "from lse": empty,
        }
        if "bias" in self.leaves:
            places["bias"] = _nowhere(self.sees, self.leaves["bias"].shape)
        if "gate" in self.leaves and self.leaves["gate"].ndim > 2:
            places["gate"] = empty if self.leaves["gate"].ndim == 3 else empty[..., None]
        clean = self.clean()
        common = draw.choice(poisons) if draw.random() < 0.5 else None  # two huge numbers may meet
        chosen = {name: common or draw.choice(poisons) for name in places if draw.random() < 0.7}
        bad = {name: spoil(x, places[name], chosen[name]) if name in chosen else x for name, x in clean.items()}
        return bad, [f"{what} in {name}" for name, what in chosen.items() if bool(places[name].any())]

    def __repr__(self) -> str:
        return f"{self.n}, {self.dtype}, {self.names}, {sorted(self.leaves)}, {self.options}"


def spoil(x: Tensor, where: Tensor, what: float) -> Tensor:
    """`poison` with what the dtype holds of a finite number."""
    most = torch.finfo(x.dtype).max
    return poison(x, where, min(what, most) if math.isfinite(what) else what)


def _nowhere(sees: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Where a tensor that broadcasts to (B, H, T, S) is met by no pair that may attend."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    return (sees.long().sum_to_size(full) == 0).view(shape)


@contextmanager
def squeezed(number: int) -> Iterator[None]:
    """With an odd number: blocks and strips of 16 rows, so that small cases have several, and their edges."""
    with pytest.MonkeyPatch.context() as change:
        if number % 2:
            change.setattr("headwise.ops.row_blocks.BLOCK_ELEMENTS", 1)
            change.setattr("headwise.ops.backends.sdpa.STRIP", 16)
        yield


POISONS = (math.nan, math.inf, -math.inf, 1e30)
