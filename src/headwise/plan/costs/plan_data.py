"""What a plan counts, without the ways to show it: the tables and charts read this."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..model.model import Model
from ..model.parts import ROOMS, parameters
from . import totals as costs
from .totals import Floor, Flops


@dataclass(frozen=True)
class ContextCost:
    """What a context of that many tokens costs, for the whole batch.

    Attributes:
        context: Tokens of a text, the newest included.
        source_tokens: Tokens the encoder reads beside; 0 where there is none.
        cache_bytes: Keys and values in the cache, windows cut; with their scales where they are int8.
        state_bytes: What layers with a state of fixed size hold beside; 0 for most models.
        reserved_bytes: The same where every layer keeps the whole context.
        as_mha_bytes: What the model would hold with as many key-value heads as query heads, windows cut.
        as_gqa8_bytes: With 8 key-value heads; None where its heads do not split into 8.
        as_mqa_bytes: With one.
        prefill: Operations of reading the context.
        decode: Operations of making the last of its tokens; None for a model that only reads.
        decode_expanded: The same for latent attention that makes keys and values anew, as transformers does; else None.
        eager_bytes: Attention weights of one layer written out, two bytes each.
        kernel_bytes: What a kernel that never writes them keeps in their place: one float32 a query and head.
        floors: The least time of a decoding step, batch by batch.
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
        """For JSON."""
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
        """Whether every count is that of the model transformers builds; if not, `notes` says what is left out."""
        return not self.model.notes

    @property
    def notes(self) -> tuple[str, ...]:
        """What the counts leave out, and where the contexts go beyond the model."""
        return self.model.notes_at(cost.context for cost in self.contexts)

    @property
    def kind(self) -> str:
        """MHA, GQA with its group, MQA or MLA, and which layers have windows.

        Example:
            >>> from headwise.plan import of
            >>> of("gpt-3").kind
            'MHA'
        """
        kinds = dict.fromkeys(layer.kind for layer in self.model.layers)
        shown = " and ".join(kinds)
        if tuple(kinds) == ("GQA",):
            groups = dict.fromkeys(layer.num_heads / layer.num_kv_heads for layer in self.model.layers)
            shown += f" (G = {', '.join(f'{group:g}' for group in groups)})"
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
        """Bytes that one more token of one text takes while no window is full."""
        return costs.bytes_per_token(self.model, *costs.bytes_of(self.kv_dtype))

    @property
    def attention_computations(self) -> int:
        """How often softmax(Q K^T) V is computed in a forward pass: layers x heads."""
        return sum(layer.num_heads for layer in self.model.layers)

    def parameters(self) -> dict[str, int]:
        """Return parameters by room of the text model, of its towers together, and of all.

        Example:
            >>> from headwise.plan import of
            >>> of("gpt-3").parameters()["attention"]
            57986777088
        """
        parts = self.model.parts()
        rooms = {room: parameters(parts, room) for room in ROOMS}
        return {**rooms, "towers": self.model.tower_parameters(), "total": self.model.total_parameters()}

    def further(self) -> dict[str, int] | None:
        """Layers that predict further tokens: how many, their parameters and bytes, and their cache's bytes a token.

        None where the config has none. They are in no other count.
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
        """Return every number, for JSON."""
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
                {"index": s.index, "kind": s.kind, "conv": s.conv, "state": s.state, "bytes": s.bytes(number)}
                for number in [self.model.number_bytes]
                for s in self.model.states
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
