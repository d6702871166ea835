"""What the planner says of a cache is what it takes, to the byte."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise.hf
import headwise.plan
from headwise.hf.models.architectures import CACHE

TOKENS = 300


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 8), (2, 8), (1, 16)], ids=["MHA", "GQA", "MQA"])
def test_bytes_as_planned(kv_heads: int, head_dim: int) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": 32}
    config = LlamaConfig(vocab_size=17, num_hidden_layers=3, intermediate_size=11, **sizes)
    model = LlamaForCausalLM._from_config(config, attn_implementation="headwise", dtype=torch.bfloat16).eval()
    cache = headwise.hf.make_cache(model, max_length=TOKENS)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), **{CACHE: cache})
    planned = headwise.plan.of(config.to_dict(), context=[TOKENS])
    assert cache.nbytes == planned.bytes_per_token * TOKENS == planned.contexts[0].cache_bytes
    small = headwise.hf.make_cache(model, max_length=TOKENS, bits=8)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long), **{CACHE: small})
    planned = headwise.plan.of(config.to_dict(), context=[TOKENS], kv_dtype="int8")
    assert small.nbytes == planned.bytes_per_token * TOKENS == planned.contexts[0].cache_bytes
