"""The parts of an encoder-decoder model from the fields of its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..config.fields import Fields
from ..shape import check_heads, short
from .feed_forward import feed_forward
from .layer import AttentionLayer
from .parts import BIASES, Part, linear, table, vector
from .single_stack import biases, norm_size

STACKS = ("encoder", "decoder")


def attention_layers(fields: Fields) -> list[AttentionLayer]:
    """Return the self-attention layers of both stacks, and the decoder's cross-attention layers.

    Raises:
        ValueError: a field with an invalid value.
    """
    encoder = _layer(fields, "encoder")
    decoder = _layer(fields, "decoder")
    layers = [replace(encoder, role="encoder", index=i) for i in range(fields.size("encoder_layers"))]
    for i in range(fields.size("decoder_layers")):
        layers += [replace(decoder, index=i), replace(decoder, role="cross", index=i)]
    return layers


def _layer(fields: Fields, stack: str) -> AttentionLayer:
    width, heads = fields.size("hidden_size"), fields.size(f"{stack}_heads")
    dim = fields.size("head_dim") if "head_dim" in fields.own else None
    check_heads(width, heads, heads, dim)
    dim = width // heads if dim is None else dim
    return AttentionLayer("self", 0, width, heads, heads, dim, dim, bias=biases(fields))


def other_parts(fields: Fields, *, with_head: bool) -> Iterator[Part]:
    """Yield all parts except attention; the unembedding shares the embedding's matrix unless the config unties them."""
    about, width, vocab = fields.architecture, fields.size("hidden_size"), fields.size("vocab_size")
    tied = "tie_word_embeddings" not in fields.defaults or fields.flag("tie_word_embeddings")
    yield table("embeddings", vocab * (1 if tied else about.get("untied_tables", 1)), width)
    if "audio" in about:
        yield from _audio(fields, about["audio"], width)
    for stack in STACKS:
        yield from _stack(fields, stack, width)
    if with_head:
        yield Part("lm_head", "head", 0 if tied else vocab * width, vocab * width, vocab * width)


def _stack(fields: Fields, stack: str, width: int) -> Iterator[Part]:
    about = fields.architecture
    layers, inner = fields.size(f"{stack}_layers"), fields.size(f"{stack}_ffn")
    gated, bias = _gated(fields), fields.choice("mlp_bias")
    norms = (3 if stack == "decoder" else 2) * norm_size(fields, width)
    for _ in range(layers):
        yield feed_forward("mlp", width, inner, gated=gated, bias=bias, stream=stack)
        yield vector("norms", "norm", norms, stream=stack)
    if about.get("positions") and not ("audio" in about and stack == "encoder"):
        rows = fields.size(about["positions"]) + about.get("position_extra", 0)
        yield table("positions", rows, width, stream=stack)
    if about.get("relative_buckets"):
        rows = fields.size(about["relative_buckets"])
        yield table(BIASES, rows, fields.size(f"{stack}_heads"), stream=stack)
    if about.get("embed_norm"):
        yield vector("embedding_norm", "norm", norm_size(fields, width), stream=stack)
    if about["final_norm"]:
        yield vector("final_norm", "norm", norm_size(fields, width), stream=stack)


def _gated(fields: Fields) -> bool:
    """Return whether the feed-forward layers are gated; a text such as ``gated-gelu`` decides."""
    choice = fields.architecture["mlp"]
    if choice in ("plain", "gated"):
        return bool(choice == "gated")
    words = fields.text(choice).split("-")
    if len(words) > 2 or (len(words) == 2 and words[0] != "gated"):
        raise ValueError(f"{choice} is an activation or gated-activation; got {fields.text(choice)[:40]!r}")
    gated = words[0] == "gated"
    if fields.config.get("is_gated_act", gated) is not gated:
        raise ValueError(f"contradicts itself: is_gated_act = {short(fields.config['is_gated_act'])} beside {choice}")
    return gated


def _audio(fields: Fields, audio: dict[str, Any], width: int) -> Iterator[Part]:
    """Yield two convolutions over three frames each (the second with stride 2) and positions; two frames per token."""
    channels = fields.size(audio["channels"])
    first = linear("conv1", "embedding", 3 * channels, width, bias=True, stream="encoder")
    yield replace(first, macs=2 * first.macs)  # It runs on both frames of a token.
    yield linear("conv2", "embedding", 3 * width, width, bias=True, stream="encoder")
    yield table("positions", fields.size(audio["positions"]), width, stream="encoder")
