"""Attention matrices of transformers models, call by call, with the tokens behind their queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headwise.look import Passage, Vocabulary
from headwise.look.roles.call_tokens import CallTokens

Matrix = npt.NDArray[np.float64]


@dataclass
class Call:
    """One attention call of one forward: matrices (B, H, T, S), and the tokens behind its queries and keys.

    `moved` says how many places the queries and the keys stand behind the passage's tokens.
    """

    part: str
    p: Matrix
    queries: list[list[int]]
    keys: list[list[int]]
    passages: Sequence[Passage]
    moved: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.seen = (self.p > 0).any(1)  # a key is seen where some head may attend it
        self.even = self.seen / np.maximum(self.seen.sum(-1, keepdims=True), 1)

    @property
    def scene(self) -> CallTokens:
        """For the draws of the controls."""
        ahead = {"cross": None, "encoder": True, "decoder": False}[self.part]
        return CallTokens(
            torch.tensor(self.queries), torch.tensor(self.keys), ahead, Vocabulary(), tuple(self.passages)
        )

    def linked(self, name: str) -> list[list[list[int]]] | None:
        """Of each text and query the keys that it is linked to: none ahead of a decoder's, and never the first."""
        if not any(any(passage.links.get(name, ())) for passage in self.passages):
            return None
        T, S = self.p.shape[2:]
        out: list[list[list[int]]] = []
        for passage in self.passages:
            rows: list[list[int]] = [[] for _ in range(T)]
            for i, keys in enumerate(passage.links.get(name, ())):
                behind = [j + self.moved[1] for j in keys if self.part != "decoder" or j <= i]
                if i + self.moved[0] < T:
                    rows[i + self.moved[0]] = [j for j in behind if 0 < j < S]
            out.append(rows)
        return out

    def width(self, name: str) -> int:
        """How wide a table of links is made: room for the longest list of a passage."""
        return max(len(keys) for passage in self.passages for keys in passage.links.get(name, ()))


@contextmanager
def read_by(model: Any) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The ids of every forward pass of a model, as it was called."""
    seen: list[dict[str, torch.Tensor]] = []

    def record(_: Any, args: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
        kept = {"input_ids": args[0]} if args else {}
        kept |= {name: options[name] for name in ("input_ids", "decoder_input_ids") if name in options}
        seen.append(kept)

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def calls_of(model: Any, read: dict[str, torch.Tensor], passages: Sequence[Passage]) -> list[Call]:
    """The calls of one forward with the matrices that transformers' own eager attention gives."""
    with torch.no_grad():
        out = model(**read, output_attentions=True)
    ids = read["input_ids"].tolist()
    if "decoder_input_ids" not in read:
        parts = [bool(p.triu(1).any()) for p in out.attentions]
        return [
            Call("encoder" if ahead else "decoder", p.double().numpy(), ids, ids, passages)
            for ahead, p in zip(parts, out.attentions, strict=True)
        ]
    own = read["decoder_input_ids"].tolist()
    calls = [Call("encoder", p.double().numpy(), ids, ids, passages) for p in out.encoder_attentions]
    for p, across in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        calls.append(Call("decoder", p.double().numpy(), own, own, passages, (1, 1)))
        calls.append(Call("cross", across.double().numpy(), own, ids, passages, (1, 0)))
    return calls
