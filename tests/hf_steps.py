"""Models that decode with caches of ours: by steps in one call, and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import VOCAB
from transformers import PreTrainedModel

from headwise.cache.base import KVCache
from headwise.hf import make_cache
from headwise.hf.architectures import CACHE


def decoded(model: PreTrainedModel, cache: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """The logits of a text, and of three tokens more."""
    n = input_ids.shape[1] - 3
    tokens = [input_ids[:, :n], *input_ids[:, n:].split(1, dim=1)]
    masks = [attention_mask[:, : n + t] for t in range(4)]
    pairs = zip(tokens, masks, strict=True)
    return [model(ids, attention_mask=mask, **{CACHE: cache}).logits for ids, mask in pairs]


def generated(model: PreTrainedModel, cache: Any, **text: Any) -> Any:
    """Three tokens, and the logits of each."""
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.generate(**{CACHE: cache}, output_logits=True, return_dict_in_generate=True, **options, **text)
    return out.sequences, *out.logits


def steps(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, text: dict[str, Any], run: Any = decoded, **cache: Any
) -> int:
    """How many steps ran in one call; the logits are those of running without them."""
    taken = 0
    step = KVCache.step

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal taken
        out = step(*args, **options)
        taken += out is not None
        return out

    outs = []
    for stepped in (counted, lambda *args, **options: None):
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "step", stepped)
            outs.append(run(model, make_cache(model, max_length=64, **cache), **text))
    for ours, theirs in zip(*outs, strict=True):
        assert torch.equal(ours, theirs)
    return taken


def prompt(B: int, padded: bool = False) -> dict[str, Any]:
    ids = torch.randint(1, VOCAB, (B, 12))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}
