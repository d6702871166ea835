"""What some models add to the input of each layer: embeddings of its own, parallel streams, a low-rank residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..config.fields import Fields
from .parts import Part, linear, table, vector


def model_input_parts(fields: Fields, layers: int) -> Iterator[Part]:
    """Yield the parts that make the inputs of all layers at once.

    ``layer_inputs`` of the architecture names the width of an embedding for each layer and its vocabulary;
    ``streams`` the number of parallel residual streams; ``hyper_connections`` that of streams which are mixed before
    and after each block (Xie et al. 2026) and added up at the end.
    """
    width, about = fields.size("hidden_size"), fields.architecture.get("layer_inputs")
    inner = fields.optional(about["width"], least=0) if about else 0
    if about and inner:
        yield table("layer_embeddings", fields.size(about["vocab"]), layers * inner)
        yield linear("layer_inputs", "embedding", width, layers * inner)
        yield vector("layer_input_norm", "norm", inner)
    streams = fields.architecture.get("streams")
    if streams:
        for name in ("streams_in", "streams_out"):
            for _ in range(fields.size(streams["count"]) - 1):
                yield linear(name, "embedding", width, width)
    hyper = fields.architecture.get("hyper_connections")
    if hyper:
        count = fields.size(hyper)
        yield linear("streams_out", "embedding", count * width, count)
        yield vector("streams_out_bias", "embedding", count + 1)


def layer_input_parts(fields: Fields) -> Iterator[Part]:
    """Yield the parts of one layer that read its own embedding, mix the streams, or add a low-rank residual."""
    width, about = fields.size("hidden_size"), fields.architecture.get("layer_inputs")
    inner = fields.optional(about["width"], least=0) if about else 0
    if inner:
        yield linear("layer_input_gate", "mlp", width, inner)
        yield linear("layer_input_out", "mlp", inner, width)
        yield vector("layer_input_norm", "norm", width)
    streams = fields.architecture.get("streams")
    if streams:
        count = fields.size(streams["count"])
        router = linear("stream_router", "mlp", width, count)
        yield replace(router, macs=2 * router.macs)  # before the layer and after it
        yield Part("stream_mix", "mlp", 0, width * count * count)
        yield linear("stream_predict", "mlp", count, count * count)
        yield linear("stream_correct", "mlp", count, count)
        yield vector("stream_norms", "norm", 2 * width)
        rank = fields.size(streams["rank"])
        yield linear("residual_down", "mlp", width, rank)
        yield linear("residual_up", "mlp", rank, width)
        yield vector("residual_norm", "norm", width)
    hyper = fields.architecture.get("hyper_connections")
    if hyper:
        count = fields.size(hyper)
        for _ in range(2):  # before and after attention, and the feed-forward layer
            yield linear("stream_weights", "mlp", count * width, count * (count + 2))
            yield Part("stream_mix", "mlp", 0, count * count * width)
            yield vector("stream_bias", "mlp", count * (count + 2) + 3)
