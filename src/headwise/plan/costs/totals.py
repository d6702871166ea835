"""Cache bytes, FLOPs and the least time of a model, as functions of context and batch.

One multiply-add is two floating-point operations (FLOPs). Matrix products are counted: projections, scores, weighted
sums, feed-forward layers and the unembedding. Softmax, norms, activations and rotations (a few FLOPs per number) are
not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from ..model.layer import AttentionLayer, with_kv_heads
from ..model.model import Model
from ..model.parts import distinct_experts, macs
from ..shape import short

KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = {"int8": 4}  # one float32 per token and key-value head, for keys and for values
BATCHES = tuple(2**i for i in range(9))


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a pass, by operation.

    Attributes:
        projections: W_Q, W_K, W_V, W_O of all attention layers; and, once per batch, those of position vectors.
        attention: Scores and weighted sums over the pairs that the masks allow.
        dense: The same over all pairs of a query and a key, as computed without masks.
        rest: Feed-forward layers, the unembedding (for generated text only of the last token), convolutions, and the
            matrices of layers with a state; updates of the state itself, a few FLOPs per number, are not counted.
        indexer: Scores of the indexers of sparse attention, over all earlier keys; 0 for most models.
    """

    projections: int
    attention: int
    dense: int
    rest: int
    indexer: int = 0

    @property
    def total(self) -> int:
        """Projections, allowed pairs, scores of indexers and the rest."""
        return self.projections + self.attention + self.indexer + self.rest

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as a dict for JSON."""
        return {**asdict(self), "total": self.total}


def check_kv_dtype(kv_dtype: object) -> None:
    """Raise ValueError unless it is the name of a dtype for a cache."""
    if not isinstance(kv_dtype, str) or kv_dtype not in KV_BYTES:
        raise ValueError(f"kv_dtype is one of {', '.join(KV_BYTES)}; got {short(kv_dtype)}")


def bytes_of(kv_dtype: str) -> tuple[int, int]:
    """Return the bytes of a number in the cache, and of the scale of a vector."""
    return KV_BYTES[kv_dtype], SCALE_BYTES.get(kv_dtype, 0)


def cache_bytes(
    model: Model, context: int, number_bytes: int, *, batch: int = 1, windowed: bool = True, scale_bytes: int = 0
) -> int:
    """Return the cache bytes of keys, values and any scales, for `batch` texts of `context` tokens.

    `windowed`: layers with a window keep only the window. If False, every layer keeps the whole context, as in an
    engine that reserves the same memory for all layers.
    """
    source = model.source_tokens(context)
    return batch * sum(
        layer.cached_bytes(number_bytes, scale_bytes) * layer.cached_tokens(context, source, windowed=windowed)
        + layer.compressed_bytes(number_bytes, scale_bytes) * layer.compressed_keys(context)
        for layer in model.layers
    )


def state_bytes(model: Model, *, batch: int = 1) -> int:
    """Return the bytes of the states of `batch` texts of any length: last convolution inputs and recurrent states."""
    return batch * sum(layer.bytes(model.weight_bytes) for layer in model.states)


def bytes_per_token(model: Model, number_bytes: int, scale_bytes: int = 0) -> int:
    """Return the cache bytes of one more token while no window is full, with its share of compressed keys."""
    own = [layer for layer in model.layers if layer.role == "self"]
    shares = sum(
        Fraction(layer.compressed_bytes(number_bytes, scale_bytes), layer.compressor.rate)
        for layer in own
        if layer.compressor is not None
    )
    return sum(layer.cached_bytes(number_bytes, scale_bytes) for layer in own) + round(shares)


def as_kv_heads(model: Model, kv_heads: int | None) -> Model | None:
    """Return the model with `kv_heads` key-value heads (None: as many as query heads), or None if not divisible."""
    if any(kv_heads is not None and layer.num_heads % kv_heads for layer in model.layers):
        return None
    return replace(model, layers=tuple(with_kv_heads(layer, kv_heads or layer.num_heads) for layer in model.layers))


def prefill(model: Model, context: int, *, batch: int = 1) -> Flops:
    """Return the FLOPs of reading `context` tokens; an encoder reads its source once for all cross-attention."""
    source = model.source_tokens(context)
    tokens = {"decoder": context, "encoder": context if model.is_encoder else source, "memory": source}
    projections = attention = dense = once = index = 0
    for layer in model.layers:
        queries, keys = _lengths(layer, context, source, model.is_encoder)
        projections += sum(layer.projection_macs(stream) * n for stream, n in tokens.items())
        made, positions = layer.position_macs(queries, keys)
        once += made
        attention += layer.score_macs() * layer.pairs(queries, keys) + positions
        dense += layer.score_macs() * queries * (keys + layer.compressed_keys(keys)) + positions
        index += layer.index_macs(queries, keys)
    head = [part for part in model.others if part.name == "lm_head"]
    rest = [part for part in model.others if part.name != "lm_head"]
    last = tokens["encoder"] if model.is_encoder else 1
    rest += [part for layer in model.states for part in layer.parts()]
    others = sum(macs(rest, stream) * n for stream, n in tokens.items()) + last * sum(part.macs for part in head)
    cost = _twice(batch, projections, attention, dense, others, index)
    return replace(cost, projections=cost.projections + 2 * once)


def decode(model: Model, context: int, *, batch: int = 1, absorbed: bool = True) -> Flops | None:
    """Return the FLOPs of one token that makes a text `context` tokens long; None for an encoder.

    All cached keys are counted. In a layer with chunks these are as many as in a chunk, although the mask allows only
    the tokens since the chunk began.

    `absorbed`: latent attention is computed on the cached latents, as engines do, and only on those that an indexer
    chose. If False, keys and values of the whole context are recomputed for every token, as transformers does.
    """
    if model.is_encoder:
        return None
    source = model.source_tokens(context)
    projections = attention = index = 0
    for layer in model.layers:
        if layer.role == "encoder":
            continue
        keys = layer.cached_tokens(context, source)
        index += layer.index_macs(1, context)
        if layer.latent is None:
            projections += layer.projection_macs("decoder")
            attention += layer.score_macs() * (keys + layer.compressed_keys(context, attended=True))
            continue
        expansion = layer.expansion_macs()
        projections += layer.projection_macs("decoder") - expansion
        each, pair = layer.absorbed_macs()
        projections += each if absorbed else expansion * keys
        chosen = keys if layer.indexer is None else min(keys, layer.indexer.top_k)
        attention += pair * chosen if absorbed else layer.score_macs() * keys
    others = [*model.others, *(part for layer in model.states for part in layer.parts())]
    return _twice(batch, projections, attention, attention, macs(others, "decoder"), index)  # one query, no mask


def _lengths(layer: AttentionLayer, context: int, source: int, is_encoder: bool) -> tuple[int, int]:
    """Return (queries, keys) of a layer when the whole context is read."""
    if layer.role == "encoder":
        return (context, context) if is_encoder else (source, source)
    return (context, source) if layer.role == "cross" else (context, context)


def _twice(batch: int, *macs_of: int) -> Flops:
    return Flops(*(2 * batch * number for number in macs_of))


def eager_bytes(model: Model, context: int, *, batch: int = 1, number_bytes: int = 2) -> tuple[int, int]:
    """Return the bytes of the attention weights of the largest layer, and of one float32 per query and head."""
    source = model.source_tokens(context)
    sizes = [(layer, *_lengths(layer, context, source, model.is_encoder)) for layer in model.layers]
    matrix = max(one.num_heads * queries * (keys + one.compressed_keys(keys)) for one, queries, keys in sizes)
    return batch * matrix * number_bytes, batch * max(one.num_heads * queries for one, queries, _ in sizes) * 4


# --- the least time ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """The least time of one decode step of a batch on a machine, and the resource that limits it.

    Attributes:
        batch: The number of texts in a step.
        bytes: Bytes read from memory: weights once (of a mixture the experts that the batch is expected to use), and
            what attention reads of the cache and states of every text.
        flops: FLOPs computed.
        intensity: FLOPs per byte.
        seconds: The longer of the two times at full speed; None if no speed is given.
        tokens_per_second: The most tokens per second of all texts together.
        binds: The resource that takes the longest: ``weights``, ``cache`` or ``compute``; empty if no speed is given.
        experts: The different experts that the batch is expected to use in a mixture layer; None without a mixture.
    """

    batch: int
    bytes: int
    flops: int
    intensity: float
    seconds: float | None = None
    tokens_per_second: float | None = None
    binds: str = ""
    experts: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
        return asdict(self)


def weight_bytes_read(model: Model, batch: int = 1) -> int:
    """Return the bytes of weights that a decode step of `batch` tokens reads.

    A mixture's experts count as often as different ones are expected, as in `parts.distinct_experts`.
    """
    stream = "encoder" if model.is_encoder else "decoder"
    passed = [part for part in model.parts() if part.stream == stream and part.active]
    shared = sum(part.active * model.weight_bytes for part in passed if not part.parameters)
    return shared + sum(part.bytes_read(model.part_bytes(part), batch) for part in passed if part.parameters)


def cache_bytes_read(model: Model, context: int, number_bytes: int, *, scale_bytes: int = 0) -> int:
    """Return the bytes of keys and values that a decode step reads for one text: of sparse attention the chosen ones.

    Layers that share keys and values read them once each.
    """
    source = model.source_tokens(context)
    return sum(layer.read_bytes(context, source, number_bytes, scale_bytes) for layer in model.layers)


def floors(
    model: Model,
    context: int,
    number_bytes: int,
    *,
    bandwidth: float | None = None,
    flop_rate: float | None = None,
    scale_bytes: int = 0,
) -> tuple[Floor, ...]:
    """Return the least times of a decode step at this context, for batches of 1, 2, 4, ... 256; empty for an encoder.

    `bandwidth` is in bytes per second, `flop_rate` in FLOPs per second. Real engines are slower.
    """
    one = decode(model, context)
    if one is None:
        return ()
    cache = cache_bytes_read(model, context, number_bytes, scale_bytes=scale_bytes) + state_bytes(model)
    mixture = next((part for part in model.others if part.copies > 1), None)
    floors = []
    for batch in BATCHES:
        weights = weight_bytes_read(model, batch)
        read, flops = weights + batch * cache, batch * one.total
        experts = None if mixture is None else distinct_experts(mixture.copies, mixture.used, batch)
        floor = Floor(batch, read, flops, flops / read, experts=experts)
        times = {"weights" if weights >= batch * cache else "cache": read / bandwidth} if bandwidth else {}
        times |= {"compute": flops / flop_rate} if flop_rate else {}
        if times:
            binds = max(times, key=lambda name: times[name])
            floor = replace(floor, seconds=times[binds], tokens_per_second=batch / times[binds], binds=binds)
        floors.append(floor)
    return tuple(floors)
