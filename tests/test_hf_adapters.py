"""Models whose attention is in code of their own run on headwise: the numbers of transformers, seen head by head."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from hf_models import PAD, VOCAB, B, T, padding, token_ids
from hf_seam_models import BERT, BY_NAME, DECODERS, DEBERTA, IDS, ROWS, SeamRow, exact_of, fed, given, model_of, truth_of
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache

import headwise
import headwise.hf as hf
from headwise.hf import attention as bridge
from headwise.hf import scores
from headwise.hf.interface import attention_modules
from headwise.hf.lazy import LazyKeys
from headwise.hf.masks import Hidden, StructuralMask
from headwise.testing import assert_close_like_torch, largest_tensor

SIDES = ("none", "left", "right", "holes")


def names(rows: tuple[SeamRow, ...]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def run(model: nn.Module, side: str = "left", **more: Any) -> Any:
    with torch.no_grad():
        return model(**given(side), **more)


def assert_equal(row: SeamRow, of: Callable[[PreTrainedModel], Tensor], what: str, ours: Tensor | None = None) -> None:
    """As close to transformers' float64 as its float32 is, three times over.

    Some models take their softmax in float32 always, where float64's lowest number is an infinity: then what float32
    has in units of its largest number.
    """
    ours, theirs, exact = of(model_of(row)) if ours is None else ours, of(truth_of(row)), of(exact_of(row))
    if bool(exact.isfinite().all()):
        assert_close_like_torch(ours, exact, theirs, factor=3.0, what=f"{row.name}, {what}")
    else:
        assert (ours - theirs).abs().max() <= 16 * torch.finfo(ours.dtype).eps * theirs.abs().max(), f"{row.name} {what}"


# -- the numbers ------------------------------------------------------------------------------------------------------


@names(ROWS)
def test_logits_are_those_of_transformers(row: SeamRow) -> None:
    for side in SIDES:
        assert_equal(row, lambda model, side=side: run(model, side).logits[padding(side).bool()], f"padding {side}")
    with torch.no_grad():
        assert_equal(row, lambda model: model(token_ids()).logits, "no mask")


@names(ROWS)
def test_gradients_are_those_of_transformers(row: SeamRow) -> None:
    found = []
    for model in (truth_of(row), model_of(row)):
        model.zero_grad()
        model(**given("right")).logits[padding("right").bool()].square().mean().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    theirs, ours = found
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-7, msg=name)


@names(DECODERS)
def test_caches_give_the_logits_of_transformers(row: SeamRow) -> None:
    """Prefill, single tokens and a chunk: transformers' cache, and ours in every kind."""
    of = {
        "dynamic": lambda model: DynamicCache(config=model.config),
        "static": lambda model: hf.make_cache(model, "static", max_length=13),
        "paged": lambda model: hf.make_cache(model, "paged", max_length=13),
    }
    for side in ("left", "none"):
        for kind, make in of.items():
            model = model_of(row)
            assert_equal(
                row,
                lambda model, side=side: fed(model, DynamicCache(config=model.config), side),
                f"{kind} cache, padding {side}",
                fed(model, make(model), side),
            )


@names(DECODERS)
def test_tokens_are_those_of_transformers(row: SeamRow) -> None:
    how = dict(max_new_tokens=7, min_new_tokens=7, do_sample=False, use_cache=True)
    theirs, model = truth_of(row).generate(**given("left"), **how), model_of(row)
    for cache in (None, hf.make_cache(model, "paged", max_length=T + 7)):
        assert torch.equal(model.generate(**given("left"), past_key_values=cache, **how), theirs), f"{row.name} {cache}"


def test_an_int8_cache_is_read_in_place() -> None:
    """The code of these models turns the keys before it multiplies; no tensor is made of them for that."""
    for name in ("GPT-J", "Bloom", "MPT"):
        model = model_of(BY_NAME[name])
        cache = hf.make_cache(model, "paged", max_length=13, dtype=torch.int8)
        with mock.patch.object(LazyKeys, "plain", side_effect=AssertionError("the keys were made")):
            ours = fed(model, cache)
        theirs = fed(truth_of(BY_NAME[name]), DynamicCache())
        assert 1e-4 < (ours - theirs).abs().max() < 0.05 * theirs.abs().max(), name


def test_a_static_cache_of_transformers() -> None:
    row = BY_NAME["GPT-J"]
    theirs, ours = (fed(model, StaticCache(config=model.config, max_cache_len=17)) for model in (truth_of(row), model_of(row)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_window_in_a_static_cache_is_refused() -> None:
    """The code counts it from the end of the room that is not filled yet: transformers' own numbers are wrong there."""
    model = model_of(BY_NAME["GPT-Neo"])
    text = r"GPTNeoSelfAttention: layer 1 has a window, .* use transformers.DynamicCache\(\) or headwise.hf.make_cache"
    with pytest.raises(hf.ModelError, match=text):
        fed(model, StaticCache(config=model.config, max_cache_len=17))


@names(ROWS)
def test_attentions_asked_for_are_the_real_weights(row: SeamRow) -> None:
    if row.truth != "eager":
        return
    theirs, ours = (run(model, "left", output_attentions=True).attentions for model in (truth_of(row), model_of(row)))
    assert len(ours) == len(theirs) == 2
    real = padding("left").bool()[:, None, :, None]
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is Tensor and a.shape == b.shape == (B, row.heads, T, T)
        torch.testing.assert_close(a * real, b * real, atol=2e-6, rtol=1e-5)


def test_weights_are_made_only_where_they_are_asked_for() -> None:
    for row in ROWS:
        with mock.patch.object(scores, "weights", side_effect=AssertionError("nobody asked")):
            run(model_of(row))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_transformers_is(dtype: torch.dtype) -> None:
    for row in (BY_NAME["GPT-J"], BY_NAME["Bloom"], BY_NAME["Falcon ALiBi"], BY_NAME["DeBERTa-v3"]):
        ours, theirs = (run(copy.deepcopy(of(row)).to(dtype)).logits for of in (model_of, truth_of))
        exact, real = run(truth_of(row)).logits.double(), padding("left").bool()
        assert ours.dtype == dtype
        off, allowed = ((x.double() - exact)[real].abs().max() for x in (ours, theirs))
        assert off <= 2 * allowed, f"{row.name}: {off} {allowed}"


def test_dropout_acts_in_training_alone() -> None:
    row = BY_NAME["Bloom"]
    config = row.config_of()
    config.attention_dropout = 0.5
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="headwise")
    with hf.probe(model) as seen:
        run(model.train())
        run(model.eval())
    assert [call.dropout for call in seen.calls] == [0.5, 0.5, 0.0, 0.0]


# -- what is seen -----------------------------------------------------------------------------------------------------


@names(ROWS)
def test_every_head_is_seen_and_each_counts(row: SeamRow) -> None:
    model = model_of(row)
    before = run(model).logits
    with hf.probe(model) as seen:
        run(model)
    assert [call.module for call in seen.calls] == list(attention_modules(model))
    for layer, call in enumerate(seen.calls):
        assert call.query.shape[:3] == (B, row.heads, T)
        gate = torch.ones(row.heads, 1, 1)
        gate[layer + 1] = 0

        def each(call: Any, layer: int = layer, gate: Tensor = gate) -> Tensor | None:
            return call.attend() * gate if call.order == layer else None

        with hf.probe(model, each):
            moved = run(model).logits - before
        assert moved.abs().max() > 1e-3 * before.abs().max()


@names((BY_NAME["GPT-Neo"], BY_NAME["Falcon ALiBi"], BY_NAME["DeBERTa-v2"], BY_NAME["MPNet"]))
def test_look_s_scores_are_those_of_the_weights(row: SeamRow) -> None:
    """Of each head, from the weights that transformers gives where its eager attention is right."""
    ids, model = token_ids(17)[:1], model_of(row)
    with torch.no_grad():
        weights = (truth_of(row) if row.truth == "eager" else model)(ids, output_attentions=True).attentions
    found = headwise.look.at(model, ids, repeats=None)
    assert len(found.heads) == 2 * row.heads
    for head in found.heads:
        matrix = weights[head.layer][0, head.head].double()
        entropy = -(matrix * matrix.clamp(min=1e-30).log()).sum(-1).mean()
        torch.testing.assert_close(torch.tensor(head.entropy, dtype=torch.float64), entropy, atol=1e-5, rtol=1e-5)


def test_a_model_is_switched_and_switched_back() -> None:
    for row in ROWS:
        model = truth_of(row)
        model = copy.deepcopy(model)
        before = run(model).logits
        with mock.patch.object(scores, "attend", side_effect=AssertionError("not on headwise")):
            assert torch.equal(run(model).logits, before)
        model.set_attn_implementation("headwise")
        assert model.config._attn_implementation == "headwise"
        with mock.patch.object(scores, "attend", side_effect=KeyError("here")), pytest.raises(KeyError, match="here"):
            run(model)
        model.set_attn_implementation(row.truth)
        assert torch.equal(run(model).logits, before), "bit for bit"


def test_the_probe_leaves_a_model_of_transformers_as_it_was() -> None:
    for row in ROWS:
        model = truth_of(row)
        before, state = run(model).logits, model.state_dict()
        with hf.probe(model) as seen:
            run(model)
        assert len(seen.calls) == 2 and model.config._attn_implementation == row.truth
        assert torch.equal(run(model).logits, before) and state.keys() == model.state_dict().keys()
