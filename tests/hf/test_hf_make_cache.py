"""headwise.hf.make_cache: the tokens and logits of transformers' own caches, through generate() and forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hf_models import BY_NAME, DECODERS, PAD, VOCAB, WINDOW, B, Row, inputs, padding, token_ids
from torch import Tensor
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headwise.cache import quantize
from headwise.hf import ModelError, make_cache, probe
from headwise.hf.models.architectures import CACHE
from headwise.ops.storage.paged import PAGE

MODELS: dict[str, PreTrainedModel] = {}
KINDS = ("static", "paged")
WINDOWED = tuple(BY_NAME[name] for name in ("Mistral window", "Gemma2 softcap", "gpt-oss sinks", "Llama4 chunked"))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True),
    "beam": dict(do_sample=False, num_beams=3),
}


def model_of(row: Row, implementation: str = "headwise") -> PreTrainedModel:
    if row.name not in MODELS:
        MODELS[row.name] = row.build()
    MODELS[row.name].set_attn_implementation(implementation)
    return MODELS[row.name]


def generated(model: PreTrainedModel, arguments: dict[str, Tensor], cache: Any = None, **how: Any) -> Tensor:
    torch.manual_seed(1)
    how = dict(max_new_tokens=8, min_new_tokens=8, pad_token_id=PAD) | how
    return model.generate(**arguments, **{CACHE: cache}, **how)


def fed(model: PreTrainedModel, cache: Any, plan: tuple[int, ...], side: str = "none") -> Tensor:
    """Logits (B, sum(plan), vocabulary) of a text fed piece by piece, behind what the cache holds."""
    at = start = cache.get_seq_length()
    real = torch.cat([torch.ones(B, start, dtype=torch.long), padding(side, sum(plan))], 1)
    ids, positions, logits = token_ids(start + sum(plan), seed=13), (real.cumsum(-1) - 1).clamp(min=0), []
    with torch.no_grad():
        for length in plan:
            piece = slice(at, at + length)
            arguments: dict[str, Any] = dict(input_ids=ids[:, piece], attention_mask=real[:, : piece.stop])
            if "position_ids" in model.forward.__code__.co_varnames:
                arguments["position_ids"] = positions[:, piece]
            logits.append(model(**arguments, **{CACHE: cache}, use_cache=True).logits)
            at += length
    return torch.cat(logits, 1)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Within float32's rounding on the way through a model, as measured in test_hf_models."""
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(4)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("row", DECODERS, ids=lambda row: row.name)
def test_the_tokens_are_those_of_transformers_own_cache(row: Row, side: str) -> None:
    arguments = {"input_ids": token_ids(7), "attention_mask": padding(side, 7)}
    for name, how in WAYS.items():
        eager = generated(model_of(row, "eager"), arguments, **how)
        model = model_of(row)
        for kind in KINDS:
            cache = make_cache(model, kind, max_length=20)
            assert torch.equal(generated(model, arguments, cache, **how), eager), (name, kind)
            assert cache.get_seq_length() == 14
            assert cache.nbytes > 0


@pytest.mark.parametrize("name", ["BART", "T5", "Whisper"])
def test_encoder_decoders(name: str) -> None:
    row = BY_NAME[name]
    arguments = {key: x for key, x in inputs(row, "right").items() if not key.startswith("decoder")}
    for how in (WAYS["greedy"], WAYS["beam"]):
        eager = generated(model_of(row, "eager"), arguments, **how)
        model = model_of(row)
        for kind in KINDS:
            cache = make_cache(model, kind, max_length=20)
            assert torch.equal(generated(model, arguments, cache, **how), eager)
            assert cache.nbytes > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama GQA", "Mistral window", "Qwen2"])
def test_prompt_lookup_takes_tokens_back(name: str, kind: str) -> None:
    """Assisted generation guesses tokens and crops those that were wrong; past the window too."""
    row = BY_NAME[name]
    ids = token_ids(5)[:1].repeat(1, 30)  # guesses are found, and fail now and then
    for length in (10, 150):
        arguments = {"input_ids": ids[:, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
        how = dict(do_sample=False, max_new_tokens=25, min_new_tokens=25)
        eager = generated(model_of(row, "eager"), arguments, **how)
        model = model_of(row)
        cache = make_cache(model, kind, max_length=300)
        assert torch.equal(generated(model, arguments, cache, prompt_lookup_num_tokens=4, **how), eager)


# -- windows and pieces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("row", WINDOWED, ids=lambda row: row.name)
def test_prompts_in_pieces_longer_than_windows_and_pages(row: Row, side: str) -> None:
    """A first prompt longer than a rolling cache takes at once, steps over a page's end, another such piece."""
    plan = (PAGE + 72, 1, 1, 50, 1, 2 * PAGE + 5, 1, 3, 1)
    eager = fed(model_of(row, "eager"), DynamicCache(config=model_of(row, "eager").config), plan, side)
    model, real = model_of(row), padding(side, sum(plan)).bool()
    for kind in KINDS:
        assert close(fed(model, make_cache(model, kind, max_length=600), plan, side)[real], eager[real])


@pytest.mark.parametrize("bits", [None, 8])
def test_a_windowed_model_holds_its_window_and_no_more(bits: Literal[8] | None) -> None:
    model = model_of(BY_NAME["Mistral window"])
    cache = make_cache(model, max_length=2000, bits=bits)
    sizes = []
    for plan in ((5,), (1,) * 20, (300,), (1,) * 10, (700,)):
        fed(model, cache, plan)
        sizes.append(cache.nbytes)
    pages = -(-(WINDOW - 1 + 2 * PAGE - 1) // PAGE)  # the window, what is added at once, and a page's rest
    token = 2 * (6 * 4 if bits is None else 6 + 4)  # a key and a value, with their scales
    assert sizes == [2 * B * 2 * pages * PAGE * token] * 5  # 2 layers, 2 heads
    assert cache.get_seq_length() == 1035


# -- int8 -------------------------------------------------------------------------------------------------------------


def one_layer(row: Row) -> Row:
    """The first layer alone: its keys are the same bits in both runs, so that they round to the same int8."""
    sizes = dict(row.sizes)
    sizes["n_layer" if "n_layer" in sizes else "num_hidden_layers"] = 1
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][:1]
    return replace(row, name=f"{row.name}, one layer", sizes=sizes)


def rounded_cache(model: PreTrainedModel) -> DynamicCache:
    """transformers' own cache, of keys and values that have been int8."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        plain: Callable[..., Any] = type(layer).update

        def update(key: Tensor, value: Tensor, *_: Any, layer: Any = layer, plain: Any = plain, **__: Any) -> Any:
            return plain(layer, quantize(key).dequantize(), quantize(value).dequantize())

        layer.update = update
    return cache


@pytest.mark.parametrize("row", DECODERS, ids=lambda row: row.name)
def test_int8_is_attention_on_the_dequantised_numbers(row: Row) -> None:
    """What differs from eager on the same int8 numbers is float32's rounding alone; and int8 it is."""
    row, plan = one_layer(row), (7, 1, 1, 4, 1, 1)
    eager = model_of(row, "eager")
    theirs = fed(eager, rounded_cache(eager), plan, "left")
    exact = fed(eager, DynamicCache(config=eager.config), plan, "left")
    model, real = model_of(row), padding("left", sum(plan)).bool()
    for kind in KINDS:
        ours = fed(model, make_cache(model, kind, max_length=20, bits=8), plan, "left")
        assert close(ours[real], theirs[real])
        assert not close(ours[real], exact[real])


def test_int8_generates_and_takes_less_memory() -> None:
    model = model_of(BY_NAME["Llama GQA"])
    arguments = {"input_ids": token_ids(7)}
    for kind in KINDS:
        plain, small = make_cache(model, kind, max_length=20), make_cache(model, kind, max_length=20, bits=8)
        for cache in (plain, small):
            assert generated(model, arguments, cache, num_beams=2, do_sample=False).shape == (B, 15)
        assert small.nbytes * 24 == plain.nbytes * 10  # 6 numbers of 4 bytes; of 1 byte and a scale


# -- changes ----------------------------------------------------------------------------------------------------------


def change(cache: Any, model: PreTrainedModel, name: str) -> Tensor:
    """Logits after a change of rows or lengths."""
    fed(model, cache, (126, 3))
    if name == "crop":  # of two updates, between which a page's end goes out of the window
        cache.activate_past_recording()
        fed(model, cache, (5,))
        fed(model, cache, (1,))
        cache.crop(-5)
        cache.crop(0)
    elif name == "repeat":
        cache.batch_repeat_interleave(3)
    elif name == "select":
        cache.batch_select_indices(torch.tensor([2, 0]))
    elif name == "select by mask":
        cache.batch_select_indices(torch.tensor([True, False, True]))
    elif name == "reorder":
        cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache = copy.deepcopy(cache)
    rows = {"repeat": 3 * B, "select": 2, "select by mask": 2}.get(name, B)
    ids = token_ids(12, seed=17).repeat(3, 1)[:rows]
    with torch.no_grad():
        return torch.cat([model(piece, **{CACHE: cache}, use_cache=True).logits for piece in ids.split(4, 1)], 1)


@pytest.mark.parametrize("name", ["crop", "repeat", "select", "select by mask", "reorder"])
@pytest.mark.parametrize("row", [BY_NAME["Llama GQA"], BY_NAME["Mistral window"], BY_NAME["Qwen2"]])
def test_changes_are_those_of_transformers_own_cache(row: Row, name: str) -> None:
    theirs = change(DynamicCache(config=model_of(row, "eager").config), model_of(row, "eager"), name)
    for kind in KINDS:
        model = model_of(row)
        assert close(change(make_cache(model, kind, max_length=300), model, name), theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Llama GQA", "Mistral window"])
def test_a_reset_cache_serves_again_also_another_batch(name: str, kind: str) -> None:
    model = model_of(BY_NAME[name])
    cache = make_cache(model, kind, max_length=300)
    first = fed(model, cache, (200, 1))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(fed(model, cache, (200, 1)), first)
    cache.reset()
    ids = token_ids(9)[:1]
    fresh = generated(model, {"input_ids": ids}, make_cache(model, kind), do_sample=False)
    assert torch.equal(generated(model, {"input_ids": ids}, cache, do_sample=False), fresh)


def test_beams_that_share_their_last_page_need_no_more_pages_than_rows() -> None:
    """A pool with a page a row: one beam's page goes to both rows, and each goes on writing."""
    model = model_of(BY_NAME["Llama GQA"])
    cache = make_cache(model, "paged", max_length=PAGE)
    fed(model, cache, (5,))
    cache.reorder_cache(torch.zeros(B, dtype=torch.long))
    size = cache.nbytes
    fed(model, cache, (1,))
    assert cache.nbytes == B * size


def test_a_probe_and_attentions_see_what_is_held() -> None:
    model = model_of(BY_NAME["Qwen2"])
    forms: tuple[tuple[Any, Any], ...] = (("paged", None), ("static", 8))
    for kind, bits in forms:
        cache = make_cache(model, kind, max_length=20, bits=bits)
        fed(model, cache, (6,))
        with probe(model) as seen, torch.no_grad():
            out = model(token_ids(6)[:, :1], **{CACHE: cache}, output_attentions=True)
        for call, weights in zip(seen.calls, out.attentions, strict=True):
            assert call.key.shape == call.value.shape == (B, 2, 7, 6)
            assert weights.shape == (B, 4, 1, 7)
            assert (weights.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("bits", [None, 8])
def test_autocast_and_inference_mode_do_not_stop_it_nor_gradients_that_are_kept(bits: Literal[8] | None) -> None:
    model, ids = model_of(BY_NAME["Qwen2"]), token_ids(9)
    for kind in KINDS:
        with torch.inference_mode():
            plain = model(ids, **{CACHE: make_cache(model, kind, max_length=20, bits=bits)}).logits
        cache = make_cache(model, kind, max_length=20, bits=bits)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for piece in ids.split([5, 4], 1):
                half = model(piece, **{CACHE: cache}).logits
        assert (half - plain[:, 5:]).abs().max() < 0.1 * plain.abs().max()  # bfloat16: 2 ** -8, through two layers
        cache = make_cache(model, kind, max_length=20, bits=bits)
        if bits is None:
            assert close(model(ids, **{CACHE: cache}).logits, plain)
            continue
        with pytest.raises(ValueError, match=r"quantised keys .* carry no gradient; .* within torch\.no_grad\(\)"):
            model(ids, **{CACHE: cache})


@pytest.mark.parametrize("name", ["Llama GQA", "Mistral window"])
def test_a_prompt_in_inference_mode_and_steps_outside_of_it(name: str) -> None:
    model, ids = model_of(BY_NAME[name]), token_ids(9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for kind in KINDS:
        for first in (True, False):
            cache, pieces = make_cache(model, kind, max_length=20), []
            for at, piece in enumerate(ids.split([6, 2, 1], 1)):
                with torch.inference_mode(first is (at % 2 == 0)), torch.no_grad():
                    pieces.append(model(piece, **{CACHE: cache}).logits)
            assert close(torch.cat([x.clone() for x in pieces], 1), expected), f"{kind}, first {first}"


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    llama, windowed = model_of(BY_NAME["Llama GQA"], "eager"), model_of(BY_NAME["Mistral window"], "eager")
    t5, qwen = model_of(BY_NAME["T5"]), model_of(BY_NAME["Qwen2"])
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1))
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "got Linear", lambda: make_cache(torch.nn.Linear(1, 1))),  # type: ignore[arg-type]
        (ValueError, 'kind is "static" or "paged"; got \'dynamic\'', lambda: make_cache(llama, "dynamic")),  # type: ignore[arg-type]
        (ValueError, "bits is 8, 4 or 3.* got 16", lambda: make_cache(llama, bits=16)),  # type: ignore[arg-type]
        (ValueError, "multiple of 8; got head_dim", lambda: fed(qwen, make_cache(qwen, max_length=9, bits=4), (3,))),
        (ValueError, "at least 1; got 0", lambda: make_cache(llama, max_length=0)),
        (ValueError, "T5.*give make_cache a max_length", lambda: make_cache(t5)),
        (ModelError, r"pages.*'eager'.*set_attn_implementation\(\"headwise\"\)", lambda: make_cache(llama, "paged")),
        (ModelError, "codes of 8 bits.*set_attn_implementation", lambda: make_cache(llama, bits=8)),
        (ModelError, "sliding window.*set_attn_implementation", lambda: make_cache(windowed)),
        (ModelError, "Mamba.*layer 0 keeps a LinearAttentionLayer.*DynamicCache", lambda: make_cache(mamba)),
    ]
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()


def test_plain_tensors_serve_any_attention() -> None:
    arguments = {"input_ids": token_ids(7)}
    for implementation in ("eager", "sdpa"):
        model = model_of(BY_NAME["Llama GQA"], implementation)
        plain = generated(model, arguments, do_sample=False)
        assert torch.equal(generated(model, arguments, make_cache(model), do_sample=False), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_beyond_max_length_changes_nothing(kind: str) -> None:
    model = model_of(BY_NAME["Llama GQA"])
    cache = make_cache(model, kind, max_length=9)
    fed(model, cache, (8,))
    with pytest.raises(ValueError, match=r"max_length = 9, and the text comes to 10 tokens: make_cache\(model, max"):
        fed(model, cache, (2,))
    assert cache.get_seq_length() == 8
    fed(model, cache, (1,))


def test_a_window_goes_back_as_far_as_it_remembers() -> None:
    model = model_of(BY_NAME["Mistral window"])
    cache = make_cache(model, max_length=1000)
    fed(model, cache, (300,))
    with pytest.raises(ValueError, match="cannot go back to 10 tokens"):
        cache.crop(-290)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(290)


def test_the_layers_are_those_that_transformers_names() -> None:
    """The two kinds that are read have no third one among them that would be taken for one."""
    for row in DECODERS:
        layers = DynamicCache(config=model_of(row).config).layers
        assert {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}
        ours = make_cache(model_of(row), max_length=9)
        assert ours.is_sliding == [layer.is_sliding for layer in layers]
        assert not ours.is_compileable
        assert ours.is_croppable
