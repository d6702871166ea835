"""Attention weights that a model returns carry the gradients that eager's carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, inputs, logits, real_rows
from hf_seam_models import BY_NAME as OWN_CODE
from hf_seam_models import arguments, model_of, truth_of
from native_cases import collected
from test_hf_attention import SomeAttention
from torch import Tensor
from transformers import PreTrainedModel

import headwise
import headwise.hf
from headwise.hf.attention.function import headwise_attention
from headwise.nn import trace
from headwise.ops.statistics.weights import weighted_values

pytestmark = pytest.mark.unchecked
NAMES = ("BERT", "GPT-2", "Llama GQA", "Gemma2 softcap", "gpt-oss sinks", "T5", "BART", "Whisper", "ViT")
FIELDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def gradients(model: PreTrainedModel, sample: dict[str, Any], rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The name, the weights and their gradient of each attention that a model returns, for a drawn loss."""
    out = model(**sample, output_attentions=True)
    returned = [(f"{name} {n}", x) for name in FIELDS for n, x in enumerate(getattr(out, name, None) or ())]
    assert returned and all(x.requires_grad for _, x in returned)
    for _, x in returned:
        x.retain_grad()
    main = out.logits if hasattr(out, "logits") else out.last_hidden_state
    loss = torch.randn(main.shape, generator=torch.Generator().manual_seed(5)) * main
    loss[rows].sum().backward()
    for name, x in returned:
        assert x.grad is not None, name
        yield name, x.detach(), x.grad


def assert_gradients_of_eager(eager: Any, ours: Any) -> None:
    for (name, w, theirs), (_, v, mine) in zip(eager, ours, strict=True):
        torch.testing.assert_close(v, w, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        off = (mine - theirs).abs().max() / theirs.abs().max()
        assert theirs.abs().max() > 0 and off < 1e-4, f"{name}: {off}"


def test_the_gradients_of_weights_are_those_of_eager() -> None:
    with collected() as attempt:
        for name in NAMES:

            def check(name: str) -> None:
                row = BY_NAME[name]
                model, sample, rows = row.build(), inputs(row), real_rows(row, "none")
                eager = list(gradients(model, sample, rows))
                model.set_attn_implementation("headwise")
                assert_gradients_of_eager(eager, gradients(model, sample, rows))

            attempt(name, check, name)


@pytest.mark.parametrize("name", ["Bloom", "GPT-Neo", "MPT", "Falcon GQA", "MPNet", "DeBERTa-v3"])
def test_those_of_models_with_attention_of_their_own(name: str) -> None:
    sample = arguments("none")
    rows = torch.ones_like(sample["input_ids"], dtype=torch.bool)
    of = OWN_CODE[name]
    assert_gradients_of_eager(gradients(truth_of(of), sample, rows), gradients(model_of(of), sample, rows))


def test_dropout_is_that_of_eager() -> None:
    """In training the weights are returned after dropout, and out is made of them."""
    row = BY_NAME["BERT"]
    model, sample = row.build().train(), inputs(row)
    model.config.attention_probs_dropout_prob = 0.5
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    rows, seen = real_rows(row, "none"), []
    for name in ("eager", "headwise"):
        model.set_attn_implementation(name)
        torch.manual_seed(11)
        seen.append(list(gradients(model, sample, rows)))
    assert_gradients_of_eager(*seen)
    assert (seen[1][0][1] == 0).any(), "nothing was dropped"


def test_without_a_gradient_a_kernel_computes_the_output() -> None:
    row = BY_NAME["Llama GQA"]
    model = row.build()
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        plain, sample = logits(model, inputs(row)), inputs(row)
        out = model(**sample, output_attentions=True)
    assert torch.equal(out.logits, plain)
    assert not any(x.requires_grad for x in out.attentions)


def test_an_output_that_a_probe_replaces_leaves_the_weights_without_a_gradient() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    with headwise.hf.probe(model, each=lambda call: torch.zeros(*call.query.shape[:3], call.value.shape[3])):
        out = model(**inputs(BY_NAME["Llama GQA"]), output_attentions=True)
    assert out.logits.requires_grad and not any(x.requires_grad for x in out.attentions)


def test_room_that_is_not_filled_yet_has_weight_and_gradient_0() -> None:
    """A static cache passes keys to come; what is returned has a column for each."""
    q, k, v = torch.randn(2, 4, 3, 5, requires_grad=True), torch.randn(2, 2, 7, 5), torch.randn(2, 2, 7, 6)
    out, weights = headwise_attention(SomeAttention(), q, k, v, None, output_attentions=True)
    assert weights is not None and weights.shape == (2, 4, 3, 7) and not weights[..., 3:].any()
    weights.retain_grad()
    wanted = torch.randn(out.shape)
    (out * wanted).sum().backward()
    expected = wanted.transpose(1, 2) @ v.repeat_interleave(2, 1).mT
    torch.testing.assert_close(weights.grad[..., :3], expected[..., :3])
    assert not weights.grad[..., 3:].any()


def test_values_that_no_row_may_attend_do_not_reach_the_output() -> None:
    weights = torch.rand(1, 4, 3, 5, requires_grad=True)
    value = torch.randn(1, 2, 5, 7)
    value[0, 0, 4], value[0, 1, 2] = torch.nan, torch.inf
    out = weighted_values(weights * torch.ones(3, 5).tril(2), value, headwise.causal())
    assert out[0, :2, :2].isfinite().all() and out[0, :2, 2].isnan().all(), "the last key is the last row's alone"
    assert out[0, 2:, 0].isnan().all() and out[0, 2:, 2].isnan().all(), "key 2 is every row's"
    (gradient,) = torch.autograd.grad(out[0, :2, :2].sum(), weights)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_trace_has_the_gradient_of_its_weights(masked: bool) -> None:
    mha = headwise.MultiHeadAttention(12, 6, num_kv_heads=2, head_dim=5)
    x, mask = torch.randn(2, 7, 12), headwise.causal() if masked else None
    result = trace(mha, x, mask=mask)
    weights = result["weights"].tensor
    weights.retain_grad()
    wanted = torch.randn(2, 7, 12)
    (result["output"].tensor * wanted).sum().backward()
    heads = (wanted @ mha.o_proj.weight).unflatten(-1, (6, 5)).transpose(1, 2)
    expected = heads @ result["v_heads"].tensor.detach().repeat_interleave(3, 1).mT
    torch.testing.assert_close(weights.grad, expected, atol=1e-5, rtol=1e-4)
    theirs = {name: p.grad.clone() for name, p in mha.named_parameters()}
    mha.zero_grad()
    (mha(x, mask=mask) * wanted).sum().backward()
    for name, p in mha.named_parameters():
        torch.testing.assert_close(theirs[name], p.grad, atol=1e-5, rtol=1e-4)
