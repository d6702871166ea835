"""Models whose attention is code of their own take steps in one call, too: with the bits that `Seam` gives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from backends import needs_native
from hf_models import VOCAB, stir
from hf_seam_models import BY_NAME
from hf_steps import decoded, generated, prompt, steps
from native_cases import collected
from transformers import PreTrainedModel

import headwise.hf
from headwise.hf import make_cache, own_steps
from headwise.hf.architectures import CACHE
from headwise.hf.running import Seam

pytestmark = needs_native
NAMES = (
    *("GPT-J", "CodeGen", "GPT-Neo", "Bloom", "MPT", "XGLM"),
    *("Falcon MQA", "Falcon MHA", "Falcon GQA", "Falcon ALiBi"),
)


def a_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny one on headwise."""
    if name == "XGLM":
        config = transformers.XGLMConfig(
            vocab_size=VOCAB, d_model=28, attention_heads=4, num_layers=2, ffn_dim=17, max_position_embeddings=64,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        model = transformers.XGLMForCausalLM._from_config(config, attn_implementation="headwise")
        stir(model)
    else:
        model = BY_NAME[name].build("headwise")
    return model.to(dtype).eval()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_logits_of_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with collected() as attempt:

        def check(rows: int, padded: bool, dtype: torch.dtype, kind: str, small: torch.dtype | None) -> None:
            text = prompt(rows, padded)
            assert steps(monkeypatch, a_model(name, dtype), text, kind=kind, dtype=small) == 2 * 3  # two layers

        for case in (
            (3, True, torch.float32, "static", None),
            (1, False, torch.float32, "paged", None),
            (2, False, torch.bfloat16, "paged", None),
            (3, True, torch.float16, "static", torch.int8),
        ):
            attempt(case, check, *case)


@pytest.mark.parametrize("name", ["Bloom", "GPT-J"])
@torch.inference_mode()
def test_generation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps(monkeypatch, a_model(name), prompt(2), generated) == 2 * 3  # the first token is the prompt's


@torch.no_grad()
def test_a_step_runs_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model("Bloom")
    model(torch.randint(1, VOCAB, (1, 5)), **{CACHE: (cache := make_cache(model, max_length=9))})
    with monkeypatch.context() as patch:
        patch.setattr(Seam, "run", lambda *args, **kwargs: pytest.fail("a seam"))
        model(torch.tensor([[5]]), **{CACHE: cache})


def test_what_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attentions, probes, training, hooks, and code that somebody has replaced."""
    model, text = a_model("GPT-Neo"), prompt(2)
    attention = model.transformer.h[0].attn.attention
    with torch.no_grad():
        assert steps(monkeypatch, model, text) == 6
        with headwise.hf.probe(model):
            assert steps(monkeypatch, model, text) == 0
        falcon = a_model("Falcon GQA")
        file = importlib.import_module(type(falcon).__module__)
        assert steps(monkeypatch, falcon, text) == 6
        for owner, name, of in ((file, "apply_rotary_pos_emb", falcon), (type(attention), "_attn", model)):
            with monkeypatch.context() as patch:
                theirs = getattr(owner, name)
                patch.setattr(owner, name, lambda *args, theirs=theirs, **kwargs: theirs(*args, **kwargs))
                assert steps(monkeypatch, of, text) == 0
        hook = attention.register_forward_hook(lambda *_: None)
        assert steps(monkeypatch, model, text) == 3  # of the other layer
        hook.remove()
        model(**text, **{CACHE: (cache := make_cache(model))})
        more = model(torch.tensor([[5], [6]]), **{CACHE: cache}, output_attentions=True)
        assert more.attentions[0].shape == (2, 5, 1, 13)
        assert steps(monkeypatch, model.train(), text) == 0
    with_gradient = model.eval()(torch.tensor([[5]]), **{CACHE: make_cache(model)})
    assert with_gradient.logits.requires_grad


@torch.no_grad()
def test_other_code_takes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    file = importlib.import_module("transformers.models.bloom.modeling_bloom")
    assert own_steps.stepping(file.BloomAttention) is not None

    def forward(self: Any, hidden_states: Any) -> Any:
        return hidden_states

    told = r"^BloomAttention decodes .* in transformers 5\.[\d.]+, its statements are not those that headwise knows"
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=told) as warned:
        patch.setattr(file.BloomAttention, "forward", forward)
        assert own_steps.stepping(file.BloomAttention) is None
        assert own_steps.stepping(file.BloomAttention) is None
    assert len(warned) == 1
    monkeypatch.setattr(own_steps, "OWN_CODE", {})
    own_steps._stepping.cache_clear()
    try:
        assert own_steps.stepping(file.BloomAttention) is None
    finally:
        own_steps._stepping.cache_clear()


@torch.no_grad()
def test_a_bias_is_read_once_a_forward() -> None:
    """Layers have the same one; another tensor, or the same one written to, is read anew."""
    alibi = torch.randn(4, 1, 9)
    mask = own_steps._bias_of(alibi, 1.0, 4, 9)
    assert own_steps._bias_of(alibi, 1.0, 4, 9) is mask
    assert torch.equal(own_steps._bias_of(alibi, 2.0, 4, 9).added(1, 9), 2 * alibi[None])
    assert torch.equal(own_steps._bias_of(alibi, 1.0, 2, 5).added(1, 5), alibi[..., -5:].view(2, 2, 1, 5))
    with pytest.raises(own_steps.NoStepError):
        own_steps._bias_of(alibi, 1.0, 4, 10)
    own_steps._bias_of(alibi, 1.0, 4, 9)
    alibi += 1
    assert torch.equal(own_steps._bias_of(alibi, 1.0, 4, 9).added(1, 9), alibi[None])
    with torch.inference_mode():
        uncounted = torch.randn(4, 1, 9)
        for _ in range(2):
            assert torch.equal(own_steps._bias_of(uncounted, 1.0, 4, 9).added(1, 9), uncounted[None])
            uncounted += 1


@torch.no_grad()
def test_rows_of_one_text() -> None:
    """Two steps, and what they give is what a whole text gives."""
    model = a_model("CodeGen")
    text = prompt(2)
    whole = model(**text).logits
    pieces = torch.cat(decoded(model, make_cache(model, max_length=20), **text), dim=1)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=1e-4)
