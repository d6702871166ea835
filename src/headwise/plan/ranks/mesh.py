"""A model over many ranks: the memory of a rank, the bytes it sends, and the least times of prefill and decode.

Ranks form a grid: `tensor` ranks share the heads and the feed-forward layers, `context` ranks the tokens. All numbers
are computed by `communication`; nothing is measured.
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
from .communication import LayoutCost, Link
from .sharding import MeshCall, heads_at_once, keys_by_rank, remote_keys, shares
from .weight_shards import WHOLE, local, parts_of, rank_bytes


@dataclass(frozen=True)
class Grid:
    """The ranks and their speeds.

    Attributes:
        tensor: The number of ranks that share heads and widths.
        context: The number of ranks that share tokens.
        link: The link from one rank to another.
        bandwidth: A rank's memory bandwidth in bytes per second; None if unknown.
        flop_rate: A rank's FLOPs per second; None if unknown.
    """

    tensor: int
    context: int
    link: Link
    bandwidth: float | None = None
    flop_rate: float | None = None

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.tensor * self.context


@dataclass(frozen=True)
class LayerCost:
    """The cost of equal layers on one rank.

    Attributes:
        kind: The mask: ``causal``, ``window W``, ``chunks of C``, ``both ways``.
        count: The number of layers.
        tensor_bytes: Bytes sent by the busiest rank in the two all-reduces of one layer in a prefill.
        costs: The costs of one layer's attention in each layout, forward, the cheapest first.
        backward: Bytes sent in the backward pass, by layout.
        activations: Bytes of the activations of one layer in a prefill, by layout.
        decode_bytes: Bytes sent for one decoded token: two all-reduces, and partial outputs between the context ranks.
        decode_messages: Messages one after another for one decoded token.
    """

    kind: str
    count: int
    tensor_bytes: int
    costs: tuple[LayoutCost, ...]
    backward: dict[str, int]
    activations: dict[str, int]
    decode_bytes: int
    decode_messages: int

    @property
    def choose(self) -> LayoutCost:
        """The cost of the cheapest layout."""
        return self.costs[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
        costs = [{**asdict(cost), "seconds": cost.seconds, "backward_bytes": self.backward[cost.layout],
                  "activation_bytes": self.activations[cost.layout]} for cost in self.costs]  # fmt: skip
        mine = {name: value for name, value in asdict(self).items() if name not in ("costs", "backward", "activations")}
        return {**mine, "choose": self.choose.layout, "layouts": costs}


@dataclass(frozen=True)
class TimeEstimate:
    """The least time of a pass, by resource; None if a speed is unknown.

    Attributes:
        compute: Time of the matrix products on the busiest rank.
        memory: Time to read weights and cache once; in a prefill only the weights.
        link: Time on the link that does not overlap with computation.
        total: The longer of compute and memory, plus the link.
    """

    compute: float | None
    memory: float | None
    link: float
    total: float | None


@dataclass(frozen=True)
class MeshCost:
    """The cost of a model at one context length over a grid of ranks. Created by `mesh_cost`.

    Attributes:
        model: The model.
        grid: The ranks.
        tokens: Tokens of a text.
        batch: The number of texts.
        weight_bytes: Bytes of weights on a rank.
        cache_bytes: Bytes of the cache on the rank that holds most; including states.
        layers: The kinds of layers.
        prefill: The least time of reading the tokens.
        decode: The least time of one more token; None for an encoder.
    """

    model: Model
    grid: Grid
    tokens: int
    batch: int
    weight_bytes: int
    cache_bytes: int
    layers: tuple[LayerCost, ...]
    prefill: TimeEstimate
    decode: TimeEstimate | None

    @cached_property
    def activation_bytes(self) -> int:
        """The activation bytes of the largest layer in a prefill, with each layer in its cheapest layout."""
        return max(layer.activations[layer.choose.layout] for layer in self.layers)

    def sent(self) -> int:
        """Return the bytes that a rank sends in a prefill, with each layer in its cheapest layout."""
        return sum(layer.count * (layer.tensor_bytes + layer.choose.bytes) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
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


def mesh_cost(model: Model, grid: Grid, tokens: int, *, batch: int = 1, kv_dtype: str = "bf16") -> MeshCost:
    """Return the cost of the model at this context length over the ranks.

    Raises:
        ValueError: an encoder-decoder model, or heads or widths that are not divisible by the number of tensor ranks.
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
    cache = batch * sum(
        count * local(layer, grid.tensor).cached_bytes(*numbers) * _kept(layer, grid, tokens)
        for layer, count in kinds.items()
    )
    cache += state_bytes(model, batch=batch)
    prefill = _prefill(model, grid, layers, tokens, batch, weights)
    decode = None if model.is_encoder else _decode(model, grid, kinds, layers, tokens, batch, cache)
    return MeshCost(model, grid, tokens, batch, weights, cache, layers, prefill, decode)


def check_grid(model: Model, grid: Grid) -> None:
    """Raise ValueError if the number of tensor ranks does not divide the heads and widths."""
    if any(layer.role == "cross" for layer in model.layers):
        raise ValueError("an encoder-decoder cannot be planned over several ranks")
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
    """Return the attention call of a layer over a whole text, with the layer's mask."""
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


def _layer(model: Model, grid: Grid, layer: AttentionLayer, count: int, tokens: int, batch: int) -> LayerCost:
    mine, e, n = local(layer, grid.tensor), model.weight_bytes, grid.context
    call = call_of(mine, tokens, e, batch)
    costs = links.layout_costs(call, n, link=grid.link, flop_rate=grid.flop_rate)
    most = shares(tokens, n)[0] * batch
    reduced = 2 * max(links.all_reduce(most * layer.d_model, grid.tensor)) * e
    token = 2 * max(links.all_reduce(batch * layer.d_model, grid.tensor)) * e
    partial, steps = _merging(call, mine, n, tokens)
    steps += 4 * _steps(grid.tensor)
    return LayerCost(
        _kind(layer),
        count,
        reduced,
        costs,
        {cost.layout: max(links.bytes_sent(call, cost.layout, n, order=cost.order, backward=True)) for cost in costs},
        {cost.layout: _activations(model, grid, mine, call, cost) for cost in costs},
        partial + token,
        steps,
    )


def _merging(call: MeshCall, mine: AttentionLayer, ranks: int, tokens: int) -> tuple[int, int]:
    """Return bytes and messages between the context ranks for a decoded token: partial outputs and merged outputs.

    Latent attention is absorbed here: its outputs are in the space of the latents.
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


def _activations(model: Model, grid: Grid, mine: AttentionLayer, call: MeshCall, cost: LayoutCost) -> int:
    """Return the bytes of activations: twice the residual stream, and the larger of attention and feed-forward.

    A rank holds only a few heads of the keys of other ranks: in a ring three messages (current, incoming, outgoing), in
    a gather two heads of all keys. Only the latter does not shrink with more ranks.
    """
    n, width = grid.context, mine.d_model
    tokens = max(keys_by_rank(call, n, cost.order))
    heads = mine.num_heads * (mine.head_dim + mine.value_dim)
    kv_heads = 1 if call.latent else call.kv_heads
    one = call.kv_numbers // kv_heads  # numbers per token and head
    few = heads_at_once(kv_heads, call.batch * tokens * one * call.number_bytes)
    extra = {
        "ring": 3 * few * one * (max(remote_keys(call, n, cost.order)) if call.bounded else tokens * (n > 1)),
        "gather": min(2, kv_heads) * one * call.keys * (n > 1),
        "ulysses": (heads * call.queries + call.kv_numbers * call.keys) // n * (n > 1),
    }[cost.layout]
    wide = max((_inside(part) for part in model.others if part.room == "mlp"), default=0) // grid.tensor
    numbers = 2 * tokens * width + max(tokens * (heads + call.kv_numbers) + extra, tokens * wide)
    return call.batch * numbers * model.weight_bytes


def _inside(part: Part) -> int:
    """Return the numbers per token between the matrices of a feed-forward layer."""
    if len(part.matrices) != 2:
        return 0
    (width, _, ups), (_, _, downs) = part.matrices
    ups //= max(1, downs)
    return part.macs * ups // ((ups + 1) * width)


def _kept(layer: AttentionLayer, grid: Grid, tokens: int) -> int:
    """Return the most tokens of a text that one context rank keeps: one of every N, also within a window."""
    return shares(tokens if layer.window is None else min(tokens, layer.window), grid.context)[0]


# --- time -------------------------------------------------------------------------------------------------------------


def _prefill(
    model: Model, grid: Grid, layers: tuple[LayerCost, ...], tokens: int, batch: int, weights: int
) -> TimeEstimate:
    """Return the least time of a prefill: attention and messages overlap if the layout can; all-reduces do not."""
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
    layers: tuple[LayerCost, ...],
    tokens: int,
    batch: int,
    cache: int,
) -> TimeEstimate:
    """Return the least time of a decoded token: each context rank computes all dense layers and scores of its keys."""
    macs = read = 0
    for part, whole in parts_of(model, grid.tensor):
        if part.stream != "decoder":
            continue
        macs += part.macs * batch
        if whole.parameters:
            read += replace(whole, active=part.active).bytes_read(model.part_bytes(whole), batch)
        else:
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
