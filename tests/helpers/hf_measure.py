"""How far headwise's logits lie from eager's, and each from the exact answer."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hf_models import Row, inputs, logits, padding, real_rows, token_ids
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.masking_utils import sdpa_mask

from headwise.hf import returned
from headwise.hf.models.architectures import CACHE

# -- the yardstick: attention written out, its softmax in float64 -----------------------------------------------------


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The definition over a dense bool mask, in float64; transformers' eager takes its softmax in float32 always."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1).double() for x in (key, value))
    scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is None and query.shape[2] > 1 and (module.is_causal if is_causal is None else is_causal):
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        lowest = torch.finfo(attention_mask.dtype).min
        scores, attention_mask = scores + attention_mask, attention_mask > lowest
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -1e300)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).to(query.dtype), weights


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", sdpa_mask)


@contextmanager
def counted(gate: Callable[[int, Tensor], Tensor | None] = lambda call, query: None) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the queries that reach headwise's attention in the block; `gate(call, query)` may gate a call."""
    seen: list[tuple[int, ...]] = []
    real = returned.attention

    def spy(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return real(query, *args, gate=gate(len(seen) - 1, query), **kwargs)

    with mock.patch.object(returned, "attention", spy):
        yield seen


# -- measuring --------------------------------------------------------------------------------------------------------


def steps(model: PreTrainedModel, cache: str, side: str, plan: tuple[int, ...]) -> Tensor:
    """Logits (B, sum(plan), vocabulary) of a text fed in pieces of the given lengths through a cache."""
    total = sum(plan)
    ids, real = token_ids(total, seed=13), padding(side, total)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    past: Any = DynamicCache(config=model.config)
    if cache == "static":
        past = StaticCache(config=model.config, max_cache_len=total + 3)
    logits, at = [], 0
    with torch.no_grad():
        for length in plan:
            piece = slice(at, at + length)
            arguments: dict[str, Any] = dict(input_ids=ids[:, piece], attention_mask=real[:, : piece.stop])
            if "position_ids" in model.forward.__code__.co_varnames:
                arguments["position_ids"] = positions[:, piece]
            out = model(**arguments, **{CACHE: past}, use_cache=True)
            logits.append(out.logits)
            at += length
    return torch.cat(logits, 1)


@dataclass
class Distance:
    """Largest differences of logits: headwise to eager, and each to the exact answer; the size of the logits."""

    to_eager: float
    ours: float
    eager: float
    scale: float

    @property
    def budget(self) -> float:
        """What rounding explains: twice eager's own error, plus 4 ulp of the largest logit; never above 1e-5 of it."""
        return min(2 * self.eager + 4 * 2**-23 * self.scale, 1e-5 * self.scale)


def distance(model: PreTrainedModel, run: Callable[[PreTrainedModel], Tensor], real: Tensor) -> Distance:
    """Run one model under eager, headwise, and in float64 under the written-out definition."""
    outputs = {}
    for name, subject in (("eager", model), ("headwise", model), ("exact", copy.deepcopy(model).double())):
        before = subject.config._attn_implementation
        subject.set_attn_implementation(name)
        outputs[name] = run(subject).double()[real]
        subject.set_attn_implementation(before)
    eager, ours, exact = outputs["eager"], outputs["headwise"], outputs["exact"]
    return Distance(*(float(x.abs().max()) for x in (ours - eager, ours - exact, eager - exact, exact)))


def forward_distance(row: Row, model: PreTrainedModel, side: str, masked: bool = True) -> Distance:
    """Of one forward, over the real tokens."""
    return distance(model, lambda m: logits(m, inputs(row, side, masked)), real_rows(row, side))


def decode_distance(
    model: PreTrainedModel, cache: str, side: str = "left", plan: tuple[int, ...] = (5, 1, 3, 1, 1)
) -> Distance:
    """Of prefill, single steps and a chunk through a cache, over the real tokens."""
    return distance(model, lambda m: steps(m, cache, side, plan), padding(side, sum(plan)).bool())


@contextmanager
def logged(level: str = "WARNING") -> Iterator[io.StringIO]:
    """What headwise.hf logs; pytest's own fixture would cost every test of the suite half a millisecond."""
    text, logger = io.StringIO(), logging.getLogger("headwise.hf")
    before = logger.level
    logger.addHandler(handler := logging.StreamHandler(text))
    logger.setLevel(level)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
