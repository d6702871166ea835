"""Layers of transformers' models step in one call with our caches where their code is known: with the same bits."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import transformers
from backends import needs_native
from hf_models import BY_NAME, VOCAB, stir
from native_cases import collected
from transformers import PreTrainedModel

import headwise.hf
from headwise.cache.base import KVCache
from headwise.hf import decoding, make_cache
from headwise.ops.native.library import trouble

pytestmark = needs_native
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=28, intermediate_size=17, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, max_position_embeddings=64, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0], "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
}  # fmt: skip


def a_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny one on headwise; a name of `ROPES` is Llama with that scaling."""
    if name in ROPES:
        rope = {"rope_type": name, "rope_theta": 1e4, **ROPES[name]}
        config = transformers.LlamaConfig(**_SIZES, rope_parameters=rope)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="headwise")
        stir(model)
    elif name in BY_NAME:
        model = BY_NAME[name].build()
        model.set_attn_implementation("headwise")
    else:
        config = getattr(transformers, f"{name}Config")(**_SIZES)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="headwise")
        stir(model)
    return model.to(dtype).eval()


def generated(model: PreTrainedModel, cache: Any, **inputs: Any) -> tuple[Any, ...]:
    """Eight tokens, and the logits of each."""
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    out = model.generate(past_key_values=cache, output_logits=True, return_dict_in_generate=True, **options, **inputs)
    return out.sequences, *out.logits


def steps(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, inputs: dict[str, Any], **cache: Any) -> int:
    """How many steps ran in one call; the logits are those of running without them."""
    taken = 0
    step = KVCache.step

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal taken
        out = step(*args, **options)
        assert out is not None
        taken += 1
        return out

    outs = []
    for stepped in (counted, None):
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "step", stepped)
            if stepped is None:
                patch.setattr(KVCache, "takes_steps", lambda *_: False)
            outs.append(generated(model, make_cache(model, max_length=64, **cache), **inputs))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)
    return taken


def prompt(B: int, padded: bool = False) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (B, 9))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


NAMES = ("Llama GQA", "Mistral window", "Mixtral", "Qwen2", "Qwen3", "Gemma2 softcap", "Apertus", "Glm", *ROPES)


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_of_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trouble() is None
    with torch.no_grad(), collected() as attempt:
        for dtype, kind, small in (
            (torch.float32, "static", None), (torch.bfloat16, "paged", None), (torch.float16, "static", torch.int8),
        ):  # fmt: skip
            model = a_model(name, dtype)

            def check(model: PreTrainedModel, **call: Any) -> None:
                assert steps(monkeypatch, model, **call) == 2 * 7  # two layers; the first token is the prompt's

            if kind == "static":
                attempt((dtype, kind), check, model, inputs=prompt(2), kind=kind, dtype=small)
            attempt((dtype, kind, "padded"), check, model, inputs=prompt(3, True), kind=kind, dtype=small)


def test_what_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other code, attentions, probes, and a rotation that somebody has replaced."""
    model = a_model("Llama GQA")
    file = importlib.import_module(type(model).__module__)
    inputs = prompt(1)
    with torch.no_grad():
        assert steps(monkeypatch, a_model("Phi-3"), inputs) == 0
        assert steps(monkeypatch, model, inputs) == 14
        assert steps(monkeypatch, model.train(), inputs) == 0
        model.eval()
        with headwise.hf.probe(model):
            assert steps(monkeypatch, model, inputs) == 0
        with monkeypatch.context() as patch:
            theirs = file.apply_rotary_pos_emb
            patch.setattr(file, "apply_rotary_pos_emb", lambda *args, **kwargs: theirs(*args, **kwargs))
            assert steps(monkeypatch, model, inputs) == 0
        out = model(**inputs, past_key_values=(cache := make_cache(model)))
        more = model(torch.tensor([[5]]), past_key_values=cache, output_attentions=True)
        assert more.attentions[0].shape == (1, 4, 1, 10) and out.logits.shape[1] == 9
    with_gradient = model(torch.tensor([[5]]), past_key_values=make_cache(model))
    assert with_gradient.logits.requires_grad


def test_other_code_is_not_prepared() -> None:
    """A forward is taken over only where its code, and that of its rotation, is known."""
    known = importlib.import_module("transformers.models.llama.modeling_llama").LlamaAttention
    theirs = getattr(known.forward, "__wrapped__", known.forward)
    form, rotation = decoding._form_of(theirs)
    assert (form, rotation) == (decoding.Form(), decoding.Rotation())

    def forward(self: Any, hidden_states: Any) -> Any:
        return hidden_states

    assert decoding._form_of(forward) == (None, None)
    assert decoding._form_of(None) == (None, None)
    wrapped = decoding.wraps(theirs)(lambda *args, **kwargs: None)
    assert decoding._form_of(wrapped) == (None, None)
