"""Tokens dropped from the caches of make_cache: the logits of a model whose mask hides them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hf_models import BY_NAME, B, padding, token_ids
from transformers import PreTrainedModel

from headwise.hf import make_cache
from headwise.hf.models.architectures import CACHE

N = 9


def logits(
    model: PreTrainedModel, pieces: list[torch.Tensor], mask: torch.Tensor, cache: Any, left: Any
) -> torch.Tensor:
    """Logits of the later pieces; after the first piece `left` changes the cache."""
    out, at = [], 0
    with torch.no_grad():
        for n, piece in enumerate(pieces):
            at += piece.shape[1]
            seen = mask[:, :at] if mask.ndim == 2 else mask[:, :, at - piece.shape[1] : at, :at]
            positions = torch.arange(at - piece.shape[1], at)[None].expand(B, -1)
            out.append(model(piece, attention_mask=seen, position_ids=positions, **{CACHE: cache}).logits)
            if n == 0 and left is not None:
                for layer in cache.layers:
                    layer.cache.keep(left)
    return torch.cat(out[1:], 1)


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_dropped_token_is_a_masked_one(kind: Literal["static", "paged"], bits: Literal[8] | None) -> None:
    row = BY_NAME["Llama GQA"]
    model = row.build()
    model.set_attn_implementation("headwise")
    ids = token_ids(N + 5, seed=3)
    pieces = list(ids.split([N, 1, 3, 1], dim=1))
    left = torch.tensor([0, 2, 3, 7])
    seen = torch.ones(N + 5, N + 5).tril().bool()
    seen[N:, [j for j in range(N) if j not in left.tolist()]] = False
    mask = seen.expand(B, 1, -1, -1)
    true = logits(model, pieces, mask, make_cache(model, kind, max_length=40, bits=bits), None)
    real = torch.ones(B, N + 5, dtype=torch.long)
    cache = make_cache(model, kind, max_length=N, bits=bits)  # room for what is left and what comes, no more
    ours = logits(model, pieces, real, cache, left)
    assert cache.get_seq_length() == N + 5 and cache.layers[0].cache.columns == [9] * B
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)  # another order of float32 sums, through a model


def test_padded_prompts() -> None:
    """With padding on the left, the columns that are padding stay hidden wherever they lie now."""
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    ids, real = token_ids(N + 2, seed=5), padding("left", N + 2)
    left = torch.tensor([0, 1, 4, 6, 8])
    pieces, out = list(ids.split([N, 1, 1], dim=1)), []
    for keeps in (False, True):
        cache = make_cache(model, max_length=30)
        out.append(logits(model, pieces, real, cache, left if keeps else None))
    poisoned = []
    for fill in (3, 4):  # other tokens under the padding change nothing
        changed = torch.where(real > 0, ids, fill)
        poisoned.append(
            logits(model, list(changed.split([N, 1, 1], dim=1)), real, make_cache(model, max_length=30), left)
        )
    assert torch.equal(*poisoned) and not torch.equal(*out)


def test_generate_goes_on_after_a_drop() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    ids = token_ids(N, seed=7)
    cache = make_cache(model, "paged", max_length=40)
    with torch.no_grad():
        model(ids[:, :-1], **{CACHE: cache})
    for n, layer in enumerate(cache.layers):
        layer.cache.drop([n, n + 2])
    text = model.generate(ids, **{CACHE: cache}, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    assert text.shape == (B, N + 6) and cache.get_seq_length() == N + 5
    assert [layer.cache.columns for layer in cache.layers] == [[N + 3] * B] * len(cache.layers)
