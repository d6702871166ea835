"""Plans of models whose sizes all differ, counted another way: tensors, products as they run, arithmetic by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from plan_models import build, config_of
from torch.utils.flop_counter import FlopCounterMode

from headwise.hf.models.architectures import CACHE
from headwise.plan import units
from headwise.plan.costs import totals as costs
from headwise.plan.model.layer import AttentionLayer, QkNorm
from headwise.plan.model.model import model_of
from headwise.plan.ranks.communication import Link, layout_cost
from headwise.plan.ranks.rank_plan import over
from headwise.plan.ranks.sharding import MeshCall

pytestmark = pytest.mark.unchecked
SIZES: dict[str, Any] = {
    "hidden_size": 30, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 17, "vocab_size": 53,
}  # fmt: skip
GQA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64}
APART: dict[str, Any] = {
    **SIZES,
    "relative_attention": True,
    "max_position_embeddings": 40,
    "max_relative_positions": 11,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GQA, "head_dim": 14}),
    "norm of each head": ("stablelm", {**GQA, "hidden_size": 48, "qk_layernorm": True}),
    "norm of a head": ("qwen3", {**GQA, "head_dim": 14}),
    "norm of all heads": ("olmo2", GQA | {"hidden_size": 48}),
    "c2p": ("deberta-v2", {**APART, "pos_att_type": ["c2p"]}),
    "p2c": ("deberta-v2", {**APART, "pos_att_type": ["p2c"]}),
    "both": ("deberta-v2", {**APART, "pos_att_type": ["c2p", "p2c"]}),
    "shared": ("deberta-v2", {**APART, "pos_att_type": ["c2p", "p2c"], "share_att_key": True}),
}  # fmt: skip
BATCH = 2


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_products_are_those_of_the_model(name: str) -> None:
    """Those of content and position in disentangled attention among them."""
    kind, fields = MODELS[name]
    config, ours = config_of(kind, fields), model_of({**fields, "model_type": kind})
    real = build(kind, config, device="cpu")
    assert ours.total_parameters() == sum(p.numel() for p in real.parameters())
    for tokens in (5, 13, 29):
        with FlopCounterMode(display=False) as seen:
            ids = torch.randint(3, 53, (BATCH, tokens), generator=torch.Generator().manual_seed(0))
            real(ids, **({} if ours.is_encoder else {"logits_to_keep": 1}))
        cost = costs.prefill(ours, tokens, batch=BATCH)
        assert seen.get_total_flops() == cost.projections + cost.dense + cost.rest, tokens


def test_norms_of_queries_and_keys_have_a_number_each_of_their_own_heads() -> None:
    H, K, D = 6, 2, 7
    wanted: dict[QkNorm, int] = {"": 0, "head": D + D, "each": H * D + K * D, "all": H * D + K * D}
    for (over_what, numbers), biased in itertools.product(wanted.items(), (False, True)):
        layer = AttentionLayer("self", 0, 30, H, K, D, 5, qk_norm=over_what, qk_norm_bias=biased)
        assert layer.parameter_counts().get("qk_norm", 0) == numbers * (1 + biased)


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_pair_costs_the_products_that_are_computed() -> None:
    """Forward scores (D) and a weighted sum (V); backward scores again, gradients of weights and of values (V), of
    queries and of keys (D)."""
    D, V, T = 5, 11, 13
    call = MeshCall(T, T, 6, 3, D, V, batch=2)
    q, k = (torch.randn(2, 6, T, D) for _ in range(2))
    v, there = (torch.randn(2, 6, T, V) for _ in range(2))
    with FlopCounterMode(display=False) as forward:
        w = (q @ k.mT).softmax(-1)
        _ = w @ v
    with FlopCounterMode(display=False) as backward:
        again = (q @ k.mT).softmax(-1)
        _, scores = again.mT @ there, there @ v.mT
        _, _ = scores @ k, scores.mT @ q
    share = Fraction(call.pairs(T), T * T)  # of all pairs the mask allows these
    for seen, back in ((forward, False), (backward, True)):
        cost = layout_cost(call, "ring", 1, flop_rate=1.0, backward=back)
        assert cost.compute_seconds == seen.get_total_flops() * share


def test_efficiency_is_the_share_of_the_ranks_that_speeds_up() -> None:
    """Speed-up over the smallest grid, divided by how many times its ranks there are."""
    scale = over("llama-3-8b", "50GB/s,2us", tensor=2, ranks=2, tokens=4096, flops="900TF", bandwidth="3TB/s").scaling
    for tokens in {row.tokens for row in scale}:
        rows = [row for row in scale if row.tokens == tokens]
        first = rows[0]
        assert first.ranks == 2 and first.efficiency == 1.0
        for row in rows:
            speed_up = first.prefill_seconds / row.prefill_seconds
            assert row.efficiency == pytest.approx(speed_up / (row.ranks / first.ranks), rel=1e-12)
            assert 0 < (row.efficiency or 0) <= 1 + 1e-9
        assert (rows[3].efficiency or 0) < 2 < rows[0].prefill_seconds / rows[3].prefill_seconds


@pytest.mark.parametrize("power", range(7))
def test_every_prefix_is_its_power(power: int) -> None:
    letter = ("", *"KMGTPE")[power]
    for written in {letter, letter.lower()}:
        assert units.rate(f"4.5{written}B/s", "bandwidth") == float(Fraction(9, 2) * 1000**power)
        assert units.rate(f"4.5 {written}FLOPS", "flops") == float(Fraction(9, 2) * 1000**power)
        if power:
            assert units.rate(f"3{written}iB/s", "bandwidth") == 3 * 2.0 ** (10 * power)
    assert units.show_bytes(3 * 1024**power) == (f"3 {letter}iB" if power else "3 B")
    assert units.show(3 * 1000**power, "B") == f"3 {letter}B"
    assert units.show(1000 ** (power + 1) * 0.9996, "B") == f"1 {'KMGTPEZ'[power]}B"


@pytest.mark.parametrize(("unit", "size"), [("s", 1), ("ms", 1000), ("us", 10**6), ("µs", 10**6), ("ns", 10**9)])
def test_every_unit_of_time_is_its_size(unit: str, size: int) -> None:
    speed, seconds = units.link(f"7GB/s,{3}{unit}")
    assert (speed, seconds) == (7e9, pytest.approx(float(Fraction(3, size)), rel=1e-12))
    assert Link(speed, seconds).seconds(14e9, 5) == pytest.approx(2 + 15 / size, rel=1e-12)


def test_a_plan_of_a_cache_is_the_bytes_of_its_tensors() -> None:
    kind, fields = MODELS["llama"]
    real = build(kind, config_of(kind, fields), device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        cache = real(torch.arange(3, 22)[None].expand(2, -1), use_cache=True)[CACHE]
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert costs.cache_bytes(model_of({**fields, "model_type": kind}), 19, 2, batch=2) == held


def test_one_more_token_of_a_decoder_is_cached_in_its_own_layers_alone() -> None:
    """What the cache of an encoder-decoder grows by: keys and values of the decoder, none of what it reads."""
    from transformers import EncoderDecoderCache

    sizes = dict(d_model=24, d_kv=5, num_heads=3, num_layers=3, num_decoder_layers=2, d_ff=17, vocab_size=53)
    config = config_of("t5", {**sizes, "pad_token_id": 0, "decoder_start_token_id": 0})
    model = build("t5", config)  # sizes need no numbers
    seen = []
    with torch.no_grad():
        for tokens in (4, 5):
            ids = (torch.ones(1, n, dtype=torch.long, device="meta") for n in (7, tokens))
            out = model(next(ids), decoder_input_ids=next(ids), use_cache=True)
            cache = out.past_key_values
            assert isinstance(cache, EncoderDecoderCache)
            layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
            seen.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))
    assert costs.bytes_per_token(model_of(config.to_dict()), 4) == seen[1] - seen[0] > 0
