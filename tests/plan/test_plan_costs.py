"""Caches against those transformers fills, operations against matrix products that are counted as they run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from plan_models import (
    CACHED,
    FLOAT32,
    KEEPS_ALL,
    SINGLE,
    TOKENS,
    build,
    compared_caches,
    compared_decode,
    compared_prefill,
    config_of,
    counted,
    dynamic_cache_bytes,
    inputs_of,
    random_config,
)

from headwise import plan
from headwise.plan.config.fields import architectures
from headwise.plan.costs import totals as costs
from headwise.plan.model.layer import AttentionLayer, Latent, PositionTerms
from headwise.plan.model.model import Model, model_of

pytestmark = pytest.mark.unchecked


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models of a few hundred weights only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(name: str, seed: int = 0) -> tuple[Model, Any, Any]:
    """The plan's model, transformers' config, and transformers' model with weights."""
    fields = random_config(name, random.Random(seed), runs=True)
    config = config_of(name, fields)
    return model_of({**fields, "model_type": name}), config, build(name, config, device="cpu")


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CACHED)
def test_cache_bytes_are_those_transformers_holds_and_sets_aside(name: str) -> None:
    for seed in (0, 1):
        for ours, theirs in compared_caches(name, *tiny(name, seed)):
            assert ours == theirs


@pytest.mark.parametrize("name", [name for name in CACHED if "states" in architectures()[name]])
def test_states_have_the_dtypes_that_transformers_gives_them(name: str) -> None:
    """In bfloat16 a recurrent state is float32 all the same, and the convolution's inputs are bfloat16."""
    seed = next(
        n
        for n in range(20)
        if model_of({**random_config(name, random.Random(n), runs=True), "model_type": name}).states
    )
    ours, config, real = tiny(name, seed)
    assert ours.weight_bytes == 2
    expected = dynamic_cache_bytes(name, config, real.to(torch.bfloat16), TOKENS)
    assert expected == costs.cache_bytes(ours, TOKENS, 2) + costs.state_bytes(ours)


def test_windows_and_latents_are_among_what_was_measured() -> None:
    drawn = [(name, random_config(name, random.Random(seed), runs=True)) for name in CACHED for seed in (0, 1)]
    layers = [layer for name, fields in drawn for layer in model_of({**fields, "model_type": name}).layers]
    assert any(layer.window is not None and layer.window < TOKENS for layer in layers)
    assert any(layer.latent is not None for layer in layers)


def test_a_cache_that_ignores_windows_would_be_seen() -> None:
    """Planted: every layer counted whole."""
    model, config, real = tiny("mistral")
    expected = dynamic_cache_bytes("mistral", config, real, TOKENS)
    assert costs.cache_bytes(model, TOKENS, FLOAT32, windowed=False) != expected


# --- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", SINGLE)
def test_prefill_is_the_matrix_products_that_run(name: str) -> None:
    ours, theirs = compared_prefill(name, *tiny(name))
    assert ours == theirs


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [name for name in CACHED if name != KEEPS_ALL])
def test_a_decoded_token_is_the_matrix_products_that_run(name: str) -> None:
    ours, theirs = compared_decode(name, *tiny(name, seed=2))
    assert ours == theirs


def test_a_forgotten_product_would_be_seen() -> None:
    """Planted: the weighted sum of values left out."""
    model, config, real = tiny("llama")
    without = replace(model, layers=tuple(replace(layer, value_dim=0) for layer in model.layers))
    for compared in (compared_prefill, compared_decode):
        ours, theirs = compared("llama", without, config, real)
        assert ours < theirs


def test_latent_attention_on_the_cached_vectors() -> None:
    """As engines decode: same result as with keys and values made anew, and the products that run are those counted."""
    H, nope, rope, V, rank, S = 3, 5, 4, 7, 11, 13
    layer = AttentionLayer("self", 0, 17, H, H, nope + rope, V, latent=Latent(rank, rope, q_rank=6))
    draw = torch.Generator().manual_seed(1)
    q_nope, q_rope = (torch.randn(H, 1, n, generator=draw, dtype=torch.float64) for n in (nope, rope))
    latent, k_rope = (torch.randn(S, n, generator=draw, dtype=torch.float64) for n in (rank, rope))
    up_key, up_value = (torch.randn(H, rank, n, generator=draw, dtype=torch.float64) for n in (nope, V))
    scores = q_nope @ (latent @ up_key).mT + q_rope @ k_rope.T
    expected = scores.softmax(-1) @ (latent @ up_value)
    with counted() as seen:
        absorbed = q_nope @ up_key.mT  # (H, 1, rank)
        weights = torch.cat([absorbed, q_rope], -1).bmm(torch.cat([latent, k_rope], -1).mT.expand(H, -1, S)).softmax(-1)
        out = weights.bmm(latent.expand(H, S, rank)).bmm(up_value)
    torch.testing.assert_close(out, expected)
    each, pair = layer.absorbed_macs()
    assert 2 * (each + pair * S) == seen.flops
    assert layer.cached_bytes(1, scale_bytes=4) == rank + rope + 4  # one vector a token, with one scale
    assert 2 * (layer.expansion_macs() + layer.score_macs()) * S > seen.flops


# --- which pairs a mask allows ----------------------------------------------------------------------------------------


def allowed(name: str, window: int | None, queries: int, keys: int) -> int:
    """True entries of the mask transformers makes for the last `queries` of `keys`."""
    from transformers import masking_utils as masks

    fields: dict[str, Any] = {"num_hidden_layers": 1} | ({} if window is None else {"sliding_window": window})
    both_ways = name == "modernbert"
    if both_ways and window is not None:
        fields = {"num_hidden_layers": 1, "local_attention": window}
    config = config_of(name, fields)
    config._attn_implementation = "sdpa"
    rule = masks.sdpa_mask
    if window is None:
        function = masks.bidirectional_mask_function if both_ways else masks.causal_mask_function
    elif both_ways:
        function = masks.sliding_window_bidirectional_mask_function(config.sliding_window)
    else:
        function = masks.sliding_window_causal_mask_function(window)
    mask = rule(
        batch_size=1, q_length=queries, kv_length=keys, q_offset=keys - queries, kv_offset=0,
        mask_function=function, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device="cpu",
    )  # fmt: skip
    return int(mask.sum())


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (13, 13), (1, 13), (5, 13), (31, 31)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 13, 40])
def test_allowed_pairs_are_those_of_the_mask(window: int | None, queries: int, keys: int) -> None:
    layer = AttentionLayer("self", 0, 8, 2, 2, 4, 4, window=window)
    assert layer.pairs(queries, keys) == allowed("mistral", window, queries, keys)


@pytest.mark.parametrize("tokens", [1, 2, 7, 31])
@pytest.mark.parametrize("around", [2, 3, 8, 40])
def test_allowed_pairs_both_ways(around: int, tokens: int) -> None:
    """An encoder's window: `local_attention // 2` keys on either side."""
    window = 2 * (around // 2) + 1
    layer = AttentionLayer("encoder", 0, 8, 2, 2, 4, 4, window=window)
    assert layer.pairs(tokens, tokens) == allowed("modernbert", around, tokens, tokens)


def test_allowed_pairs_within_chunks() -> None:
    """A query sees the keys of its own stretch up to itself; the last query lies at the last key."""
    for chunk in (1, 3, 7, 31):
        layer = AttentionLayer("self", 0, 8, 2, 2, 4, 4, window=chunk, chunked=True)
        for queries, keys in ((1, 1), (1, 13), (5, 13), (13, 13), (31, 31), (17, 45)):
            seen = sum(i // chunk == j // chunk for i in range(keys - queries, keys) for j in range(i + 1))
            assert layer.pairs(queries, keys) == seen, (chunk, queries, keys)


# --- the floor --------------------------------------------------------------------------------------------------------


def test_the_floor_is_the_longer_of_two_times() -> None:
    model = model_of({"model_type": "llama", "num_key_value_heads": 8})
    one = costs.decode(model, 4096)
    assert one is not None
    weights, cache = costs.weight_bytes_read(model), costs.cache_bytes(model, 4096, 2)
    assert weights == 2 * (model.total_parameters() - 32000 * 4096)  # all but the table a token looks up in
    for floor in costs.floors(model, 4096, 2, bandwidth=1e12, flop_rate=1e14):
        assert (floor.bytes, floor.flops) == (weights + floor.batch * cache, floor.batch * one.total)
        times = {"memory": floor.bytes / 1e12, "compute": floor.flops / 1e14}
        assert floor.seconds == max(times.values()) and floor.tokens_per_second == floor.batch / max(times.values())
        assert (floor.binds == "compute") == (times["compute"] > times["memory"])
        assert floor.intensity == floor.flops / floor.bytes
    slow = costs.floors(model, 10**6, 2, bandwidth=1e12, flop_rate=1e14)
    assert (slow[0].binds, costs.floors(model, 9, 2, bandwidth=1e12)[0].binds) == ("cache", "weights")
    assert costs.floors(model, 9, 2, flop_rate=1e9)[0].binds == "compute"
    assert {floor.seconds for floor in costs.floors(model, 4096, 2)} == {None}


def test_the_same_model_with_other_groups() -> None:
    model = model_of({"model_type": "llama", "num_key_value_heads": 8})
    bytes_as = {k: costs.cache_bytes(costs.as_kv_heads(model, k) or model, 100, 2) for k in (None, 8, 1)}
    assert bytes_as[None] == 4 * bytes_as[8] == 32 * bytes_as[1] and bytes_as[8] == costs.cache_bytes(model, 100, 2)
    assert costs.as_kv_heads(model_of({"model_type": "gpt2"}), 8) is None  # 12 heads


SMALL: dict[str, Any] = {
    "hidden_size": 28, "num_attention_heads": 4, "num_hidden_layers": 5, "intermediate_size": 17, "vocab_size": 53,
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "key_bias"), [("deberta", 0), ("deberta-v2", 28)])
def test_projections_of_positions_are_those_of_the_terms(model_type: str, key_bias: int) -> None:
    """One for the keys where content meets position, one for the queries where position meets content."""
    both = {"pos_key_proj": 28 * 28 + key_bias, "pos_query_proj": 28 * 28 + 28}
    for kinds, names in (("c2p", ["pos_key_proj"]), ("p2c", ["pos_query_proj"]), ("c2p|p2c", [*both])):
        about = {"model_type": model_type, "relative_attention": True, "max_position_embeddings": 11}
        layer = model_of({**SMALL, **about, "pos_att_type": kinds}).layers[4]
        counts = layer.parameter_counts()
        assert {name: n for name, n in counts.items() if name.startswith("pos_")} == {
            name: both[name] for name in names
        }


def test_an_encoder_s_window_counts_both_sides() -> None:
    for around, every, windows in ((12, 3, [None, 13, 13, None, 13]), (13, 2, [None, 13, None, 13, None])):
        about = {"model_type": "modernbert", "local_attention": around, "global_attn_every_n_layers": every}
        assert [layer.window for layer in model_of({**SMALL, **about}).layers] == windows


def test_content_meets_each_distance_once_a_query_and_once_a_key() -> None:
    """c2p: every query with all distances; p2c: every key; the distances pass their matrices once a pass."""
    for keys, queries, made in ((True, False, 1), (False, True, 1), (True, True, 2)):
        terms = PositionTerms(22, keys, queries, grows=True)
        layer = AttentionLayer("encoder", 0, 8, 3, 3, 5, 5, positions=terms)
        for T, S, met in ((4, 7, 14), (13, 9, 22)):
            each = met * 3 * 5 * (T * keys + S * queries)
            assert layer.position_macs(T, S) == (met * 8 * 3 * 5 * made, each), (keys, queries, T, S)


def test_numbers_of_an_activation_and_layers_that_are_not_mixtures() -> None:
    plain = {**SMALL, "model_type": "apertus", "mlp_bias": False}
    learned = [part for part in model_of(plain).others if part.name == "activation"]
    assert [(part.parameters, part.room) for part in learned] == [(2, "mlp")] * 5
    experts = {"num_experts": 7, "moe_intermediate_size": 11, "shared_expert_intermediate_size": 13}
    mixture = {**SMALL, "model_type": "qwen2_moe", "num_key_value_heads": 2, **experts}
    for more, mixed in (
        ({"decoder_sparse_step": 1}, [0, 1, 2, 3, 4]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 3}, [2]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}, [1, 2, 4]),
        ({"decoder_sparse_step": 1, "num_experts": 0}, []),
    ):
        names = [part.name for part in model_of({**mixture, **more}).others if part.name in ("mlp", "experts")]
        assert [n for n, name in enumerate(names) if name == "experts"] == mixed, more


# --- learned positions ------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [name for name in SINGLE if architectures()[name].get("positions")])
def test_so_many_tokens_have_a_position_and_no_more(name: str) -> None:
    """RoBERTa's kin and MPNet count from behind the padding token, whose row and those before it no token has."""
    fields = random_config(name, random.Random(0), runs=True) | {"position_biased_input": True}
    fields = {key: value for key, value in fields.items() if key in architectures()[name]["defaults"]}
    config = config_of(name, fields)
    real, most = (
        build(name, config, device="cpu"),
        model_of({**fields, "model_type": name, "pad_token_id": 0}).positions,
    )
    assert most is not None
    with torch.no_grad():
        real(**inputs_of(name, config, most, source=4))
        with pytest.raises((IndexError, RuntimeError)):
            real(**inputs_of(name, config, most + 1, source=4))


def test_positions_behind_the_padding_token_of_the_config() -> None:
    sizes = {"model_type": "roberta", "max_position_embeddings": 514}
    assert [model_of({**sizes, **pad}).positions for pad in ({}, {"pad_token_id": 1}, {"pad_token_id": 3})] == [
        512,
        512,
        510,
    ]
    assert model_of({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 3}).positions == 512
    assert plan.of(sizes, context=(512, 513)).notes == ("beyond the 512 positions the model has learned: 513",)
