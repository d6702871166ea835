"""Decode steps of transformers' models over caches in codes and pages: one native call appends the token and attends.

The token waits between the update of the cache and attention. Whatever reads the cache before finds it there.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import needs_native
from draw import slow_except
from hf_models import BY_NAME, PAD, VOCAB, B, padding, token_ids
from native_cases import collected
from step_watch import taken_steps
from torch import Tensor
from transformers import PreTrainedModel

import headwise
from headwise.hf import fast_decode, make_cache
from headwise.hf.attention.function import headwise_attention
from headwise.hf.decode.cache_layers import FullLayer
from headwise.hf.models.architectures import CACHE
from headwise.testing import assert_same_bits

pytestmark = needs_native
LAZY: tuple[dict[str, Any], ...] = tuple(
    dict(kind=kind, bits=bits)
    for kind in ("static", "paged")
    for bits in (None, 8, 4, 3)
    if (kind, bits) != ("static", None)
)
# 40 numbers a head: a multiple of 8, as 4 and 3 bits need, and of no wider vector
HEADS: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
    head_dim=40, vocab_size=VOCAB, pad_token_id=PAD, bos_token_id=1, eos_token_id=None, max_position_embeddings=64,
)  # fmt: skip
NAMES = ("Llama GQA", "Mistral window", "gpt-oss sinks", "Gemma2 softcap")


def built(name: str) -> PreTrainedModel:
    """A model of the table with heads of 40 numbers."""
    return BY_NAME[name].build(attention="headwise", **HEADS)


def steps(model: PreTrainedModel, cache: Any, ids: Tensor, real: Tensor | None, prompt: int = 7) -> Tensor:
    """The logits of all tokens behind the prompt, one at a time."""
    pieces, at, outs = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)], 0, []
    with torch.no_grad():
        for piece in pieces:
            at += piece.shape[1]
            mask = None if real is None else real[:, :at]
            outs.append(model(piece, attention_mask=mask, **{CACHE: cache}).logits)
    return torch.cat(outs[1:], 1)


@pytest.mark.parametrize("name", slow_except(NAMES, ("Llama GQA", "gpt-oss sinks")))
def test_a_step_is_update_and_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer and with padding; 4 and 3 bits within the rounding of the rotations, all others bit for bit."""
    model, ids = built(name), token_ids(12)

    def check(how: dict[str, Any], side: Any) -> None:
        real = padding(side, 12) if side else None
        with monkeypatch.context() as patch:
            taken = taken_steps(patch)
            ours = steps(model, make_cache(model, **how), ids, real)
        assert taken == [True] * 2 * 5, taken
        with monkeypatch.context() as patch:
            patch.setattr(FullLayer, "_takes_step", lambda *_: False)
            theirs = steps(model, make_cache(model, **how), ids, real)
        if how["bits"] in (4, 3):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        else:
            assert_same_bits(ours, theirs)

    with collected() as attempt:
        for how in LAZY:
            for side in (None, "left"):
                attempt((how, side), check, how, side)


def test_generation_with_fast_decode_takes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("Mistral window").bfloat16()
    how: dict[str, Any] = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=PAD)
    arguments = {"input_ids": token_ids(7), "attention_mask": padding("left", 7)}
    for bits in (8, 4):
        taken = taken_steps(monkeypatch)
        with fast_decode(model):
            model.generate(**arguments, **how, **{CACHE: make_cache(model, max_length=20, bits=bits)})
        assert taken == [True] * 2 * 4


def test_no_token_waits_in_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a static cache in the model's dtype may be read by any attention."""
    model, taken = built("Llama GQA"), taken_steps(monkeypatch)
    cache = make_cache(model)
    steps(model, cache, token_ids(9), None)
    assert taken == [] and type(cache.layers[0].keys) is Tensor


class Attending(torch.nn.Module):
    """What attention knows of a module."""

    is_causal, num_key_value_groups = True, 3


def filled(bits: int | None = 8, kind: str = "static") -> FullLayer:
    layer = FullLayer(kind, 31, {8: torch.int8, 4: torch.int4, None: None}[bits])
    with torch.no_grad():
        layer.update(torch.randn(2, 2, 7, 40), torch.randn(2, 2, 7, 40))
    return layer


READERS: dict[str, Callable[[FullLayer], Any]] = {
    "length": lambda layer: layer.get_seq_length(),
    "sizes of masks": lambda layer: layer.get_mask_sizes(1),
    "keys": lambda layer: layer.keys,
    "values": lambda layer: layer.values,
    "cache": lambda layer: layer.cache.lengths,
    "bytes": lambda layer: layer.nbytes,
    "repr": repr,
    "rows": lambda layer: layer.reorder_cache(torch.tensor([0, 1])),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_whatever_reads_the_cache_finds_the_token_there(kind: str) -> None:
    query, key, value = torch.randn(2, 6, 1, 40), torch.randn(2, 2, 1, 40), torch.randn(2, 2, 1, 40)

    def check(read: Callable[[FullLayer], Any]) -> None:
        layer = filled(kind=kind)
        other = copy.deepcopy(layer)
        keys, values = layer.update(key, value)
        assert keys.shape == values.shape == (2, 2, 8, 40) and layer._cache.lengths == [7, 7], "it waits"
        read(layer)
        assert layer._cache.lengths == [8, 8]
        other.cache.append(key, value)
        assert_same_bits(
            headwise_attention(Attending(), query, keys, values, None)[0].transpose(1, 2), other.cache.attend(query)
        )
        assert layer._cache.lengths == [8, 8], "and is not appended twice"
        assert_same_bits(layer.keys, other.keys)

    with collected() as attempt:
        for name, read in READERS.items():
            attempt(name, check, read)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_keys_of_a_step_stay_those_of_the_step(kind: str) -> None:
    """Whoever reads them after attention, and after later tokens, finds the tokens of then."""
    layer, query = filled(kind=kind), torch.randn(2, 6, 1, 40)
    tokens = [(torch.randn(2, 2, 1, 40), torch.randn(2, 2, 1, 40)) for _ in range(3)]
    given, then = [], []
    for token in tokens:
        keys, values = layer.update(*token)
        headwise_attention(Attending(), query, keys, values, None)
        given.append((keys, values))
        then.append((layer.keys.clone(), layer.values.clone()))
    for n, (pair, exact) in enumerate(zip(given, then, strict=True)):
        for mine, other in zip(pair, exact, strict=True):
            assert mine.shape == other.shape == (2, 2, 8 + n, 40)
            assert_same_bits(mine + 0, other + 0)


@torch.no_grad()
def test_what_computes_with_the_keys_gets_them() -> None:
    layer, key, value = filled(), torch.randn(2, 2, 1, 40), torch.randn(2, 2, 1, 40)
    keys, values = layer.update(key, value)
    assert str(keys) == "LazyKeys(Quantized, shape=(2, 2, 8, 40), dtype=torch.float32)"
    assert (keys[:, :, -1:] - key).abs().max() <= key.abs().max() / 127
    assert (values[:, :, -1:] - value).abs().max() <= value.abs().max() / 127


@torch.no_grad()
def test_a_step_in_training_drops_weights() -> None:
    """A cache is used in training mode, too, where the kernel of a step has no dropout."""
    layer, query, token = filled(), torch.randn(2, 6, 1, 40), (torch.randn(2, 2, 1, 40), torch.randn(2, 2, 1, 40))
    other = copy.deepcopy(layer)
    other.cache.append(*token)
    torch.manual_seed(5)
    dropped = headwise_attention(Attending(), query, *layer.update(*token), None, dropout=0.5)[0].transpose(1, 2)
    torch.manual_seed(5)
    assert_same_bits(dropped, headwise.attention(query, *other.cache.view(), dropout=0.5))
    assert (dropped - headwise.attention(query, *other.cache.view())).abs().max() > 0.01
    assert layer.get_seq_length() == 8


@torch.no_grad()
def test_keys_in_the_place_of_values_are_those() -> None:
    layer, query = filled(), torch.randn(2, 6, 1, 40)
    keys, values = layer.update(torch.randn(2, 2, 1, 40), torch.randn(2, 2, 1, 40))
    exchanged = headwise_attention(Attending(), query, values, keys, None)[0].transpose(1, 2)
    assert_same_bits(exchanged, headwise.attention(query, *reversed(layer.cache.view())))


def test_what_is_no_step_is_appended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def lengths(layer: FullLayer, T: int = 1) -> list[int]:
        layer.update(torch.randn(2, 2, T, 40), torch.randn(2, 2, T, 40))
        return list(layer._cache.lengths)

    with torch.no_grad():
        assert lengths(filled(), 2) == [9, 9]
        assert lengths(filled(None)) == [8, 8], "plain tensors, which any attention reads"
        with torch.autocast("cpu", torch.bfloat16):
            assert lengths(filled()) == [8, 8]
        dropped = filled()
        dropped.cache.drop([3])
        assert lengths(dropped) == [8, 8]
        with pytest.raises(ValueError, match="max_length = 31"):
            lengths(filled(), 25)
        other = filled()
        with pytest.raises(ValueError, match=r"this cache takes key .* = \(2, 2, T, 40\); got \(2, 3, 1, 40\)"):
            other.update(torch.randn(2, 3, 1, 40), torch.randn(2, 3, 1, 40))
        assert other.get_seq_length() == 7
        last = filled()
        last.update(torch.randn(2, 2, 24, 40), torch.randn(2, 2, 24, 40))
        with pytest.raises(ValueError, match=r"max_length = 31, and the text comes to 32 tokens"):
            lengths(last)
        monkeypatch.setattr("headwise.cache.steps.runs_plain", lambda: False)  # as without the native library
        assert lengths(filled()) == [8, 8]
    monkeypatch.undo()
    assert lengths(filled()) == [8, 8], "a gradient may be recorded"


def test_a_probe_and_returned_weights_see_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken, ids = built("Llama GQA"), taken_steps(monkeypatch), token_ids(8)
    for how in ({"kind": "static", "bits": 8}, {"kind": "paged", "bits": None}):
        cache = make_cache(model, **how)
        with torch.no_grad():
            model(ids[:, :7], **{CACHE: cache})
            out = model(ids[:, 7:], output_attentions=True, **{CACHE: cache})
        assert [tuple(w.shape) for w in out.attentions] == [(B, 6, 1, 8)] * 2
        torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(B, 6, 1))
        assert taken == [] and cache.get_seq_length() == 8
        with torch.no_grad(), headwise.hf.probe(model) as seen:
            model(ids[:, 7:], **{CACHE: cache})
        assert taken == [] and cache.get_seq_length() == 9 and len(seen.calls) == 2


@torch.no_grad()
def test_an_option_that_the_kernel_refuses_is_refused_by_name() -> None:
    """A softcap of 0 is none to the kernel. The token is in the cache, as if it had been appended before."""
    layer = filled()
    keys, values = layer.update(torch.randn(2, 2, 1, 40), torch.randn(2, 2, 1, 40))
    with pytest.raises(ValueError, match="softcap"):
        headwise_attention(Attending(), torch.randn(2, 6, 1, 40), keys, values, None, softcap=0.0)
    assert layer.get_seq_length() == 8
