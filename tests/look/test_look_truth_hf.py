"""Heads of known behaviour, by weights set by hand in transformers' own classes: rotary with shared keys (Llama), ALiBi
(BLOOM), and a learned bias by distance with cross-attention (T5)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import headwise.hf  # noqa: F401  # lets look see transformers models
from headwise import look

VOCABULARY, BOS, HEADS = 131, 1, 4
SHARP = 30.0
"""How far the score of what a head attends stands above the others."""


def bare(model: nn.Module) -> None:
    """Weights of 0, norms of 1."""
    for name, weight in model.named_parameters():
        nn.init.constant_(weight, float("norm" in name or "ln_f" in name) * float(name.endswith("weight")))


def codes(width: int) -> Tensor:
    """A unit vector for each token, far from each other."""
    code = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(0))
    return code / code.norm(dim=1, keepdim=True)


def rotary() -> nn.Module:
    """Layer 0: the token before, three before (on one key head), a sink, nothing; layer 1: induction, by the first.

    The residual is a token's one-hot code, a 1, and room for the code of the token before. Of a head's pairs the first
    turn with the position, and find places; those of the lowest frequencies stand still, and find tokens.
    """
    width, size, base = 128, 2 * VOCABULARY + 2, 1e12
    turn, half = base ** (-torch.arange(0, width, 2) / width), width // 2
    still = torch.cat([torch.arange(40, half), torch.arange(40, half) + half])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=size, intermediate_size=8, num_hidden_layers=2, bos_token_id=BOS,
            num_attention_heads=HEADS, num_key_value_heads=2, head_dim=width, max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": base},
        )
    )  # fmt: skip
    bare(model)
    table = model.model.embed_tokens.weight.data
    table[:, :VOCABULARY], table[:, VOCABULARY] = torch.eye(VOCABULARY), 1.0
    scale = 2 / size * math.sqrt(width)  # the norm divides by the root mean square of two ones
    first, second = (layer.self_attn for layer in model.model.layers)
    q, k = (part.weight.data.view(-1, width, size) for part in (first.q_proj, first.k_proj))
    for f in range(12):
        k[0, f, VOCABULARY] = math.sqrt(SHARP * scale)
        for head, back in ((0, 1), (1, 3)):
            q[head, f, VOCABULARY] = math.sqrt(SHARP * scale) * math.cos(turn[f] * back)
            q[head, f + half, VOCABULARY] = -math.sqrt(SHARP * scale) * math.sin(turn[f] * back)
    code = codes(len(still))
    k[1, still, :VOCABULARY] = code.T * SHARP
    q[2, still, VOCABULARY] = code[BOS] * SHARP * scale
    first.v_proj.weight.data[:VOCABULARY, :VOCABULARY] = torch.eye(VOCABULARY) * math.sqrt(2 / size)
    first.o_proj.weight.data[VOCABULARY + 1 : -1, :VOCABULARY] = torch.eye(VOCABULARY)
    second.k_proj.weight.data.view(-1, width, size)[0][still, VOCABULARY + 1 : -1] = code.T * SHARP
    second.q_proj.weight.data.view(-1, width, size)[0][still, :VOCABULARY] = code.T * SHARP * scale
    return model


def alibi() -> nn.Module:
    """The steepest slope alone, a sink, the same token, the flattest slope alone."""
    width, size = 64, 256
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=size, n_layer=1, n_head=HEADS))
    bare(model)
    table = torch.randn(VOCABULARY, size, generator=torch.Generator().manual_seed(0))
    model.transformer.word_embeddings.weight.data.copy_(nn.functional.layer_norm(table, (size,)))
    fused = model.transformer.h[0].self_attention.query_key_value
    weight, bias = fused.weight.data.view(HEADS, 3, width, size), fused.bias.data.view(HEADS, 3, width)
    weight[1, 1, 0] = model.transformer.word_embeddings.weight.data[BOS] / size
    bias[1, 0, 0] = 8 * SHARP * math.sqrt(width)
    weight[2, :2] = torch.randn(width, size, generator=torch.Generator().manual_seed(1)) / math.sqrt(size) * 2.5
    return model


def by_distance() -> nn.Module:
    """Encoder: one before, one after, three before, itself; decoder: one and two before, itself; across: the same."""
    size, width = 256, 16
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=size, d_kv=width, d_ff=8, num_layers=1, num_heads=HEADS,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    bare(model)
    model.shared.weight.data[:, :VOCABULARY] = torch.eye(VOCABULARY)
    encoder, decoder = (
        part.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data
        for part in (model.encoder, model.decoder)
    )
    for head, bucket in enumerate((1, 17, 3, 0)):  # buckets from 16 on are of keys behind the query
        encoder[bucket, head] = SHARP
    for head, bucket in enumerate((1, 2, 0)):
        decoder[bucket, head] = SHARP
    across = model.decoder.block[0].layer[1].EncDecAttention
    for part in (across.q, across.k):
        part.weight.data.view(HEADS, width, size)[0, :, :VOCABULARY] = codes(width).T
    return model


BROAD = ["broad"]
MODELS = {
    "rotary": (rotary, [["previous-token"], ["offset-3"], ["first-token sink"], BROAD, ["induction"], *[BROAD] * 3]),
    "alibi": (alibi, [["local band"], ["first-token sink"], ["duplicate-token", "self"], BROAD]),
    "by distance": (
        by_distance,
        [
            ["previous-token"], ["next-token"], ["offset-3"], ["self"],
            ["previous-token"], ["offset-2"], ["self"], BROAD,
            ["alignment"], BROAD, BROAD, BROAD,
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_called_what_they_were_built_to_do(name: str) -> None:
    build, wanted = MODELS[name]
    drawn = torch.randperm(VOCABULARY - 3, generator=torch.Generator().manual_seed(1)) + 3
    ids = [BOS, *drawn[:100].tolist()]
    seen = look.at(build().eval(), ids, delimiters=[], full_maps=False, map_size=1)
    assert [[score.name for score in head.roles] for head in seen.heads] == wanted
    assert all(max(score.value for score in head.roles) > 0.9 for head in seen.heads)
