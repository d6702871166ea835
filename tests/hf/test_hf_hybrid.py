"""Hybrid models: make_cache with their states beside, look, and prune, equal to transformers' own cache and model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draw import slow_except
from hf_models import PAD, VOCAB, Row, padding, token_ids
from hybrid_models import HYBRIDS
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, MiniMaxConfig, MiniMaxForCausalLM, PreTrainedModel
from transformers.cache_utils import LinearAttentionAndSlidingWindowAttentionLayer, LinearAttentionLayer

from headwise import hf, look, plan, reshape
from headwise.cache import StaticCache
from headwise.hf import ModelError, make_cache
from headwise.hf.decode.cache_layers import FullLayer
from headwise.hf.decode.hybrid_layers import hybrid_layer
from headwise.hf.models.architectures import CACHE

pytestmark = pytest.mark.unchecked
T, NEW, WIDE = 11, 7, 1e-4
# One of each kind of state, and both ways of having it: in some layers, or beside attention in all.
FEW = [row for row in HYBRIDS if row.name in ("Qwen3.5 MoE", "LFM2", "Granite 4", "Falcon-H1", "Zamba2", "Kimi Linear")]
HYBRID = pytest.mark.parametrize("row", slow_except(HYBRIDS, FEW), ids=lambda row: row.name)
MODELS: dict[str, PreTrainedModel] = {}


def model_of(row: Row, implementation: str) -> PreTrainedModel:
    if row.name not in MODELS:
        MODELS[row.name] = row.build()
    MODELS[row.name].set_attn_implementation(implementation)
    return MODELS[row.name]


def generated(model: PreTrainedModel, cache: Any, side: str, **how: Any) -> tuple[Tensor, Tensor]:
    """(the tokens, their logits) of a batch that is padded on one side."""
    how = dict(max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=PAD, do_sample=False) | how
    out = model.generate(
        input_ids=token_ids(T, seed=5),
        attention_mask=padding(side, T),
        **{CACHE: cache},
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )
    return out.sequences, torch.stack(out.logits)


def test_there_are_ten_families() -> None:
    assert len({row.name.split()[0] for row in HYBRIDS}) >= 10


@pytest.mark.slow
@HYBRID
@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_generation_is_that_of_transformers_own_cache(row: Row, kind: Any, side: str) -> None:
    """A batch of several texts, also padded; then the same cache again, after a reset."""
    expected = generated(model := model_of(row, "eager"), DynamicCache(config=model.config), side)
    cache = make_cache(model_of(row, "headwise"), kind)
    for _ in range(2):
        tokens, logits = generated(model, cache, side)
        assert torch.equal(tokens, expected[0])
        assert torch.allclose(logits, expected[1], rtol=WIDE, atol=WIDE)
        assert cache.get_seq_length() == T + NEW - 1
        cache.reset()


@HYBRID
def test_the_layers_with_attention_are_headwise_s_and_the_states_transformers_own(row: Row) -> None:
    model = model_of(row, "headwise")
    theirs, cache = DynamicCache(config=model.config), make_cache(model, "paged")
    assert (cache.nbytes, cache.state_nbytes) == (0, 0)
    for one in (theirs, cache):
        generated(model, one, "left")
    states = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    ours = [layer for layer in cache.layers if isinstance(layer, FullLayer)]
    assert states and ours and all(layer.nbytes > 0 for layer in ours)
    expected = sum(
        state.nbytes
        for layer in theirs.layers
        if isinstance(layer, LinearAttentionLayer)
        for kept in (layer.conv_states, layer.recurrent_states)
        for state in kept.values()
        if state is not None
    )
    assert cache.state_nbytes == expected > 0
    for own, other in zip(cache.layers, theirs.layers, strict=True):
        if isinstance(own, FullLayer):
            assert torch.allclose(own.keys, other.keys, rtol=WIDE, atol=WIDE)


@HYBRID
def test_int8_keeps_the_states_as_they_are(row: Row) -> None:
    model = model_of(row, "headwise")
    plain, small = make_cache(model), make_cache(model, bits=8)
    expected, logits = (
        generated(model, cache, "none", max_new_tokens=1, min_new_tokens=1)[1] for cache in (plain, small)
    )
    assert torch.allclose(logits, expected, rtol=0.1, atol=0.2)
    assert small.nbytes < plain.nbytes and small.state_nbytes == plain.state_nbytes


@HYBRID
def test_beam_search_reorders_states_with_their_rows(row: Row) -> None:
    expected = generated(model := model_of(row, "eager"), DynamicCache(config=model.config), "left", num_beams=3)[0]
    assert torch.equal(
        generated(model, make_cache(model_of(row, "headwise"), "paged"), "left", num_beams=3)[0], expected
    )


@pytest.mark.parametrize("row", [row for row in HYBRIDS if row.name == "Falcon-H1"], ids=lambda row: row.name)
def test_tokens_taken_back_are_gone_from_the_states_as_from_transformers_own(row: Row) -> None:
    ids, logits, states = token_ids(T + 4, seed=7), [], []
    for implementation in ("eager", "headwise"):
        model = model_of(row, implementation)
        cache = DynamicCache(config=model.config) if implementation == "eager" else make_cache(model, "static")
        for layer in cache.layers:
            if isinstance(layer, LinearAttentionLayer):
                layer.activate_past_recording()
        with torch.no_grad():
            for part in ids.split([T, 4], 1):
                model(part, **{CACHE: cache})
            cache.crop(-3)
            logits.append(model(ids[:, 3:5], **{CACHE: cache}).logits)
        assert cache.get_seq_length() == T + 3
        layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
        states.append([state for layer in layers for state in layer.conv_states.values()])
    torch.testing.assert_close(logits[1], logits[0], rtol=WIDE, atol=WIDE)
    torch.testing.assert_close(states[1], states[0], rtol=WIDE, atol=WIDE)


def test_a_layer_with_a_state_and_a_window_keeps_the_window() -> None:
    """No model here has such a layer; transformers' own says what it keeps."""
    theirs = LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=5)
    ours = hybrid_layer(theirs, "static", 2000, None)
    assert ours.get_max_length() == theirs.sliding_window == 5 and ours.is_sliding
    for tokens in (7, 300, 1, 290, 1):
        key, value = torch.randn(2, 2, tokens, 3), torch.randn(2, 2, tokens, 3)
        ours.update(key, value)
        theirs.update(key, value)
    kept, _ = ours.update(key, value)
    expected, _ = theirs.update(key, value)
    assert torch.equal(torch.as_tensor(kept)[:, :, -5:], expected[:, :, -5:])
    assert ours.get_seq_length() == theirs.get_seq_length() == 600
    assert ours.cache.nbytes < StaticCache(2, 2, 3, capacity=600).nbytes


def test_a_state_of_the_wrong_row_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: beam search moves the keys and leaves the states."""
    row = next(row for row in HYBRIDS if row.name == "Falcon-H1")
    how: dict[str, Any] = dict(num_beams=3, max_new_tokens=13, min_new_tokens=13)
    expected = generated(model := model_of(row, "headwise"), DynamicCache(config=model.config), "left", **how)[0]
    monkeypatch.setattr(LinearAttentionLayer, "reorder_cache", lambda layer, beam_idx: None)
    assert not torch.equal(generated(model, make_cache(model, "paged"), "left", **how)[0], expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the linear attention of some is no attention of ours
@HYBRID
def test_look_sees_every_head_of_the_layers_with_attention(row: Row) -> None:
    """The statistics of each head are those of the weights that eager attention gives out."""
    model = model_of(row, "headwise")
    ids = token_ids(T + 2, seed=7)[:1]
    found = look.at(model, ids)
    with torch.no_grad():
        given = model_of(row, "eager")(ids, output_attentions=True, use_cache=False).attentions
    weights = [w for w in given if w is not None and w.ndim == 4]
    largest = [float(one) for w in weights for one in w[0].amax(-1).mean(-1)]
    assert largest and [head.largest for head in found.heads] == pytest.approx(largest, rel=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_with_a_cache_class_of_its_own_is_refused_by_name() -> None:
    config = MiniMaxConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = MiniMaxForCausalLM._from_config(config, attn_implementation="headwise")
    with pytest.raises(ModelError, match=r"MiniMaxForCausalLM .*MiniMaxCache"):
        make_cache(model)


# --- prune ------------------------------------------------------------------------------------------------------------

GROUP = [0, 1]  # of two key-value heads with two query heads each
NOT_PRUNED = {"OLMo hybrid": "run over all heads together", "Zamba2": "stores its heads is not known"}


def saved_as(row: Row, folder: Path) -> Path:
    row.build().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")  # the linear attention of some is no attention of ours
@HYBRID
def test_pruned_models_compute_the_original_with_these_heads_off(row: Row, tmp_path: Path) -> None:
    """Each layer with attention loses a group; states, experts and the other layers stay as they are."""
    source = saved_as(row, tmp_path / "source")
    with hf.checkpoint(source) as opened:
        if row.name in NOT_PRUNED:
            with pytest.raises(ValueError, match=NOT_PRUNED[row.name]):
                reshape.prune(opened, tmp_path / "pruned", heads={1: GROUP}, proof=None)
            return
        layers = [layer.index for layer in plan.of(source).model.layers]
        reshape.prune(opened, tmp_path / "pruned", heads=dict.fromkeys(layers, GROUP), proof=None)
    plain_experts: dict[str, Any] = dict(experts_implementation="eager")  # the grouped product wants other sizes
    before = AutoModelForCausalLM.from_pretrained(source, attn_implementation="headwise", **plain_experts).eval()
    after = AutoModelForCausalLM.from_pretrained(
        tmp_path / "pruned", attn_implementation="eager", **plain_experts
    ).eval()
    assert after.config.num_attention_heads == 2
    ids = token_ids(T, seed=5)
    gate = torch.tensor([0.0, 0.0, 1.0, 1.0])

    with torch.no_grad():
        with hf.probe(before, lambda call: call.attend() * gate[:, None, None]):
            expected = before(ids).logits
        plain = before(ids).logits
        assert torch.allclose(after(ids).logits, expected, rtol=WIDE, atol=WIDE)
    assert not torch.allclose(plain, expected, rtol=WIDE, atol=WIDE)


@pytest.mark.slow
def test_prune_proves_a_hybrid_checkpoint_equal_before_it_is_left(tmp_path: Path) -> None:
    """In a process with stock transformers, whose states have no keys to count, and whose config holds Infinity."""
    row = next(row for row in HYBRIDS if row.name == "Granite 4")
    with hf.checkpoint(saved_as(row, tmp_path / "source")) as opened:
        reshape.prune(opened, tmp_path / "pruned", heads={1: GROUP})
    assert "Infinity" in (tmp_path / "pruned" / "config.json").read_text("utf8")
