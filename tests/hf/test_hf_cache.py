"""Prefill, steps and chunks through transformers' caches, and generate(): the logits and tokens of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_measure import counted, decode_distance
from hf_models import BY_NAME, DECODERS, PAD, ROWS, B, Row, inputs, padding, token_ids
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from headwise.hf.models.architectures import CACHE

MODELS: dict[str, PreTrainedModel] = {}
SEQ2SEQ = tuple(row for row in ROWS if row.kind in ("seq2seq", "speech"))


def model_of(row: Row) -> PreTrainedModel:
    if row.name not in MODELS:
        MODELS[row.name] = row.build()
    return MODELS[row.name]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("row", DECODERS, ids=lambda row: row.name)
def test_cached_steps_give_the_logits_of_eager(row: Row, cache: str) -> None:
    """A prefill of 5, steps of 1, a chunk of 3: longer than the windows, so they roll."""
    for side in ("none", "left"):
        error = decode_distance(model_of(row), cache, side)
        assert error.ours <= error.budget, f"{row.name}, {cache}, padding {side}: {error}"
        assert error.to_eager <= 1e-5 * error.scale


def greedy(model: PreTrainedModel, implementation: str, arguments: dict[str, Tensor], **how: Any) -> Tensor:
    model.set_attn_implementation(implementation)
    try:
        return model.generate(**arguments, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=PAD, **how)
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("row", DECODERS, ids=lambda row: row.name)
def test_greedy_generation_gives_the_same_tokens(row: Row, cache: str) -> None:
    model = model_of(row)
    arguments = {"input_ids": token_ids(7), "attention_mask": padding("left", 7)}
    eager = greedy(model, "eager", arguments, cache_implementation=cache)
    with counted() as calls:
        ours = greedy(model, "headwise", arguments, cache_implementation=cache)
    assert torch.equal(ours, eager)
    assert len(calls) == 6 * row.calls
    assert len({tuple(line) for line in ours[:, 7:].tolist()}) == B, "all rows alike would prove little"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("row", SEQ2SEQ, ids=lambda row: row.name)
def test_encoder_decoders_generate_the_same_tokens(row: Row, cache: str) -> None:
    model = model_of(row)
    arguments = {name: x for name, x in inputs(row, "right").items() if not name.startswith("decoder")}
    eager = greedy(model, "eager", arguments, cache_implementation=cache)
    with counted() as calls:
        ours = greedy(model, "headwise", arguments, cache_implementation=cache)
    assert torch.equal(ours, eager)
    assert len(calls) == 2 + 6 * 4  # the encoder once; self- and cross-attention of two layers, six times


def test_beam_search() -> None:
    for name in ("Llama GQA", "BART"):
        row = BY_NAME[name]
        arguments = {k: v for k, v in inputs(row, "left").items() if not k.startswith("decoder")}
        eager, ours = (greedy(model_of(row), which, arguments, num_beams=3) for which in ("eager", "headwise"))
        assert torch.equal(ours, eager)


def test_the_unused_room_of_a_static_cache_is_not_attended() -> None:
    """Poison it: whatever lies behind the live positions may not show in any bit."""
    row = BY_NAME["Llama GQA"]
    model = model_of(row)
    model.set_attn_implementation("headwise")
    outs = []
    for poison in (0.0, float("nan")):
        cache = StaticCache(config=model.config, max_cache_len=13)
        logits = []
        with torch.no_grad():
            for piece in token_ids(9).split([5, 1, 3], dim=1):
                for layer in cache.layers:
                    if layer.is_initialized:
                        at = int(layer.get_seq_length())
                        layer.keys[:, :, at:] = layer.values[:, :, at:] = poison
                logits.append(model(input_ids=piece, **{CACHE: cache}, use_cache=True).logits)
        outs.append(torch.cat(logits, 1))
    model.set_attn_implementation("eager")
    assert outs[1].isfinite().all()
    assert torch.equal(outs[0], outs[1])
