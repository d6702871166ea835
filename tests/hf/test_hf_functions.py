"""Mask functions that headwise does not read: images and prefixes that see themselves both ways, a caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from draw import slow_except
from hf_measure import distance, logged
from hf_models import VOCAB, WINDOW, B, padding, stir, token_ids
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers import masking_utils as theirs

import headwise
from headwise.hf import returned
from headwise.hf.attention.mask import headwise_mask
from headwise.hf.attention.mask_closures import Frame
from headwise.hf.attention.mask_functions import function_mask
from headwise.hf.models.architectures import CACHE
from headwise.ops.masks import Function, Keep, Mask
from headwise.testing import largest_tensor

T = 13
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=28, intermediate_size=17, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=12, intermediate_size=7, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
KINDS = torch.tensor([[0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0], [0] * T])


def built(model: str, config: Any, seed: int = 3) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, model)._from_config(config, attn_implementation="eager").eval()
        stir(made)
    return made


def gemma3(layers: tuple[str, ...] = ("sliding_attention", "full_attention")) -> PreTrainedModel:
    """Tokens of one image (type 1) see each other; the window holds beside it."""
    text = TEXT | dict(num_hidden_layers=len(layers), layer_types=list(layers), sliding_window=WINDOW)
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return built("Gemma3ForConditionalGeneration", config)


def paligemma() -> PreTrainedModel:
    """Tokens of the prefix (type 0) see each other."""
    text = TEXT | dict(model_type="gemma", num_hidden_layers=2)
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=VISION, projection_dim=28)
    return built("PaliGemmaForConditionalGeneration", config)


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Tensor]] = {
    "gemma3": (gemma3, KINDS),
    "paligemma": (paligemma, (torch.arange(T) >= torch.tensor([[5], [8], [11]])).long()),
}


@contextmanager
def masks() -> Iterator[list[Mask]]:
    """The masks that reach headwise's attention in the block."""
    seen: list[Mask] = []
    real = returned.attention

    def spy(*args: Any, mask: Any, **options: Any) -> Any:
        seen.append(Mask(()) if mask is None else mask)
        return real(*args, mask=mask, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(returned, "attention", spy)
        yield seen


def is_dense(mask: Mask) -> bool:
    return any(isinstance(part, Keep) and part.tensor.shape[2] > 1 for part in mask.parts)


def has_function(mask: Mask) -> bool:
    return any(isinstance(part, Function) for part in mask.parts)


def pieces(model: PreTrainedModel, kinds: Tensor, side: str, plan: tuple[int, ...], cache: Any = None) -> Tensor:
    """Logits (B, T, vocabulary) of a text in pieces; each comes with the types of all tokens so far."""
    ids, real = token_ids(T), padding(side, T)
    outs, at = [], 0
    for length in plan:
        piece = slice(at, at := at + length)
        arguments = dict(input_ids=ids[:, piece], attention_mask=real[:, :at], token_type_ids=kinds[:, :at])
        with torch.no_grad():
            outs.append(model(**arguments, **{CACHE: cache}, use_cache=cache is not None).logits)
    return torch.cat(outs, 1)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_images_and_prefixes_are_those_of_eager(name: str, side: str) -> None:
    build, kinds = MODELS[name]
    with masks() as seen:
        error = distance(build(), lambda m: pieces(m, kinds, side, (T,)), padding(side, T).bool())
    assert error.to_eager <= error.budget
    assert len(seen) == 2 and all(map(has_function, seen)) and not any(map(is_dense, seen))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_so_they_are_with_a_cache(name: str, cache: str) -> None:
    """The text comes in pieces, the second of which ends inside an image, and single tokens."""
    build, kinds = MODELS[name]
    plan = (5, 4, 1, 3) if name == "gemma3" else (9, 1, 1, 2)

    def run(model: PreTrainedModel) -> Tensor:
        config = model.config.get_text_config()
        past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=T + 3)
        return pieces(model, kinds, "left", plan, past)

    with masks() as seen:
        error = distance(build(), run, padding("left", T).bool())
    assert error.to_eager <= error.budget
    assert any(map(has_function, seen)) and not any(map(is_dense, seen))


def test_one_evaluation_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function runs as often for five layers as for one."""
    real, calls = theirs.blockwise_overlay, []

    def counted(ids: Tensor) -> Any:
        function = real(ids)
        return lambda *places: (calls.append(1), function(*places))[1]

    monkeypatch.setattr(theirs, "blockwise_overlay", counted)
    counts = []
    for layers in (1, 5):
        model = gemma3(("full_attention",) * layers)
        model.set_attn_implementation("headwise")
        calls.clear()
        pieces(model, KINDS, "none", (T,))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


BLOCKS = torch.full((1, 4096), -1)
BLOCKS[:, 100:700], BLOCKS[:, 3000:3300] = 0, 1
OWN: dict[str, tuple[Any, bool]] = {
    "blocks": (theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)), False),
    "blocks, a pair at a time": (theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)), True),
    "one number": (theirs.or_masks(theirs.causal_mask_function, lambda *_: torch.tensor(True)), True),
    "of single pairs": (lambda b, h, q, k: torch.stack([q - k, k - q + 3]).amin() >= 0, True),
}
FRAMES = {"square": Frame(1, 7, 7), "chunk": Frame(3, 3, 11, q_offset=98), "moved": Frame(1, 5, 9, 697, 693)}


def truth(function: Any, frame: Frame, use_vmap: bool = False) -> Tensor:
    return theirs.sdpa_mask(
        frame.B, frame.T, frame.S, frame.q_offset, frame.kv_offset, function,
        allow_is_causal_skip=False, use_vmap=use_vmap,
    )  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
@pytest.mark.parametrize("name", OWN)
def test_a_function_means_what_transformers_makes_of_it(name: str, frame: Frame) -> None:
    function, use_vmap = OWN[name]
    if "blocks" in name and frame.B > 1:
        function = theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS.expand(frame.B, -1)))
    places = (frame.B, frame.T, frame.S, frame.q_offset, frame.kv_offset)
    mask = headwise_mask(*places, mask_function=function, use_vmap=use_vmap).mask
    assert has_function(mask)
    exact = truth(function, frame, use_vmap)
    assert torch.equal(mask.dense(frame.T, frame.S).expand(exact.shape), exact)
    assert_attention_is_that_of(exact, mask)


def assert_attention_is_that_of(exact: Tensor, mask: Mask, backend: str = "auto") -> None:
    (B, _, T, S), source = exact.shape, torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(B, 2, n, 5, generator=source) for n in (T, S, S))
    expected = headwise.attention(q, k, v, mask=headwise.keep(exact), backend="reference")
    torch.testing.assert_close(headwise.attention(q, k, v, mask=mask, backend=backend), expected)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", slow_except(OWN, ("of single pairs",)))
def test_flex_attention_asks_for_single_pairs(name: str) -> None:
    function, use_vmap = OWN[name]
    frame = Frame(1, 7, 9, 697, 693)
    mask = headwise_mask(1, 7, 9, 697, 693, mask_function=function, use_vmap=use_vmap).mask
    assert_attention_is_that_of(truth(function, frame, use_vmap), mask, "flex")


@pytest.mark.parametrize("use_vmap", [False, True])
def test_no_mask_of_all_pairs_is_made_for_attention(use_vmap: bool) -> None:
    n = 3001
    function, _ = OWN["blocks"]
    q, k, v = torch.randn(3, 1, 1, n, 2)
    with largest_tensor() as seen:
        mask = headwise_mask(1, n, n, mask_function=function, use_vmap=use_vmap, attention_mask=torch.ones(1, n).bool())
        headwise.attention(q, k, v, mask=mask.mask, backend="native")
    assert seen.numel < 0.5 * n * n


MATRIX = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.6
WHOLE: dict[str, Any] = {
    "a matrix": lambda b, h, q, k: MATRIX,
    "the last query": lambda b, h, q, k: (k <= q) | (k == q.max()),
    "its own number of rows": lambda b, h, q, k: (q < 3).expand(-1, -1, 5, 5),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_must_be_evaluated_whole_is(name: str) -> None:
    """No strip of rows is right alone: transformers' own evaluation of all pairs, and the log says why."""
    with logged("INFO") as text:
        mask = headwise_mask(1, 5, 5, mask_function=WHOLE[name]).mask
    assert is_dense(mask) and "evaluated for all 5 x 5 pairs at once: " in text.getvalue()
    assert torch.equal(mask.dense(5, 5), truth(WHOLE[name], Frame(1, 5, 5)))


def test_a_mask_of_another_batch_is_refused() -> None:
    mask = function_mask(lambda b, h, q, k: k + b <= q, Frame(B, 5, 5))
    assert mask is not None
    q = torch.randn(B + 2, 1, 5, 3)
    with pytest.raises(headwise.hf.ModelError, match="attention of 5 batch rows under a mask made for 3; the model"):
        headwise.attention(q, q, q, mask=mask)
    one = function_mask(lambda b, h, q, k: k + b <= q, Frame(1, 5, 5))
    assert torch.equal(headwise.attention(q, q, q, mask=one), headwise.attention(q, q, q, mask=headwise.causal()))


def test_a_model_that_computes_with_it_gets_the_tensor() -> None:
    function, _ = OWN["blocks"]
    mask = headwise_mask(1, 5, 5, 98, 98, mask_function=function, config=SimpleNamespace(model_type="llama"))
    lowest = torch.finfo(torch.float32).min
    assert torch.equal(mask + 0, torch.where(truth(function, Frame(1, 5, 5, 98, 98)), 0.0, lowest))
