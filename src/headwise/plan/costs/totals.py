"""Cache bytes, operations and the floor on time of a model, as functions of context and batch.

One multiply and one add are two operations (FLOPs). Counted are matrix products: projections, scores, weighted sums,
feed-forward layers and the head; not softmax, norms, activations and rotations, which are a few a number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..model.layer import AttentionLayer, with_kv_heads
from ..model.model import Model
from ..model.parts import macs

KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = {"int8": 4}  # a float32 for every token and key-value head, of keys and of values
BATCHES = tuple(2**i for i in range(9))


@dataclass(frozen=True)
class Flops:
    """Operations of a pass, by where they happen.

    Attributes:
        projections: W_Q, W_K, W_V, W_O of all attention layers; and, once for the batch, those of vectors of positions.
        attention: Scores and weighted sums over the pairs that the masks allow.
        dense: The same over every pair of a query and a key, as attention that knows no masks computes it.
        rest: Feed-forward layers, the head (of the last token only where text is generated), convolutions, and the
            matrices of layers with a state; what moves the state itself is a few operations a number of it.
    """

    projections: int
    attention: int
    dense: int
    rest: int

    @property
    def total(self) -> int:
        """Projections, allowed pairs and the rest."""
        return self.projections + self.attention + self.rest

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {**asdict(self), "total": self.total}


def bytes_of(kv_dtype: str) -> tuple[int, int]:
    """Return bytes of a number in the cache, and of a vector's scale."""
    return KV_BYTES[kv_dtype], SCALE_BYTES.get(kv_dtype, 0)


def cache_bytes(
    model: Model, context: int, number_bytes: int, *, batch: int = 1, windowed: bool = True, scale_bytes: int = 0
) -> int:
    """Bytes of keys and values that `batch` texts of `context` tokens hold, and of their scales where they have them.

    `windowed`: layers that look through a window keep the window; else every layer keeps the whole context, which is
    what an engine reserves that gives all layers the same room.
    """
    source = model.source_tokens(context)
    return batch * sum(
        layer.cached_bytes(number_bytes, scale_bytes) * layer.cached_tokens(context, source, windowed=windowed)
        for layer in model.layers
    )


def state_bytes(model: Model, *, batch: int = 1) -> int:
    """Bytes of the states that `batch` texts hold, however long they are: convolutions' last inputs and the rest."""
    return batch * sum(layer.bytes(model.number_bytes) for layer in model.states)


def bytes_per_token(model: Model, number_bytes: int, scale_bytes: int = 0) -> int:
    """Return bytes that one more token takes while no window is full."""
    return sum(layer.cached_bytes(number_bytes, scale_bytes) for layer in model.layers if layer.role == "self")


def as_kv_heads(model: Model, kv_heads: int | None) -> Model | None:
    """Return the model with that many key-value heads (None: as many as query heads); None where H does not split."""
    if any(kv_heads is not None and layer.num_heads % kv_heads for layer in model.layers):
        return None
    return model.with_layers(tuple(with_kv_heads(layer, kv_heads or layer.num_heads) for layer in model.layers))


def prefill(model: Model, context: int, *, batch: int = 1) -> Flops:
    """Operations of reading `context` tokens; an encoder reads its source once, and cross-attention takes it over."""
    source = model.source_tokens(context)
    tokens = {"decoder": context, "encoder": context if model.is_encoder else source, "memory": source}
    projections = attention = dense = once = 0
    for layer in model.layers:
        queries, keys = _lengths(layer, context, source, model.is_encoder)
        projections += sum(layer.projection_macs(stream) * n for stream, n in tokens.items())
        made, positions = layer.position_macs(queries, keys)
        once += made
        attention += layer.score_macs() * layer.pairs(queries, keys) + positions
        dense += layer.score_macs() * queries * keys + positions
    head = [part for part in model.others if part.name == "lm_head"]
    rest = [part for part in model.others if part.name != "lm_head"]
    last = tokens["encoder"] if model.is_encoder else 1
    rest += [part for layer in model.states for part in layer.parts()]
    others = sum(macs(rest, stream) * n for stream, n in tokens.items()) + last * sum(part.macs for part in head)
    cost = _twice(batch, projections, attention, dense, others)
    return replace(cost, projections=cost.projections + 2 * once)


def decode(model: Model, context: int, *, batch: int = 1, absorbed: bool = True) -> Flops | None:
    """Return operations of the one token that makes a text `context` tokens long; None for a model that only reads.

    It meets all that the cache holds: in a layer with chunks as much as a chunk, of which its mask allows the tokens
    since the chunk began.

    `absorbed`: latent attention computed on the cached vectors themselves, as engines do; else their keys and values
    are made anew for the whole context at every token, as transformers does.
    """
    if model.is_encoder:
        return None
    source = model.source_tokens(context)
    projections = attention = 0
    for layer in model.layers:
        if layer.role == "encoder":
            continue
        keys = layer.cached_tokens(context, source)
        if layer.latent is None:
            projections += layer.projection_macs("decoder")
            attention += layer.score_macs() * keys
            continue
        expansion = layer.expansion_macs()
        projections += layer.projection_macs("decoder") - expansion
        each, pair = layer.absorbed_macs()
        projections += each if absorbed else expansion * keys
        attention += (pair if absorbed else layer.score_macs()) * keys
    others = [*model.others, *(part for layer in model.states for part in layer.parts())]
    return _twice(batch, projections, attention, attention, macs(others, "decoder"))  # one query, no mask


def _lengths(layer: AttentionLayer, context: int, source: int, is_encoder: bool) -> tuple[int, int]:
    """(queries, keys) of a layer when the whole context is read."""
    if layer.role == "encoder":
        return (context, context) if is_encoder else (source, source)
    return (context, source) if layer.role == "cross" else (context, context)


def _twice(batch: int, *macs_of: int) -> Flops:
    return Flops(*(2 * batch * number for number in macs_of))


def eager_bytes(model: Model, context: int, *, batch: int = 1, number_bytes: int = 2) -> tuple[int, int]:
    """(bytes, bytes): the weights of the largest layer written out, and one float32 a query and head in their place."""
    source = model.source_tokens(context)
    sizes = [(layer.num_heads, *_lengths(layer, context, source, model.is_encoder)) for layer in model.layers]
    matrix = max(heads * queries * keys for heads, queries, keys in sizes)
    return batch * matrix * number_bytes, batch * max(heads * queries for heads, queries, _ in sizes) * 4


# --- the floor on time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """The least that one decoding step of a batch takes on a machine, and what holds it there.

    Attributes:
        batch: Texts that take a step together.
        bytes: Read from memory: weights once, every text's cache and states.
        flops: Computed.
        intensity: FLOPs a byte.
        seconds: The longer of the two at full speed; None where no speed is given.
        tokens_per_second: Of all texts together, at most.
        binds: What takes that long: ``weights``, ``cache`` or ``compute``; empty where no speed is given.
    """

    batch: int
    bytes: int
    flops: int
    intensity: float
    seconds: float | None = None
    tokens_per_second: float | None = None
    binds: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def weight_bytes_read(model: Model) -> int:
    """Bytes of weights that a step reads at least: those one token passes. More experts may be met; never fewer."""
    stream = "encoder" if model.is_encoder else "decoder"
    passed = [part for part in model.parts() if part.stream == stream and part.active]
    shared = sum(part.active * model.weight_bytes for part in passed if not part.parameters)
    return shared + sum(model.part_bytes(part) * part.active // part.parameters for part in passed if part.parameters)


def floors(
    model: Model,
    context: int,
    number_bytes: int,
    *,
    bandwidth: float | None = None,
    flop_rate: float | None = None,
    scale_bytes: int = 0,
) -> tuple[Floor, ...]:
    """The floor of a decoding step at that context, for batches of 1, 2, 4, ... 256; empty for a model that only reads.

    `bandwidth` is in bytes a second, `flop_rate` in FLOPs a second. Real engines are slower.
    """
    one = decode(model, context)
    if one is None:
        return ()
    weights = weight_bytes_read(model)
    cache = cache_bytes(model, context, number_bytes, scale_bytes=scale_bytes) + state_bytes(model)
    floors = []
    for batch in BATCHES:
        read, flops = weights + batch * cache, batch * one.total
        floor = Floor(batch, read, flops, flops / read)
        times = {"weights" if weights >= batch * cache else "cache": read / bandwidth} if bandwidth else {}
        times |= {"compute": flops / flop_rate} if flop_rate else {}
        if times:
            binds = max(times, key=lambda name: times[name])
            floor = replace(floor, seconds=times[binds], tokens_per_second=batch / times[binds], binds=binds)
        floors.append(floor)
    return tuple(floors)
