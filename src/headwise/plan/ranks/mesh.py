"""A model over many ranks: what each holds, what it sends, and the least time a prefill and a decoded token take.

Ranks form a grid: `tensor` of them share the heads and the feed-forward layers, `context` of them the tokens. All of it
is arithmetic on `links`; nothing is measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ..costs.totals import bytes_of, state_bytes
from ..model.layer import AttentionLayer
from ..model.model import Model
from ..model.parts import Part
from . import communication as links
from .communication import Cost, Link
from .sharding import MeshCall, heads_at_once, keys_by_rank, remote_keys, shares
from .weight_shards import WHOLE, parts_of, rank_bytes
from .weight_shards import local as local


@dataclass(frozen=True)
class Grid:
    """Ranks, and what lies between and in them.

    Attributes:
        tensor: Ranks that share heads and widths.
        context: Ranks that share tokens.
        link: From one rank to another.
        bandwidth: A rank's memory, bytes a second; None where it is not known.
        flop_rate: A rank's FLOPs a second; None where it is not known.
    """

    tensor: int
    context: int
    link: Link
    bandwidth: float | None = None
    flop_rate: float | None = None

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.context


@dataclass(frozen=True)
class LayerSpread:
    """Layers that are alike, on one rank.

    Attributes:
        kind: What they look at: ``causal``, ``window W``, ``chunks of C``, ``both ways``.
        count: How many layers.
        tensor_bytes: Sent by the rank that sends most in a prefill's two all-reduces of one layer.
        costs: The context layouts, the cheapest first; of one layer's attention, forward.
        backward: Bytes each layout sends on the way back, by name.
        activations: Bytes one layer needs at once in a prefill, by layout.
        decode_bytes: Sent in one decoded token: two all-reduces, and partial outputs between the context ranks.
        decode_messages: One after another.
    """

    kind: str
    count: int
    tensor_bytes: int
    costs: tuple[Cost, ...]
    backward: dict[str, int]
    activations: dict[str, int]
    decode_bytes: int
    decode_messages: int

    @property
    def choose(self) -> Cost:
        """The cost of the cheapest layout."""
        return self.costs[0]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        costs = [{**asdict(cost), "seconds": cost.seconds, "backward_bytes": self.backward[cost.layout],
                  "activation_bytes": self.activations[cost.layout]} for cost in self.costs]  # fmt: skip
        mine = {name: value for name, value in asdict(self).items() if name not in ("costs", "backward", "activations")}
        return {**mine, "choose": self.choose.layout, "layouts": costs}


@dataclass(frozen=True)
class TimeEstimate:
    """The least time of a pass, by what takes it; None where a speed is not known.

    Attributes:
        compute: Matrix products of the rank that computes most.
        memory: Weights and cache once from memory; in a prefill weights only.
        link: What cannot be hidden behind computing.
        total: The longer of computing and memory, and the link.
    """

    compute: float | None
    memory: float | None
    link: float
    total: float | None


@dataclass(frozen=True)
class MeshCost:
    """A model at one context over a grid of ranks. Made by `spread`.

    Attributes:
        model: The model as read.
        grid: The ranks.
        tokens: Of a text.
        batch: Texts.
        weight_bytes: A rank's.
        cache_bytes: A rank's, of the one that holds most; states included.
        layers: Kinds of layers.
        prefill: Of reading the tokens.
        decode: Of one more; None for a model that only reads.
    """

    model: Model
    grid: Grid
    tokens: int
    batch: int
    weight_bytes: int
    cache_bytes: int
    layers: tuple[LayerSpread, ...]
    prefill: TimeEstimate
    decode: TimeEstimate | None

    @cached_property
    def activation_bytes(self) -> int:
        """What the layer that needs most needs at once in a prefill, each in the layout to choose."""
        return max(layer.activations[layer.choose.layout] for layer in self.layers)

    def sent(self) -> int:
        """Return bytes that a rank sends in a prefill, each layer in the layout to choose."""
        return sum(layer.count * (layer.tensor_bytes + layer.choose.bytes) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ranks": self.grid.ranks,
            "tensor": self.grid.tensor,
            "context": self.grid.context,
            "tokens": self.tokens,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "activation_bytes": self.activation_bytes,
            "prefill_bytes_sent": self.sent(),
            "layers": [layer.to_dict() for layer in self.layers],
            "prefill": asdict(self.prefill),
            "decode": None if self.decode is None else asdict(self.decode),
        }


def spread(model: Model, grid: Grid, tokens: int, *, batch: int = 1, kv_dtype: str = "bf16") -> MeshCost:
    """Return the model at that context over the ranks.

    Raises:
        ValueError: an encoder with a decoder, or heads or widths that the tensor ranks do not divide.
    """
    check_grid(model, grid)
    kinds: dict[AttentionLayer, int] = {}
    for layer in model.layers:
        far = layer.window is None or layer.window >= tokens
        alike = replace(layer, index=0, window=None if far else layer.window, chunked=layer.chunked and not far)
        kinds[alike] = kinds.get(alike, 0) + 1
    layers = tuple(_layer(model, grid, layer, count, tokens, batch) for layer, count in kinds.items())
    weights = sum(rank_bytes(model, part, whole) for part, whole in parts_of(model, grid.tensor))
    numbers = bytes_of(kv_dtype)
    cache = sum(count * _cached(layer, grid, tokens, numbers) for layer, count in kinds.items()) * batch
    cache += state_bytes(model, batch=batch)
    prefill = _prefill(model, grid, layers, tokens, batch, weights)
    decode = None if model.is_encoder else _decode(model, grid, kinds, layers, tokens, batch, cache)
    return MeshCost(model, grid, tokens, batch, weights, cache, layers, prefill, decode)


def check_grid(model: Model, grid: Grid) -> None:
    """Raise ValueError where the tensor ranks do not divide what they share."""
    if any(layer.role == "cross" for layer in model.layers):
        raise ValueError("an encoder with a decoder is not planned over several ranks")
    n = grid.tensor
    for layer in model.layers:
        if layer.num_heads % n:
            raise ValueError(f"tensor = {n} does not divide the {layer.num_heads} query heads of layer {layer.index}")
        kv = layer.num_kv_heads
        if kv % n and n % kv and layer.latent is None:
            raise ValueError(f"tensor = {n} neither divides the {kv} key-value heads of layer {layer.index} nor is a "
                             "multiple of them")  # fmt: skip
    for part in model.others:
        inner = part.matrices[0][1] if part.room == "mlp" and part.matrices and part.name not in WHOLE else n
        if inner % n:
            raise ValueError(f"tensor = {n} does not divide the width of the feed-forward layers, {inner}")


def call_of(layer: AttentionLayer, tokens: int, number_bytes: int, batch: int = 1) -> MeshCall:
    """Return the attention of a layer over a whole text, under its own mask."""
    both, window = layer.role == "encoder", layer.window
    reach = None if window is None else (window - 1) // 2 if both else window - 1
    return MeshCall(
        tokens,
        tokens,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.value_dim,
        number_bytes,
        batch,
        None if layer.chunked else reach,
        reach if both else 0,
        window if layer.chunked else None,
        None if layer.latent is None else layer.latent.kv_rank + layer.latent.rope_dim,
    )


# --- one kind of layer ------------------------------------------------------------------------------------------------


def _layer(model: Model, grid: Grid, layer: AttentionLayer, count: int, tokens: int, batch: int) -> LayerSpread:
    mine, e, n = local(layer, grid.tensor), model.number_bytes, grid.context
    call = call_of(mine, tokens, e, batch)
    costs = links.layout_costs(call, n, link=grid.link, flop_rate=grid.flop_rate)
    most = shares(tokens, n)[0] * batch
    reduced = 2 * max(links.all_reduce(most * layer.d_model, grid.tensor)) * e
    token = 2 * max(links.all_reduce(batch * layer.d_model, grid.tensor)) * e
    partial, steps = _merging(call, mine, n, tokens)
    steps += 4 * _steps(grid.tensor)
    return LayerSpread(
        _kind(layer),
        count,
        reduced,
        costs,
        {cost.layout: max(links.sent(call, cost.layout, n, order=cost.order, backward=True)) for cost in costs},
        {cost.layout: _activations(model, grid, mine, call, cost) for cost in costs},
        partial + token,
        steps,
    )


def _merging(call: MeshCall, mine: AttentionLayer, ranks: int, tokens: int) -> tuple[int, int]:
    """Return bytes and messages between the context ranks in a decoded token: partial outputs go, merged ones come.

    Latent attention runs absorbed there: its outputs are in the space of the latents.
    """
    if ranks == 1:
        return 0, 0
    width = mine.value_dim if mine.latent is None else mine.latent.kv_rank
    one = replace(call, queries=1, left=None, right=0, chunk=None, value_dim=width)
    owners = min(ranks, tokens if mine.window is None else min(mine.window, tokens))
    return max(links.decode_sent(one, ranks, owners=owners)), 1 + _steps(ranks)


def _kind(layer: AttentionLayer) -> str:
    if layer.window is None:
        return "both ways" if layer.role == "encoder" else "causal"
    return f"chunks of {layer.window}" if layer.chunked else f"window {layer.window}"


def _steps(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _activations(model: Model, grid: Grid, mine: AttentionLayer, call: MeshCall, cost: Cost) -> int:
    """Return bytes at once: the stream and what is added to it, and attention or feed-forward, whichever is more.

    Of keys that travel a rank holds a few heads: in a ring three messages (attended, coming, going), in a gather two
    heads of all keys, which is the part that more ranks do not make smaller.
    """
    n, width = grid.context, mine.d_model
    tokens = max(keys_by_rank(call, n, cost.order))
    heads = mine.num_heads * (mine.head_dim + mine.value_dim)
    kv_heads = 1 if call.latent else call.kv_heads
    one = call.kv_numbers // kv_heads  # of a token, of one head
    few = heads_at_once(kv_heads, call.batch * tokens * one * call.number_bytes)
    extra = {
        "ring": 3 * few * one * (max(remote_keys(call, n, cost.order)) if call.bounded else tokens * (n > 1)),
        "gather": min(2, kv_heads) * one * call.keys * (n > 1),
        "ulysses": (heads * call.queries + call.kv_numbers * call.keys) // n * (n > 1),
    }[cost.layout]
    wide = max((_inside(part) for part in model.others if part.room == "mlp"), default=0) // grid.tensor
    numbers = 2 * tokens * width + max(tokens * (heads + call.kv_numbers) + extra, tokens * wide)
    return call.batch * numbers * model.number_bytes


def _inside(part: Part) -> int:
    """Return numbers a token between the matrices of a feed-forward layer."""
    if len(part.matrices) != 2:
        return 0
    (width, _, ups), (_, _, downs) = part.matrices
    ups //= max(1, downs)
    return part.macs * ups // ((ups + 1) * width)


# --- a rank -----------------------------------------------------------------------------------------------------------


def _cached(layer: AttentionLayer, grid: Grid, tokens: int, numbers: tuple[int, int]) -> int:
    return local(layer, grid.tensor).cached_bytes(*numbers) * _kept(layer, grid, tokens)


def _kept(layer: AttentionLayer, grid: Grid, tokens: int) -> int:
    """Return tokens of a text that a context rank keeps at most: of every N one, of a window as well."""
    return shares(tokens if layer.window is None else min(tokens, layer.window), grid.context)[0]


# --- time -------------------------------------------------------------------------------------------------------------


def _prefill(
    model: Model, grid: Grid, layers: tuple[LayerSpread, ...], tokens: int, batch: int, weights: int
) -> TimeEstimate:
    """Computing and what attention sends beside it overlap where the layout can; all-reduces do not."""
    stream = "encoder" if model.is_encoder else "decoder"
    most = shares(tokens, grid.context)[0]
    macs = 0
    for part, _ in parts_of(model, grid.tensor):
        if part.stream == stream:
            macs += part.macs * (batch if part.name == "lm_head" and not model.is_encoder else most * batch)
    compute = None if grid.flop_rate is None else 2 * macs / grid.flop_rate
    link = attention = 0.0
    for layer in layers:
        cost = layer.choose
        reduces = grid.link.seconds(layer.tensor_bytes, 4 * _steps(grid.tensor)) if grid.tensor > 1 else 0.0
        busy = cost.compute_seconds or 0.0
        attention += layer.count * busy
        link += layer.count * (reduces + (cost.seconds or 0.0) - busy)
    if compute is not None:
        compute += attention
    memory = None if grid.bandwidth is None else weights / grid.bandwidth
    return _seconds(compute, memory, link)


def _decode(
    model: Model,
    grid: Grid,
    kinds: dict[AttentionLayer, int],
    layers: tuple[LayerSpread, ...],
    tokens: int,
    batch: int,
    cache: int,
) -> TimeEstimate:
    """Return every context rank computes the dense layers of all texts; attention runs on its own keys."""
    macs = read = 0
    for part, whole in parts_of(model, grid.tensor):
        if part.stream == "decoder" and whole.parameters:
            macs += part.macs * batch
            read += model.part_bytes(whole) * part.active // whole.parameters
        elif part.stream == "decoder":
            macs += part.macs * batch
            read += part.active * model.weight_bytes
    for layer, count in kinds.items():
        mine, keys = local(layer, grid.tensor), _kept(layer, grid, tokens)
        each, pair = (0, mine.score_macs()) if mine.latent is None else mine.absorbed_macs()
        macs += count * batch * (each - (mine.expansion_macs() if mine.latent is not None else 0) + pair * keys)
    link = sum(
        layer.count * grid.link.seconds(layer.decode_bytes, layer.decode_messages) for layer in layers if grid.ranks > 1
    )
    compute = None if grid.flop_rate is None else 2 * macs / grid.flop_rate
    memory = None if grid.bandwidth is None else (read + cache) / grid.bandwidth
    return _seconds(compute, memory, link)


def _seconds(compute: float | None, memory: float | None, link: float) -> TimeEstimate:
    known = [time for time in (compute, memory) if time is not None]
    return TimeEstimate(compute, memory, link, max(known) + link if known else None)
