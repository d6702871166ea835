"""The parts of a model as numbers: the parameters, the active parameters of one token, and its multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

ROOMS = ("attention", "state", "mlp", "norm", "embedding", "head")
BIASES = "position_biases"
"""The name of a table of position biases, with one column per head."""


@dataclass(frozen=True)
class Part:
    """One part of a model: a projection, all experts of a layer, a table, a norm.

    Attributes:
        name: The usual name: ``q_proj``, ``experts``, ``embeddings``.
        room: The group of the part: one of attention, state, mlp, norm, embedding, head.
        parameters: The number of parameters.
        macs: Multiply-adds of its matrices for one token, two FLOPs each; biases, norms and look-ups are not counted.
        active: Parameters that one token uses: fewer than all for experts, none for a look-up table.
        stream: The tokens that it processes: the decoder's (the only ones of a model with one stack), the encoder's, or
            the encoder's output for cross-attention.
        matrices: (inputs, outputs, count) of its matrices, which a quantised checkpoint packs.
        copies: The number of experts in it; 1 for all other parts.
        used: The number of them that one token uses.
    """

    name: str
    room: str
    parameters: int
    macs: int = 0
    active: int = 0
    stream: str = "decoder"
    matrices: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    copies: int = field(default=1, repr=False)
    used: int = field(default=1, repr=False)

    def bytes_read(self, stored: int, batch: int) -> int:
        """Return how many of its `stored` bytes a step of `batch` tokens reads, with the expected number of experts."""
        if self.used == self.copies or batch == 1:
            return stored * self.active // self.parameters
        return round(
            stored * self.active / self.parameters * distinct_experts(self.copies, self.used, batch) / self.used
        )


def distinct_experts(experts: int, used: int, tokens: int) -> float:
    """Return the expected number of different experts that `tokens` tokens use, each of them `used` of all.

    This is ``E (1 - (1 - k / E)^B)`` and assumes that the router chooses uniformly and independently for each token; a
    router with favourites uses fewer.

    Example:
        >>> distinct_experts(256, 8, 1), round(distinct_experts(256, 8, 32)), round(distinct_experts(256, 8, 256))
        (8.0, 163, 256)
    """
    if tokens == 1 or used == experts:
        return float(used)
    return -experts * math.expm1(tokens * math.log1p(-used / experts))


def linear(name: str, room: str, inputs: int, outputs: int, *, bias: bool = False, stream: str = "decoder") -> Part:
    """Return a matrix that every token is multiplied by, with an optional bias per output.

    Example:
        >>> linear("q_proj", "attention", 4, 6, bias=True)
        Part(name='q_proj', room='attention', parameters=30, macs=24, active=30, stream='decoder')
    """
    size = inputs * outputs + (outputs if bias else 0)
    return Part(name, room, size, inputs * outputs, size, stream, ((inputs, outputs, 1),))


def vector(name: str, room: str, size: int, *, stream: str = "decoder") -> Part:
    """Return a vector that every token uses without a matrix product: the weights of a norm, or a bias."""
    return Part(name, room, size, 0, size, stream)


def table(name: str, rows: int, width: int, *, stream: str = "decoder") -> Part:
    """Return a look-up table; a token reads one row, so its active parameters are 0."""
    return Part(name, "embedding", rows * width, 0, 0, stream)


def repeated(part: Part, copies: int, used: int) -> Part:
    """Return copies of a part, of which a token uses `used`: the experts of a mixture.

    Example:
        >>> repeated(linear("up", "mlp", 4, 6), copies=8, used=2).parameters
        192
    """
    matrices = tuple((inputs, outputs, many * copies) for inputs, outputs, many in part.matrices)
    sizes = part.parameters * copies, part.macs * used, part.active * used
    return Part(part.name, part.room, *sizes, part.stream, matrices, copies, used)


def parameters(parts: Iterable[Part], room: str | None = None) -> int:
    """Return the number of parameters of all parts, or of the parts of one room."""
    return sum(part.parameters for part in parts if room in (None, part.room))


def macs(parts: Iterable[Part], stream: str) -> int:
    """Return the multiply-adds for one token of the stream."""
    return sum(part.macs for part in parts if part.stream == stream)
