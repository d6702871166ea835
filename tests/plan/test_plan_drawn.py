"""Drawn models of every kind, those of an encoder and a decoder too, against what transformers' models do when run.

Attention's part of the operations and of memory against the weights that come out, what a token passes against the
modules that are called, and the cache of one more token against what a cache grows by.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plan_models import (
    BATCH,
    CACHED,
    FLOAT32,
    SINGLE,
    TOKENS,
    as_run,
    build,
    bytes_held,
    config_of,
    inputs_of,
    random_config,
)

from headwise.hf.models.architectures import CACHE
from headwise.plan.config.fields import architectures
from headwise.plan.costs import totals as costs
from headwise.plan.model.layer import AttentionLayer
from headwise.plan.model.model import Model, model_of

pytestmark = pytest.mark.unchecked
PAIRS = [name for name in CACHED if architectures()[name].get("stack") == "pair"]
SOURCE = 7


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models of a few hundred weights only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(name: str, seed: int, **fixed: Any) -> tuple[Model, Any, Any]:
    """The plan's model, transformers' config, and transformers' model with weights; `fixed` where they have them."""
    fields = random_config(name, random.Random(seed), runs=True)
    fields |= {field: value for field, value in fixed.items() if field in fields}
    config = config_of(name, fields)
    return model_of({**fields, "model_type": name}), config, build(name, config, device="cpu")


def weights_of(ours: Model, out: Any) -> list[tuple[AttentionLayer, torch.Tensor]]:
    """Each attention layer with the weights (B, H, T, S) that came out of it."""
    if ours.states and len(out.attentions) > len(ours.layers):  # state layers give something of theirs, too
        return [(layer, out.attentions[layer.index]) for layer in ours.layers]
    if hasattr(out, "attentions"):
        return list(zip(ours.layers, out.attentions, strict=True))
    stacks = {"encoder": out.encoder_attentions, "self": out.decoder_attentions, "cross": out.cross_attentions}
    return [(layer, stacks[layer.role][layer.index]) for layer in ours.layers]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", SINGLE)
def test_attention_is_counted_where_weights_come_out(name: str) -> None:
    """Masked weights are exactly 0: so each layer's pairs are counted, and the whole matrix is what eager writes."""
    ours, config, real = drawn(name, seed=3)
    with torch.no_grad():
        out = real(**inputs_of(name, config, TOKENS, batch=BATCH), output_attentions=True)
    layers = weights_of(ours, out)
    source = ours.source_tokens(TOKENS)
    allowed = whole = 0
    for layer, weights in layers:
        tokens = weights.shape[-1] if layer.shared_key is None else TOKENS  # columns are compressed keys, too
        keys = source if layer.role == "cross" else tokens
        assert layer.num_heads * layer.pairs(weights.shape[-2], keys) * BATCH == weights.count_nonzero()
        positions = 2 * BATCH * layer.position_macs(TOKENS, TOKENS)[1]
        allowed += 2 * (layer.head_dim + layer.value_dim) * int(weights.count_nonzero()) + positions
        whole += 2 * (layer.head_dim + layer.value_dim) * weights.numel() + positions
    cost = costs.prefill(ours, TOKENS, batch=BATCH)
    assert (cost.attention, cost.dense) == (allowed, whole)
    largest = max(weights.numel() for _, weights in layers)
    rows = max(weights[..., 0].numel() for _, weights in layers)
    assert costs.eager_bytes(ours, TOKENS, batch=BATCH) == (2 * largest, 4 * rows)
    assert costs.eager_bytes(ours, TOKENS, batch=BATCH, number_bytes=4) == (4 * largest, 4 * rows)


# --- one token --------------------------------------------------------------------------------------------------------


def parameters_called(real: Any, inputs: dict[str, Any], **more: Any) -> int:
    """Parameters of the modules that a forward pass calls, each time it does, without tables that are looked up in.

    One that two modules hold (a head's bias) is the first one's. The router of Gemma 3n, which a layer calls twice in
    a row, counts once.
    """
    sizes: dict[torch.nn.Module, int] = {}
    met: set[int] = set()
    for module in real.modules():
        if not isinstance(module, torch.nn.Embedding):
            own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in met}
            met |= own.keys()
            sizes[module] = sum(own.values())
    twice = {m for path, m in real.named_modules() if path.endswith(("altup.modality_router", "altup.router_norm"))}
    called: list[torch.nn.Module] = []
    hooks = [module.register_forward_hook(lambda m, *_: called.append(m)) for module in sizes]
    with torch.no_grad():
        real(**inputs, **more)
    for hook in hooks:
        hook.remove()
    return sum(sizes[module] for module in called) - sum(sizes[module] for module in twice)


def next_token(name: str, config: Any, real: Any, tokens: int, source: int) -> tuple[dict[str, Any], Any]:
    """(the inputs of one further token, the cache of those before it)."""
    with torch.no_grad():
        first = real(**inputs_of(name, config, tokens, source=source), use_cache=True)
    inputs = inputs_of(name, config, 1, source=source)
    if "decoder_input_ids" in inputs:
        memory = (first.encoder_last_hidden_state,)
        inputs = {"encoder_outputs": memory, "decoder_input_ids": inputs["decoder_input_ids"]}
    return inputs, first[CACHE]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [name for name in SINGLE if "moe" not in architectures()[name]])
def test_what_a_token_passes_is_what_is_called(name: str) -> None:
    """For an encoder-decoder: one decoded token, which passes neither the encoder nor what made the memory's keys."""
    once = {"legacy": True, "share_att_key": False}  # no module called twice, no matrix taken without its module
    ours, config, real = drawn(name, seed=4, **once)
    if ours.is_encoder:
        assert ours.active_parameters() == parameters_called(real, inputs_of(name, config, TOKENS))
        return
    inputs, cache = next_token(name, config, real, TOKENS, SOURCE)
    taken = sum(p.active for layer in ours.states for p in layer.parts() if p.name == "conv")  # not by its module
    taken += sum(p.numel() for path, p in real.named_parameters() if path.endswith("altup.correct_output_scale"))
    called = parameters_called(real, inputs, **{CACHE: cache}, use_cache=True)
    assert ours.active_parameters() == called + taken


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CACHED)
def test_one_more_token_takes_the_bytes_a_cache_grows_by(name: str) -> None:
    """The source of an encoder-decoder stays as it is, and so does what cross-attention holds of it."""
    ours, config, real = drawn(name, seed=5)
    if any(layer.window is not None for layer in ours.layers):
        for field in {"sliding_window", "window_size", "attention_chunk_size"} & vars(config).keys():
            setattr(config, field, 99)
        real = build(name, config, device="cpu")
    inputs, cache = next_token(name, config, real, 2, SOURCE)
    before, steps = bytes_held(cache), math.lcm(*(layer.compressor.rate for layer in ours.layers if layer.compressor))
    with torch.no_grad():
        for _ in range(steps):  # as many as give whole compressed keys; 1 without any
            cache = real(**inputs, **{CACHE: cache}, use_cache=True)[CACHE]
    assert costs.bytes_per_token(as_run(name, ours, config), FLOAT32) == round((bytes_held(cache) - before) / steps) > 0


# --- the floor, and everything else that a batch multiplies -----------------------------------------------------------


@pytest.mark.parametrize("name", [*PAIRS, "mistral", "deepseek_v3", "olmoe"])
def test_a_batch_multiplies_all_but_the_weights_that_are_read(name: str) -> None:
    ours, _, _ = drawn(name, seed=6)
    context, batch = 101, 3
    for windowed in (True, False):
        one = costs.cache_bytes(ours, context, 2, windowed=windowed)
        assert costs.cache_bytes(ours, context, 2, windowed=windowed, batch=batch) == batch * one
    for count in (costs.prefill, costs.decode):
        one, many = count(ours, context), count(ours, context, batch=batch)
        assert one is not None and many is not None
        assert {key: batch * value for key, value in one.to_dict().items()} == many.to_dict()
    cache, token = costs.cache_bytes(ours, context, 2), costs.decode(ours, context)
    assert token is not None
    one = costs.weight_bytes_read(ours)
    for bandwidth, rate in ((1e9, None), (None, 1e9), (1e9, 1e9 * token.total / (one + 9 * cache))):
        for floor in costs.floors(ours, context, 2, bandwidth=bandwidth, flop_rate=rate):
            n = floor.batch
            read = costs.weight_bytes_read(ours, n)
            assert (floor.bytes, floor.flops) == (read + n * cache, n * token.total)
            times = {
                "memory": floor.bytes / (bandwidth or float("inf")),
                "compute": floor.flops / (rate or float("inf")),
            }
            assert floor.seconds == max(times.values()) and floor.tokens_per_second == n / max(times.values())
            memory = "weights" if read >= n * cache else "cache"
            assert floor.binds == (memory if times["memory"] >= times["compute"] else "compute")


def test_each_bound_is_met_and_told() -> None:
    """By hand: 175 B weights of two bytes against 4.7 MB a token and 2,048 tokens; a batch of 64 has more cache."""
    model = model_of({"model_type": "gpt2", "n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048})
    bounds = {floor.batch: floor.binds for floor in costs.floors(model, 2048, 2, bandwidth=1e12)}
    assert [n for n, what in bounds.items() if what == "weights"] == [1, 2, 4, 8, 16, 32]
    assert [n for n, what in bounds.items() if what == "cache"] == [64, 128, 256]
    assert len(PAIRS) >= 9
