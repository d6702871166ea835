"""Queries, keys and values of the first tokens of an attention call, one byte per number: enough to explain a weight.

A page that shows ``q . k`` dimension by dimension needs the vectors themselves. For 64 tokens they take 12 KB per head
at 64 dimensions; the rounding errors (half of 1/127 of a row's largest number) change a score by about 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...nn.hooks.probe import AttentionCall
from ...ops.statistics.weights import weights
from .schema import PlainRecord

TOKENS = 64
"""The most tokens of a text whose vectors are kept."""

SCORES = 1 << 23
"""The most scores that are computed together."""


@dataclass(frozen=True)
class ByteVectors:
    """Vectors, one byte per number."""

    shape: tuple[int, int, int]  # heads, tokens, dimensions
    data: bytes  # signed, by head, then token
    steps: bytes  # for each vector the value of a byte of 1, float32, little-endian

    def __post_init__(self) -> None:
        heads, tokens, dims = self.shape
        wanted = (heads * tokens * dims, 4 * heads * tokens)
        if (len(self.data), len(self.steps)) != wanted:
            raise ValueError(
                f"rows of shape {self.shape} take {wanted[0]} bytes and {wanted[1]} of steps; got {len(self.data)} and "
                f"{len(self.steps)}; make them with headwise.look.records.vectors.rows()"
            )

    def array(self) -> npt.NDArray[np.float32]:
        """Return the vectors, (heads, tokens, dimensions)."""
        steps = np.frombuffer(self.steps, "<f4").reshape(*self.shape[:2], 1)
        return np.frombuffer(self.data, np.int8).reshape(self.shape).astype(np.float32) * steps


@dataclass(frozen=True)
class Neurons(PlainRecord):
    """One attention call on the first tokens of a text."""

    CALLED = "neurons are"

    layer: int  # index of the call in the forward pass, as `HeadRecord.layer`
    scale: float  # the factor of the products of query and key
    softcap: float | None  # the limit of the scores
    biased: bool  # whether the mask adds to the scores, as in ALiBi
    gated: bool  # whether the output is multiplied by a gate
    sunk: bool  # whether sinks take a part of each row
    query: ByteVectors  # (H, T, D)
    key: ByteVectors  # (K, S, D); query head h uses key-value head h // (H / K)
    value: ByteVectors | None  # (K, S, V), if the call has values
    weights: bytes  # (H, T, S), each ``round(255 * sqrt(weight))`` as in `HeadMap`

    def __post_init__(self) -> None:
        (H, T, D), (K, S, E) = self.query.shape, self.key.shape
        fits = K > 0 and H % K == 0 and D == E and (self.value is None or self.value.shape[:2] == (K, S))
        if not fits or len(self.weights) != H * T * S:
            value = None if self.value is None else self.value.shape
            raise ValueError(
                f"the parts of a call belong together: query {self.query.shape}, key {self.key.shape}, value {value}, "
                f"{len(self.weights)} weights; headwise.look.records.vectors.vectors_of() makes them"
            )


def rows(vectors: Tensor) -> ByteVectors:
    """Return (heads, tokens, dimensions) as bytes: each vector is scaled by its own largest number; NaN becomes 0.

    >>> rows(torch.tensor([[[1.0, -0.5], [0.0, 0.0]]])).array().round(2).tolist()
    [[[1.0, -0.5], [0.0, 0.0]]]
    """
    x = vectors.detach().cpu().float().nan_to_num(0.0)
    steps = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / torch.where(steps > 0, steps, 1.0)).round().to(torch.int8)
    heads, tokens, dims = x.shape
    return ByteVectors((heads, tokens, dims), codes.numpy().tobytes(), steps.numpy().astype("<f4").tobytes())


def vectors_of(call: AttentionCall, tokens: int = TOKENS) -> Neurons:
    """Return the first tokens of a call's first text: at most `tokens` queries and keys."""
    return neurons_of(call, numbers_of(call, tokens))


def numbers_of(call: AttentionCall, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Return the tensors of which `neurons_of` makes the record, on the device of the call.

    The weights are computed over whole rows: the mass on later keys is missing from them.
    """
    T, S = call.query.shape[2], call.key.shape[2]
    H, first = call.query.shape[1], slice(0, min(T, tokens))
    some = max(1, SCORES // max(first.stop * S, 1))  # heads per step: limits memory for texts of 128k tokens
    with torch.no_grad():
        parts = [
            weights(call.query[:1], call.key[:1], rows=first, heads=slice(i, i + some), **call.scoring)[0, ..., :tokens]
            for i in range(0, H, some)
        ]
        numbers = {"query": call.query, "key": call.key} | ({} if call.value is None else {"value": call.value})
        numbers = {name: x[0, :, :tokens] for name, x in numbers.items()}
        numbers["weights"] = torch.cat(parts)
        added = None if call.mask is None else call.mask.added(T, S, rows=slice(0, tokens), device=call.query.device)
        if added is not None:
            numbers["biased"] = (added.isfinite() & (added != 0)).any()
    return numbers


def neurons_of(call: AttentionCall, numbers: Mapping[str, Tensor]) -> Neurons:
    """Return the record of a call from `numbers_of`, which may have been moved to the CPU."""
    codes = (255 * numbers["weights"].clamp(0, 1).sqrt()).round().to(torch.uint8)
    return Neurons(
        layer=call.order,
        scale=float(call.query.shape[-1] ** -0.5 if call.scale is None else call.scale),
        softcap=call.softcap,
        biased=bool(numbers.get("biased", False)),
        gated=call.gate is not None,
        sunk=call.sinks is not None,
        query=rows(numbers["query"]),
        key=rows(numbers["key"]),
        value=rows(numbers["value"]) if "value" in numbers else None,
        weights=codes.cpu().numpy().tobytes(),
    )
