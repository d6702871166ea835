"""The parts of a model as numbers: what it has learned, what one token passes through, what one token computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ROOMS = ("attention", "state", "mlp", "norm", "embedding", "head")
BIASES = "position_biases"
"""The name of a table of position biases, with a column for each head."""


@dataclass(frozen=True)
class Part:
    """One part of a model: a projection, all experts of a layer, a table, a norm.

    Attributes:
        name: What it is, as the field calls it: ``q_proj``, ``experts``, ``embeddings``.
        room: Where it belongs: one of attention, state, mlp, norm, embedding, head.
        parameters: Numbers learned.
        macs: Multiply-adds of its matrices for one token; biases, norms and look-ups are not matrices. Two FLOPs each.
        active: Parameters that one token passes through: fewer than all for experts, none for a table it looks up in.
        stream: Whose tokens pass: the decoder's (the only ones of a model with one stack), the encoder's, or the
            encoder's output on its way into cross-attention.
        matrices: (inputs, outputs, how many) of its matrices: what a quantised checkpoint packs.
    """

    name: str
    room: str
    parameters: int
    macs: int = 0
    active: int = 0
    stream: str = "decoder"
    matrices: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)


def linear(name: str, room: str, inputs: int, outputs: int, *, bias: bool = False, stream: str = "decoder") -> Part:
    """Return a matrix that every token passes, with one bias an output where there are biases.

    Example:
        >>> linear("q_proj", "attention", 4, 6, bias=True)
        Part(name='q_proj', room='attention', parameters=30, macs=24, active=30, stream='decoder')
    """
    size = inputs * outputs + (outputs if bias else 0)
    return Part(name, room, size, inputs * outputs, size, stream, ((inputs, outputs, 1),))


def vector(name: str, room: str, size: int, *, stream: str = "decoder") -> Part:
    """Return numbers that every token passes without a matrix product: the weights of a norm, a bias."""
    return Part(name, room, size, 0, size, stream)


def table(name: str, rows: int, width: int, *, stream: str = "decoder") -> Part:
    """Return rows that a token looks up; it reads one, so none of its size is counted as passed."""
    return Part(name, "embedding", rows * width, 0, 0, stream)


def repeated(part: Part, copies: int, used: int) -> Part:
    """Copies of a part of which a token passes `used`: the experts of a mixture.

    Example:
        >>> repeated(linear("up", "mlp", 4, 6), copies=8, used=2).parameters
        192
    """
    matrices = tuple((inputs, outputs, many * copies) for inputs, outputs, many in part.matrices)
    sizes = part.parameters * copies, part.macs * used, part.active * used
    return Part(part.name, part.room, *sizes, part.stream, matrices)


def parameters(parts: Iterable[Part], room: str | None = None) -> int:
    """Return parameters of all parts, or of those of one room."""
    return sum(part.parameters for part in parts if room in (None, part.room))


def macs(parts: Iterable[Part], stream: str) -> int:
    """Return multiply-adds that one token of the stream causes."""
    return sum(part.macs for part in parts if part.stream == stream)
