"""Models whose attention is in code of their own run on headwise: the numbers of transformers, seen head by head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from hf_models import B, T, padding, token_ids
from hf_plain_models import PLAIN, plain
from hf_seam_models import BY_NAME, DECODERS, ROWS, SeamRow, arguments, exact_of, fed, model_of, names, run, truth_of
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import headwise
import headwise.hf as hf
from headwise.hf.attention.lazy_tensors import LazyKeys
from headwise.hf.models.architectures import CACHE
from headwise.hf.models.support import attention_modules
from headwise.hf.own_code import recorded_ops as steps
from headwise.hf.own_code import tracer as running
from headwise.testing import assert_close_like_torch, largest_tensor

SIDES = ("none", "left", "right", "holes")


def assert_equal(row: SeamRow, of: Callable[[PreTrainedModel], Tensor], what: str, ours: Tensor | None = None) -> None:
    """As close to transformers' float64 as its float32 is, three times over.

    Some models take their softmax in float32 always, where float64's lowest number is an infinity: then what float32
    has in units of its largest number.
    """
    ours, theirs, exact = of(model_of(row)) if ours is None else ours, of(truth_of(row)), of(exact_of(row))
    if bool(exact.isfinite().all()):
        assert_close_like_torch(ours, exact, theirs, factor=3.0, what=f"{row.name}, {what}")
    else:
        assert (ours - theirs).abs().max() <= 16 * torch.finfo(ours.dtype).eps * theirs.abs().max(), (
            f"{row.name} {what}"
        )


# -- the numbers ------------------------------------------------------------------------------------------------------


@names(ROWS)
def test_logits_are_those_of_transformers(row: SeamRow) -> None:
    for side in SIDES:
        assert_equal(row, lambda model, side=side: run(model, side).logits[padding(side).bool()], f"padding {side}")
    with torch.no_grad():
        assert_equal(row, lambda model: model(token_ids()).logits, "no mask")


@names(ROWS)
def test_gradients_are_those_of_transformers(row: SeamRow) -> None:
    grads = []
    for model in (truth_of(row), model_of(row)):
        model.zero_grad()
        model(**arguments("right")).logits[padding("right").bool()].square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    theirs, ours = grads
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
    theirs, model = truth_of(row).generate(**arguments("left"), **how), model_of(row)
    for cache in (None, hf.make_cache(model, "paged", max_length=T + 7)):
        assert torch.equal(model.generate(**arguments("left"), **{CACHE: cache}, **how), theirs), f"{row.name} {cache}"


def test_an_int8_cache_is_read_in_place() -> None:
    """The code of these models turns the keys before it multiplies; no tensor is made of them for that."""
    for name in ("GPT-J", "Bloom", "MPT"):
        model = model_of(BY_NAME[name])
        cache = hf.make_cache(model, "paged", max_length=13, bits=8)
        with mock.patch.object(LazyKeys, "plain", side_effect=AssertionError("the keys were made")):
            ours = fed(model, cache)
        theirs = fed(truth_of(BY_NAME[name]), DynamicCache())
        assert 1e-4 < (ours - theirs).abs().max() < 0.05 * theirs.abs().max(), name


def test_a_static_cache_of_transformers() -> None:
    row = BY_NAME["GPT-J"]
    theirs, ours = (
        fed(model, StaticCache(config=model.config, max_cache_len=17)) for model in (truth_of(row), model_of(row))
    )
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
        with mock.patch.object(running, "weights", side_effect=AssertionError("nobody asked")):
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
    record = headwise.look.at(model, ids, repeats=None)
    assert len(record.heads) == 2 * row.heads
    for head in record.heads:
        matrix = weights[head.layer][0, head.head].double()
        entropy = -(matrix * matrix.clamp(min=1e-30).log()).sum(-1).mean()
        torch.testing.assert_close(torch.tensor(head.entropy, dtype=torch.float64), entropy, atol=1e-5, rtol=1e-5)


def test_the_probe_leaves_a_model_of_transformers_as_it_was() -> None:
    for row in ROWS:
        model = truth_of(row)
        before, state = run(model).logits, model.state_dict()
        with hf.probe(model) as seen:
            run(model)
        assert len(seen.calls) == 2 and model.config._attn_implementation == row.truth
        assert torch.equal(run(model).logits, before) and state.keys() == model.state_dict().keys()


# -- a row each -------------------------------------------------------------------------------------------------------


def main_output(out: Any) -> Tensor:
    output = next(out[name] for name in ("logits", "last_hidden_state", "language_output") if name in out)
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("family", PLAIN)
def test_plain_code_gives_the_numbers_of_eager(family: str) -> None:
    model, inputs, calls, heads = plain(family)
    real: Any = inputs.get("attention_mask", torch.ones(())).bool()
    outputs, grads = [], []
    for name in ("eager", "headwise"):
        model.set_attn_implementation(name)
        model.zero_grad()
        torch.manual_seed(5)  # one of them draws which patches it reads
        out = main_output(model(**inputs))
        out = out[real] if real.shape == out.shape[:2] else out
        out.square().mean().backward()
        outputs.append(out.detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    scale = float(outputs[0].abs().max())
    assert (outputs[1] - outputs[0]).abs().max() <= 1e-5 * scale, family
    assert grads[0].shape == grads[1].shape
    assert (grads[1] - grads[0]).abs().max() <= 1e-4 * grads[0].abs().max(), family
    with hf.probe(model) as seen, torch.no_grad():
        model(**inputs)
    assert [call.query.shape[1] for call in seen.calls] == [heads] * calls


@pytest.mark.parametrize("family", ["gpt_neox_japanese", "trocr", "xglm"])
def test_plain_decoders_give_the_tokens_of_eager(family: str) -> None:
    model, inputs, _, _ = plain(family)
    how = dict(max_new_tokens=7, min_new_tokens=7, do_sample=False)
    theirs = model.generate(**inputs, **how)
    model.set_attn_implementation("headwise")
    for cache in (None, hf.make_cache(model, "paged", max_length=T + 7)):
        assert torch.equal(model.generate(**inputs, **{CACHE: cache}, **how), theirs)


FAULTS = {
    "scale": ("Falcon MQA", "none", lambda options: options | {"scale": options["scale"] * 1.1}),
    "mask": ("Bloom", "left", lambda options: options | {"mask": None}),
    "window": ("GPT-Neo", "none", lambda options: options | {"mask": headwise.causal()}),
    "bias": ("MPT", "none", lambda options: options | {"mask": headwise.causal()}),
    "position": ("DeBERTa-v3", "none", lambda options: options | {"mask": None}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_would_show(fault: str) -> None:
    """The tolerances are far below what any part of the scores does."""
    name, side, change = FAULTS[fault]
    row, real = BY_NAME[name], steps.attend

    def faulty(module: Any, q: Any, k: Any, v: Any, dropout: float, backend: str, **options: Any) -> Tensor:
        return real(module, q, k, v, dropout, "auto", **change(options))

    with mock.patch.object(steps, "attend", faulty):
        moved = (run(model_of(row), side).logits - run(truth_of(row), side).logits)[padding(side).bool()].abs().max()
    assert moved > 1e-3 * run(truth_of(row), side).logits.abs().max()


def test_no_tensor_of_all_pairs_is_made() -> None:
    """Of 97 tokens: neither the scores of a head, nor the biases and distances that transformers makes."""
    length = 97
    for name, heads in (("Bloom", 5), ("MPNet", 5), ("DeBERTa-v3", 5)):
        row = BY_NAME[name]
        sizes = {key: 128 if value == 61 else value for key, value in row.sizes.items()}
        config = SeamRow(name, row.model, row.config, sizes | dict(vocab_size=53)).config_of()
        model = getattr(transformers, row.model)._from_config(config, attn_implementation="headwise").eval()
        ids = torch.randint(2, 53, (1, length))
        strips = mock.patch("headwise.ops.row_blocks.BLOCK_ELEMENTS", 16 * length)
        with strips, torch.no_grad(), largest_tensor() as seen:
            model(ids)
        assert seen.numel < heads * length * length, f"{name}: {seen.shape}"
    with mock.patch("headwise.hf.attention.mask._additive", side_effect=AssertionError("the mask was made")):
        run(model_of(BY_NAME["Falcon ALiBi"]))


def test_what_their_code_does_not_reach_refuses_them() -> None:
    """Serving and splitting hand keywords to the interface's functions, which these modules never call."""
    config = transformers.BloomConfig(hidden_size=24, n_head=4, n_layer=1, vocab_size=11)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="headwise").eval()
    with pytest.raises(hf.ModelError, match=r"BloomAttention computes attention in code of its own, and .*serving"):
        hf.serving(model).__enter__()
    with pytest.raises(hf.ModelError, match="code of its own, and context_parallel is for models that call"):
        hf.context_parallel(model).__enter__()
