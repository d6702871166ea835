"""Caches of headwise's in the hands of models and generation code that read or compute with what is held."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from hf_models import BY_NAME, PAD, VOCAB, B, inputs, stir, token_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

from headwise.hf import ModelError, make_cache
from headwise.hf.attention.lazy_tensors import Lazy
from headwise.hf.models.architectures import CACHE
from headwise.ops.storage.paged import PAGE

KINDS: tuple[dict[str, Any], ...] = (dict(kind="static"), dict(kind="paged"), dict(kind="static", bits=8))
EXACT = KINDS[:2]
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=1, eos_token_id=None,
)  # fmt: skip


def built(model: str, config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = getattr(transformers, model)._from_config(config, attn_implementation="headwise").eval()
        stir(made)
    return made


def greedy(model: PreTrainedModel, arguments: dict[str, Tensor], cache: Any, **how: Any) -> Any:
    how = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=PAD) | how
    return model.generate(**arguments, **{CACHE: cache}, **how)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())  # as of every model, see test_hf_models


def test_generation_that_returns_what_is_held() -> None:
    """Whisper cuts its cache up by rows, and gives it back."""
    row = BY_NAME["Whisper"]
    model = row.build()
    model.set_attn_implementation("headwise")
    arguments = {"input_features": inputs(row)["input_features"]}
    theirs = greedy(model, arguments, DynamicCache(), return_dict_in_generate=True)
    for how in KINDS:
        ours = greedy(model, arguments, make_cache(model, **how), return_dict_in_generate=True)
        if "bits" not in how:
            assert torch.equal(ours.sequences, theirs.sequences)
            for mine, other in zip(ours[CACHE], theirs[CACHE], strict=True):
                for x, y in zip(mine, other, strict=True):
                    assert (x is None) == (y is None) and (not isinstance(x, Tensor) or close(x, y))
        layer = ours[CACHE].self_attention_cache.layers[0]
        assert isinstance(layer.keys, Tensor) and layer.keys.shape[0] == B and layer.keys.dtype == torch.float32


@pytest.mark.unchecked
@torch.no_grad()
def test_keys_and_values_are_read_and_not_replaced() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    theirs = DynamicCache(config=model.config)
    model(token_ids(5), **{CACHE: theirs})
    for how in KINDS:
        cache = make_cache(model, **how)
        assert cache.layers[0].keys is cache.layers[0].values is None
        model(token_ids(5), **{CACHE: cache})
        for mine, other in zip(cache.layers, theirs.layers, strict=True):
            assert mine.keys.shape == other.keys.shape and mine.values.shape == other.values.shape
            for ours, exact in ((mine.keys, other.keys), (mine.values, other.values)):
                assert (ours - exact).abs().max() <= (0.02 if "bits" in how else 1e-6) * exact.abs().max()
        for name in ("keys", "values"):
            with pytest.raises(
                ValueError, match=re.escape("come by update() and are changed by crop(), reorder_cache()")
            ):
                setattr(cache.layers[0], name, torch.zeros(1))
        cache.reset()
        assert cache.layers[0].keys is None


def test_a_model_that_attends_a_cached_image_again() -> None:
    """Mllama's layers of cross-attention read their keys off the cache at every later step."""
    config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
        **SIZES, cross_attention_layers=[1], rope_parameters=dict(rope_type="default", rope_theta=1e4)
    )
    model = built("MllamaForCausalLM", config)
    for layer in model.model.layers:
        if hasattr(layer, "cross_attn_attn_gate"):
            layer.cross_attn_attn_gate.data.fill_(1.0)
    image, ids = torch.randn(B, 13, 24), token_ids(9)

    def steps(cache: Any) -> Tensor:
        with torch.no_grad():
            first = model(ids[:, :5], cross_attention_states=image, **{CACHE: cache}, use_cache=True).logits
            return torch.cat([first, *(model(i, **{CACHE: cache}).logits for i in ids[:, 5:].split(2, 1))], 1)

    model.set_attn_implementation("eager")
    theirs = steps(DynamicCache(config=config))
    without = model(ids).logits
    model.set_attn_implementation("headwise")
    assert not close(theirs[:, 5:], without[:, 5:]), "or the image would prove nothing"
    for how in EXACT:
        assert close(steps(make_cache(model, max_length=20, **how)), theirs)
    assert (steps(make_cache(model, bits=8)) - theirs).abs().max() < 0.1 * theirs.abs().max()


def test_values_that_the_model_joins_anew() -> None:
    """DiffLlama's: halves of its heads side by side, and keys that stay as they lie."""
    model = built("DiffLlamaForCausalLM", transformers.DiffLlamaConfig(**SIZES))
    arguments = {"input_ids": token_ids(7)}
    theirs = greedy(model, arguments, DynamicCache(config=model.config))
    for how in EXACT:
        assert torch.equal(greedy(model, arguments, make_cache(model, **how)), theirs)
    for kind in ("static", "paged"):
        assert greedy(model, arguments, make_cache(model, kind, bits=8)).shape == theirs.shape


@pytest.mark.parametrize("plan", [(6, 1, 1, 1, 3, 1), (PAGE + 9, 1, PAGE + 5, 1, 2)])
def test_a_window_that_only_the_cache_knows(plan: tuple[int, ...]) -> None:
    """Moshi's masks are causal: a step sees what its cache has not forgotten, to the token."""
    sizes = SIZES | dict(max_position_embeddings=600, sliding_window=4, audio_vocab_size=11)
    model = built("MoshiForCausalLM", transformers.MoshiConfig(**sizes))
    ids = token_ids(sum(plan), seed=13)

    def steps(cache: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(i, **{CACHE: cache}, use_cache=True).logits for i in ids.split(plan, 1)], 1)

    theirs = steps(DynamicCache(config=model.config))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    assert not close(theirs[:, -1], whole[:, -1]), "or there would be no window"
    for how in EXACT:
        assert close(steps(make_cache(model, max_length=600, **how)), theirs)


def test_a_window_in_the_mask_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second rule is added where the mask has one."""

    model = BY_NAME["Mistral window"].build()
    model.set_attn_implementation("headwise")
    parts: list[int] = []
    from headwise.hf import returned

    real = returned.attention

    def spy(*args: Any, mask: Any = None, **more: Any) -> Tensor:
        parts.append(len(mask.parts))
        return real(*args, mask=mask, **more)

    monkeypatch.setattr(returned, "attention", spy)
    greedy(model, {"input_ids": token_ids(7)}, make_cache(model, max_length=40))
    assert set(parts) == {1}


def test_a_step_makes_no_copy_of_what_lies_in_pages_or_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    monkeypatch.setattr(Lazy, "plain", lambda self: pytest.fail("nobody computes with it"))
    for how in KINDS:
        greedy(model, {"input_ids": token_ids(7)}, make_cache(model, **how))


@pytest.mark.unchecked
def test_a_cache_for_a_text_model_inside_of_another() -> None:
    """The outer model is off the interface, its text model on it: that one reads the cache."""
    vision = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=16)
    vision |= dict(output_channels=8, window_size=2, global_attn_indexes=[0], mlp_dim=8, intermediate_size=8)
    text = SIZES | dict(model_type="qwen2")
    config = transformers.GotOcr2Config(vision_config=vision, text_config=text, image_token_index=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        names = {"text_config": "headwise", "vision_config": "eager", "": "eager"}
        model = transformers.GotOcr2ForConditionalGeneration._from_config(config, attn_implementation=names).eval()
        stir(model)
    arguments = {"input_ids": token_ids(7).clamp(min=6)}
    theirs = greedy(model, arguments, DynamicCache(config=model.config.get_text_config()))
    assert torch.equal(greedy(model, arguments, make_cache(model, "paged")), theirs)
    model.model.language_model.set_attn_implementation("eager")
    with pytest.raises(ModelError, match=r"GotOcr2ForConditionalGeneration .*, and the model runs 'eager'"):
        make_cache(model, "paged")


# -- what one cache may be used for -----------------------------------------------------------------------------------


def test_past_recording_that_begins_before_the_first_token() -> None:
    """As assisted generation does: 128 tokens can be taken back from the first on."""
    model = BY_NAME["Mistral window"].build()
    ids = token_ids(8 * 48 + 3)
    logits = []
    for cache in (DynamicCache(config=model.config), make_cache(switched(model), max_length=600)):
        cache.activate_past_recording()
        with torch.no_grad():
            for piece in ids[:, :-3].split(48, 1):
                model(piece, **{CACHE: cache}, use_cache=True)
            cache.crop(-PAGE)
            logits.append(model(ids[:, -3:], **{CACHE: cache}, use_cache=True).logits)
    assert close(*logits)


def switched(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("headwise")
    return model


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_reset_cache_serves_another_dtype(kind: str) -> None:
    model = switched(BY_NAME["Llama GQA"].build())
    cache = make_cache(model, kind, max_length=20)
    with torch.no_grad():
        model(token_ids(9), **{CACHE: cache})
        cache.reset()
        half = model.to(torch.bfloat16)
        again = half(token_ids(9), **{CACHE: cache}).logits
        fresh = half(token_ids(9), **{CACHE: make_cache(model, kind, max_length=20)}).logits
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert torch.equal(again, fresh)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["BERT", "BLIP", "TrOCR"])
def test_a_decoder_alone_that_reads_an_encoders_memory(name: str) -> None:
    """The keys of the memory are kept beside its own; in one list of layers they would pass for text (BLIP)."""
    sizes = {key: n for key, n in SIZES.items() if key != "num_key_value_heads"} | dict(is_decoder=True)
    if name == "BERT":
        model = built("BertLMHeadModel", transformers.BertConfig(**sizes, add_cross_attention=True))
    elif name == "TrOCR":
        sizes |= dict(decoder_layers=2, d_model=24, decoder_attention_heads=4, decoder_ffn_dim=17)
        model = built("TrOCRForCausalLM", transformers.TrOCRConfig(**sizes, cross_attention_hidden_size=24))
    else:
        model = BlipTextLMHeadModel(transformers.BlipTextConfig(**sizes, encoder_hidden_size=24)).eval()
        stir(model)
        model.set_attn_implementation("headwise")
    ids, memory = token_ids(9), dict(encoder_hidden_states=torch.randn(B, 5, 24))
    with torch.no_grad():
        expected = model(ids, **memory, use_cache=False).logits
        for how in EXACT:
            cache = make_cache(model, **how, max_length=20)
            pieces = [model(piece, **memory, **{CACHE: cache}).logits for piece in ids.split([6, 1, 2], 1)]
            assert close(torch.cat(pieces, 1), expected), how
            assert cache.get_seq_length() == 9
    assert not isinstance(make_cache(BY_NAME["GPT-2"].build()), transformers.EncoderDecoderCache)


def test_layers_that_keep_more_are_refused() -> None:
    """Derived from a layer that is served, and keeping an index beside it."""
    sizes = dict(q_lora_rank=5, kv_lora_rank=5, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, index_n_heads=2)
    config = transformers.DeepseekV32Config(**SIZES | sizes | dict(num_key_value_heads=4, index_head_dim=8))
    with torch.device("meta"):
        model = transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation="eager")
    text = r"DeepseekV32ForCausalLM \(model_type 'deepseek_v32'\): layer 0 keeps a DynamicIndexedLayer, .*DynamicCache"
    with pytest.raises(ModelError, match=text):
        make_cache(model)


@pytest.mark.unchecked
@pytest.mark.parametrize("length", [True, 2.0, "9", -1])
def test_a_max_length_that_is_no_number_of_tokens_is_refused(length: Any) -> None:
    model = BY_NAME["Llama GQA"].build()
    with pytest.raises(ValueError, match=re.escape(f"max_length is a number of tokens, at least 1; got {length!r}")):
        make_cache(model, max_length=length)
