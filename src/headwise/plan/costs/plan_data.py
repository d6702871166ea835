"""The numbers of a plan without its output formats: the tables and charts read this."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..model.model import Model
from ..model.parts import ROOMS, parameters
from . import totals as costs
from .totals import Floor, Flops


@dataclass(frozen=True)
class ContextCost:
    """The cost of one context length, for the whole batch.

    Attributes:
        context: Tokens of a text, including the newest.
        source_tokens: Tokens that the encoder reads in addition; 0 without an encoder.
        cache_bytes: Bytes of keys and values in the cache, cut to windows; with their scales if they are int8.
        state_bytes: Bytes of the layers with a state of fixed size; 0 for most models.
        reserved_bytes: Cache bytes if every layer keeps the whole context.
        as_mha_bytes: Cache bytes with as many key-value heads as query heads, cut to windows.
        as_gqa8_bytes: Cache bytes with 8 key-value heads; None if 8 does not divide the number of heads.
        as_mqa_bytes: Cache bytes with one key-value head.
        prefill: FLOPs of reading the context.
        decode: FLOPs of generating the last of its tokens; None for an encoder.
        decode_expanded: The same for latent attention that recomputes keys and values, as transformers does; else None.
        eager_bytes: Bytes of the attention weights of one layer, two bytes each, if they are stored.
        kernel_bytes: Bytes that a fused kernel stores instead: one float32 per query and head.
        floors: The least time of a decode step, for each batch size.
    """

    context: int
    source_tokens: int
    cache_bytes: int
    state_bytes: int
    reserved_bytes: int
    as_mha_bytes: int
    as_gqa8_bytes: int | None
    as_mqa_bytes: int
    prefill: Flops
    decode: Flops | None
    decode_expanded: Flops | None
    eager_bytes: int
    kernel_bytes: int
    floors: tuple[Floor, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
        flops = {name: getattr(self, name) for name in ("prefill", "decode", "decode_expanded")}
        operations = {name: None if cost is None else cost.to_dict() for name, cost in flops.items()}
        return {**asdict(self), **operations, "floors": [floor.to_dict() for floor in self.floors]}


@dataclass(frozen=True)
class PlanData:
    """The numbers of an `AttentionPlan`, which adds the tables and charts, and documents the attributes."""

    model: Model
    batch: int
    kv_dtype: str
    contexts: tuple[ContextCost, ...]
    planned: PlanData | None = None
    card: str = ""

    @property
    def name(self) -> str:
        """The config's name, as in the tables."""
        return self.model.name

    @property
    def exact(self) -> bool:
        """True if every count equals that of the model in transformers; if not, `notes` lists what is left out."""
        return not self.model.notes

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on parts that the counts leave out, and on contexts longer than the model supports."""
        return self.model.notes_at(cost.context for cost in self.contexts)

    @property
    def kind(self) -> str:
        """The kind of attention: MHA, GQA with its key-value heads, MQA or MLA, and the layers with windows.

        Example:
            >>> from headwise.plan import of
            >>> of("gpt-3").kind
            'MHA'
        """
        kinds = dict.fromkeys(layer.kind for layer in self.model.layers)
        shown = " and ".join(kinds)
        if tuple(kinds) == ("GQA",):
            keys = dict.fromkeys(layer.num_kv_heads for layer in self.model.layers)
            groups = dict.fromkeys(layer.num_heads / layer.num_kv_heads for layer in self.model.layers)
            each = " or ".join(f"{group:g}" for group in groups)
            shown += f", {' or '.join(map(str, keys))} KV heads ({each} query heads each)"
        windows = [layer.window for layer in self.model.layers if layer.window is not None]
        full = len(self.model.layers) - len(windows)
        word = "chunks of" if any(layer.chunked for layer in self.model.layers) else "window"
        if windows and full:
            shown += f", hybrid: {full} full, {len(windows)} {word} {windows[0]}"
        elif windows:
            shown += f", {word} {windows[0]}"
        states = self.model.states
        layers = "layer" if len(states) == 1 else "layers"
        return shown + (f"; {len(states)} {layers} with a state ({states[0].kind})" if states else "")

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one more token of one text while no window is full."""
        return costs.bytes_per_token(self.model, *costs.bytes_of(self.kv_dtype))

    @property
    def attention_computations(self) -> int:
        """The number of softmax(Q K^T) V computations in a forward pass: layers x heads."""
        return sum(layer.num_heads for layer in self.model.layers)

    def parameters(self) -> dict[str, int]:
        """Return the number of parameters of each room of the text model, of all towers, and of the model.

        Example:
            >>> from headwise.plan import of
            >>> of("gpt-3").parameters()["attention"]
            57986777088
        """
        parts = self.model.parts()
        rooms = {room: parameters(parts, room) for room in ROOMS}
        return {**rooms, "towers": self.model.tower_parameters(), "total": self.model.total_parameters()}

    def further(self) -> dict[str, int] | None:
        """Return the numbers of the layers that predict further tokens: count, parameters, weight and cache bytes.

        None if the config has none. No other count includes them.
        """
        model = self.model
        if not model.further:
            return None
        each = model.layers[-1].cached_bytes(*costs.bytes_of(self.kv_dtype))
        return {
            "layers": model.further_layers,
            "parameters": parameters(model.further),
            "weight_bytes": sum(map(model.part_bytes, model.further)),
            "bytes_per_token": each * model.further_layers,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return every number as a dict for JSON."""
        return {
            "name": self.name,
            "model_type": self.model.model_type,
            "kind": self.kind,
            "exact": self.exact,
            "notes": list(self.notes),
            "card": self.card,
            "d_model": self.model.d_model,
            "layers": [
                {**asdict(layer), "kind": layer.kind, "parameters": layer.parameter_counts()}
                for layer in self.model.layers
            ],
            "states": [
                {
                    "index": layer.index,
                    "kind": layer.kind,
                    "conv": layer.conv,
                    "state": layer.state,
                    "bytes": layer.bytes(self.model.weight_bytes),
                }
                for layer in self.model.states
            ],
            "towers": [tower.to_dict() for tower in self.model.towers],
            "further": self.further(),
            "weight_bytes": self.model.stored_bytes(),
            "packing": None if self.model.packing is None else self.model.packing.method,
            "parameters": self.parameters(),
            "active_parameters": self.model.active_parameters(),
            "attention_share": self.model.attention_parameters() / self.model.total_parameters(),
            "attention_computations": self.attention_computations,
            "batch": self.batch,
            "kv_dtype": self.kv_dtype,
            "bytes_per_token": self.bytes_per_token,
            "contexts": [cost.to_dict() for cost in self.contexts],
            "planned": None if self.planned is None else self.planned.to_dict(),
        }
