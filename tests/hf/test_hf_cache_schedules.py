"""Our caches in transformers' models over drawn schedules of calls, against eager attention with a DynamicCache; and
what a step, a crop, packed sequences and the pieces of a text do at their edges."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, VOCAB
from native_cases import collected
from test_hf_attention import SomeAttention
from test_hf_tokens import Letters
from torch import Tensor
from transformers import DynamicCache

import headwise
from headwise.hf import ModelError, make_cache
from headwise.hf.attention.function import headwise_attention
from headwise.hf.attention.mask import StructuralMask
from headwise.hf.loading.tokenizer import encode
from headwise.hf.models.architectures import CACHE


def drawn(seed: int, sliding: bool) -> list[tuple[str, Any]]:
    """Calls on a cache: tokens to feed, tokens to take back, rows."""
    make = random.Random(seed)
    calls: list[tuple[str, Any]] = [("feed", make.choice([5, 9]))]
    for _ in range(7):
        what = make.random()
        if what < 0.6:
            calls.append(("feed", make.choice([1, 1, 1, 3])))
        elif what < 0.8:
            calls.append(("crop", make.choice([1, 2])))
        elif not sliding:
            calls.append(("rows", [make.randrange(3) for _ in range(3)]))
    return [*calls, ("feed", 1)]


def run(model: Any, cache: Any, calls: list[tuple[str, Any]], padding: list[int]) -> list[Tensor]:
    """The logits of the real tokens of each call; row b has padding[b] tokens on its left.

    Without a cache the whole text is run at each call.
    """
    draw, outs = torch.Generator().manual_seed(len(calls)), []
    ids, behind = torch.zeros(3, 0, dtype=torch.long), torch.tensor(padding)
    with torch.no_grad():
        for what, number in calls:
            if what == "crop":
                ids = ids[:, :-number]
                if cache is not None:
                    cache.crop(-number)
                continue
            if what == "rows":
                ids, behind = ids[number], behind[number]
                if cache is not None:
                    cache.reorder_cache(torch.tensor(number))
                continue
            ids = torch.cat([ids, torch.randint(1, VOCAB, (3, number), generator=draw)], 1)
            real = (torch.arange(ids.shape[1]) >= behind[:, None]).long()
            positions = (real.cumsum(-1) - 1).clamp(min=0)
            new = slice(None) if cache is None else slice(-number, None)
            texts = {"input_ids": ids[:, new], "attention_mask": real, "position_ids": positions[:, new]}
            logits = model(**texts, **{CACHE: cache}, use_cache=cache is not None).logits[:, -number:]
            outs.append(logits[real[:, -number:].bool()])
    return outs


@pytest.mark.parametrize("name", ["Llama GQA", "Mistral window", "gpt-oss sinks", "Qwen2"])
def test_drawn_calls_on_left_padded_rows_give_the_logits_of_eager(name: str) -> None:
    """Of eager on the whole text at each call, and with a DynamicCache, which windows cannot crop in eager."""
    ours = BY_NAME[name].build()
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("eager")
    ours.set_attn_implementation("headwise")
    sliding = name != "Llama GQA"
    with collected() as attempt:
        for seed in range(3):
            calls, padding = drawn(seed, sliding), [[0, 3, 1], [2, 0, 4], [0, 0, 0]][seed]
            whole = run(theirs, None, calls, padding)
            caches: dict[str, Any] = {kind: make_cache(ours, kind, max_length=64) for kind in ("static", "paged")}
            if not sliding:
                caches["dynamic, eager"] = DynamicCache(config=theirs.config)
            scale = max(float(x.abs().max()) for x in whole)
            for kind, cache in caches.items():
                for layer in cache.layers:
                    if hasattr(layer, "activate_past_recording"):
                        layer.activate_past_recording()
                outs = run(theirs if "eager" in kind else ours, cache, calls, padding)
                for turn, (x, y) in enumerate(zip(outs, whole, strict=True)):
                    near = {"rtol": 0.0, "atol": 1e-5 * scale}  # as test_hf_models measures it
                    attempt((kind, seed, turn), torch.testing.assert_close, x, y, **near)


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_crop_of_all_tokens_or_more_leaves_none(kind: Any) -> None:
    """What comes then has the logits of a fresh cache, to the bit."""
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    first, then = (torch.randint(1, VOCAB, (2, n), generator=torch.Generator().manual_seed(n)) for n in (6, 4))
    with torch.no_grad():
        want = model(input_ids=then, **{CACHE: make_cache(model, kind, max_length=20)}).logits
        for back in (6, 7, 600):
            cache = make_cache(model, kind, max_length=20)
            model(input_ids=first, **{CACHE: cache})
            for layer in cache.layers:
                layer.crop(-back)
            assert [layer.get_seq_length() for layer in cache.layers] == [0] * len(cache.layers)
            assert torch.equal(model(input_ids=then, **{CACHE: cache}).logits, want)
        cache.layers[0].crop(0)
        assert cache.layers[0].get_seq_length() == 4, "nothing is to be taken back"
        cache.layers[0].crop(-3)
        assert cache.layers[0].get_seq_length() == 1


@pytest.mark.unchecked
def test_a_step_is_for_heads_that_fit_the_groups_of_the_module() -> None:
    """One token is refused where a query would read another head's keys, as any number of tokens is."""
    module = SomeAttention()
    module.num_key_value_groups, module.config = 2, SimpleNamespace(num_attention_heads=4)

    def attend(H: int, K: int) -> Tensor:
        key = torch.zeros(1, K, 3, 6)
        return headwise_attention(module, torch.zeros(1, H, 1, 6), key, key, None)[0]

    for H, K in ((4, 2), (6, 3), (4, 4)):  # the last: a model that repeats its keys for all heads itself
        assert attend(H, K).shape == (1, 1, H, 6)
    for H, K in ((4, 1), (8, 2), (2, 2), (6, 2)):
        with pytest.raises(ModelError, match=f"passes {H} query heads and {K} key-value heads, and the model has 2 q"):
            attend(H, K)
    module.num_key_value_groups = None
    assert attend(4, 1).shape == attend(4, 4).shape == (1, 1, 4, 6)


SEQUENCES = {
    "the same": ([0, 0, 0, 1, 1, 2, 2], True),
    "finer": ([0, 1, 1, 2, 3, 4, 4], True),
    "numbers that skip": ([1, 1, 1, 5, 5, 9, 9], True),
    "coarser": ([0, 0, 0, 0, 0, 1, 1], False),
    "at another place": ([0, 0, 1, 1, 1, 2, 2], False),
    "one that comes again": ([0, 0, 0, 1, 1, 0, 0], False),
    "one that comes again at once": ([1, 1, 1, 0, 0, 1, 1], False),
    "one of the first within the last": ([0, 0, 0, 1, 1, 2, 0], False),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("name", SEQUENCES)
def test_segments_of_a_mask_hold_for_packed_sequences_where_they_keep_them_apart(name: str) -> None:
    """Three sequences of 3, 2 and 2 tokens: attended each by itself, or refused; never joined in silence."""
    ids, apart = SEQUENCES[name]
    numbers, S = torch.tensor([ids]), len(ids)
    mask = headwise.causal() & headwise.segments(numbers, numbers)
    query, key, value = torch.randn(1, 4, S, 6), torch.randn(1, 2, S, 6), torch.randn(1, 2, S, 5)
    ends = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 3, 5, 7], dtype=torch.int32))
    carrier = StructuralMask(mask, (1, 1, S, S))
    if not apart:
        with pytest.raises(ValueError, match="with a mask of chunks or sequences that do not end where these do"):
            headwise_attention(SomeAttention(), query, key, value, carrier, **ends)
        return
    out = headwise_attention(SomeAttention(), query, key, value, carrier, **ends)[0].transpose(1, 2)
    of = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    seen = (of[:, None] == of) & (numbers[0][:, None] == numbers[0]) & torch.ones(S, S).tril().bool()
    torch.testing.assert_close(out, headwise.attention(query, key, value, mask=headwise.keep(seen)))


class Offsets(Letters):
    """A tokenizer that says of its tokens what one gives it: which characters each covers."""

    def __init__(self, offsets: list[tuple[int, int]]) -> None:
        self.offsets = offsets

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict[str, Any]:
        ids = list(range(97, 97 + len(self.offsets)))
        return {"input_ids": ids} | ({"offset_mapping": self.offsets} if return_offsets_mapping else {})


def test_pieces_are_the_text_wherever_the_offsets_go() -> None:
    """Bytes of one character repeat its offsets; normalizers and added tokens may go back, or leave gaps."""
    text = "abcdefgh"
    for offsets, want in (
        ([(0, 3), (1, 2), (3, 4)], ("abc", "\ufffd", "d")),
        ([(0, 0), (0, 4), (2, 3), (1, 2), (4, 6)], ("<a>", "abcd", "\ufffd", "\ufffd", "ef")),
        ([(0, 1), (0, 1), (3, 5)], ("a", "\ufffd", "bcde")),
    ):
        assert encode(Offsets(offsets), text, None)[1] == want
    for seed in range(200):
        make = random.Random(seed)
        spans = []
        for _ in range(make.randint(1, 9)):
            start = make.randint(0, 8)
            spans.append((start, make.randint(start, 8)))
        _, pieces = encode(Offsets(spans), text, None) if seed < 3 else (0, _pieces(spans, text))
        assert len(pieces) == len(spans)
        shown = "".join(piece for piece in pieces if piece != "\ufffd" and not piece.startswith("<"))
        assert shown == text[: max(stop for _, stop in spans)]


def _pieces(spans: list[tuple[int, int]], text: str) -> tuple[str, ...]:
    """`encode`, without the process in which a tokenizer is tried first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.hf.loading.tokenizer._refuse_long", lambda *args: None)
        return encode(Offsets(spans), text, None)[1]
