"""A model as its parts, read from a config; the cost functions take it as input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config.fields import Fields, architectures
from ..shape import short
from . import encoder_decoder as pair
from . import single_stack as build
from .heads_by_layer import original_config
from .layer import AttentionLayer
from .parts import Part, parameters
from .quantization import Packing, packing_of
from .recurrent import StateLayer, state_layers
from .towers import Tower, connector, tower_of

PADDING = 1  # the default padding token of models whose positions start after it
WEIGHT_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Model:
    """All attention layers and all other parts of a model.

    Attributes:
        name: The name in tables.
        model_type: The architecture, as in configs.
        layers: Attention layers; with two stacks, the encoder's, then the decoder's self and cross alternating.
        others: Embeddings, norms, feed-forward layers and the unembedding.
        further: Layers that predict further tokens; no other count includes them, because transformers builds none.
        further_layers: The number of such layers; each caches as much as an attention layer.
        packing: The quantisation of the checkpoint's matrices, or None.
        towers: Encoders of images or sound; all other attributes describe the text model.
        states: Layers with a state of fixed size; a layer that also has attention is in both.
        weight_bytes: Bytes of an unpacked weight and of a number in computation, from the config's dtype; 2 by default.
        source: Tokens of the encoder if the config fixes them (audio); else None.
        positions: The number of learned positions; None if positions are computed.
        notes: Parts that the counts leave out and unknown config fields. If empty, every count is exact.
    """

    name: str
    model_type: str
    layers: tuple[AttentionLayer, ...]
    others: tuple[Part, ...]
    weight_bytes: int = 2
    source: int | None = None
    positions: int | None = None
    notes: tuple[str, ...] = ()
    states: tuple[StateLayer, ...] = ()
    towers: tuple[Tower, ...] = ()
    further: tuple[Part, ...] = ()
    further_layers: int = 0
    packing: Packing | None = None

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.layers[0].d_model

    @property
    def is_encoder(self) -> bool:
        """True if the model reads a whole text in one pass and so keeps no cache."""
        return all(layer.role == "encoder" for layer in self.layers)

    def parts(self) -> list[Part]:
        """Return every part of the text model, attention first."""
        layers: tuple[AttentionLayer | StateLayer, ...] = (*self.layers, *self.states)
        return [part for layer in layers for part in layer.parts()] + list(self.others)

    def attention_parameters(self) -> int:
        """Return the number of parameters of all attention layers."""
        return sum(layer.parameter_count() for layer in self.layers)

    def total_parameters(self) -> int:
        """Return the number of parameters of the model, including its towers."""
        return parameters(self.parts()) + self.tower_parameters()

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of a part's weights in the checkpoint."""
        if self.packing is None:
            return part.parameters * self.weight_bytes
        return self.packing.bytes(part, self.weight_bytes)

    def stored_bytes(self) -> int:
        """Return the bytes of all weights in the checkpoint, with towers but without layers for further tokens.

        In a model with towers only the text model is quantised.
        """
        towers = [part for tower in self.towers for part in tower.parts()]
        return sum(map(self.part_bytes, self.parts())) + self.weight_bytes * parameters(towers)

    def tower_parameters(self) -> int:
        """Return the number of parameters of the towers and their connectors."""
        return sum(tower.parameter_count() for tower in self.towers)

    def active_parameters(self) -> int:
        """Return the number of parameters that one decoder token uses: no look-up tables and no unused experts."""
        stream = "encoder" if self.is_encoder else "decoder"
        return sum(part.active for part in self.parts() if part.stream == stream)

    def source_tokens(self, context: int) -> int:
        """Return the tokens that the encoder reads: fixed for audio, else the context; 0 without an encoder."""
        if not any(layer.role == "cross" for layer in self.layers):
            return 0
        return context if self.source is None else self.source

    def notes_at(self, contexts: Iterable[int]) -> tuple[str, ...]:
        """Return the notes, with one more if contexts are longer than the learned positions."""
        limit = self.positions
        beyond = [str(context) for context in contexts if limit is not None and context > limit]
        note = f"beyond the {limit} positions the model has learned: {', '.join(beyond)}"
        return (*self.notes, *([note] if beyond else []))


def model_of(config: Mapping[str, Any], name: str | None = None, *, left_out: tuple[str, ...] = ()) -> Model:
    """Return the model that a parsed config describes; `left_out` names further missing parts for the notes.

    Raises:
        ValueError: a one-line message: an unknown architecture, a field with an invalid value, or a field that
            changes the counts in an unsupported way.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("has no model_type, so its architecture is not known")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type is a string; got {short(model_type)}")
    config, heads = original_config(config)
    about = architectures().get(str(config["model_type"]))
    if about is None:
        near = difflib.get_close_matches(model_type[:60], architectures(), n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; {len(architectures())} are: headwise plan --list"
        raise ValueError(f"architecture {short(model_type)} is not known{hint}")
    if "text" in about:
        return _composite(config, about, name or model_type)
    fields = Fields(config, about)
    room = pair if about.get("stack") == "pair" else build
    with_head, head_note = _head(config, about)
    packing, packing_note = packing_of(config)
    layers = tuple(room.attention_layers(fields))
    if heads is not None:
        layers = tuple(replace(layer, num_heads=n, num_kv_heads=n) for layer, n in zip(layers, heads, strict=True))
    others = tuple(room.other_parts(fields, with_head=with_head))
    further = build.further_parts(fields, layers[-1]) if "further" in about else ()
    notes = [
        *left_out,
        *fields.marks(),
        *([packing_note] if packing_note else []),
        *([about["note"]] if "note" in about else []),
        *([head_note] if head_note else []),
    ]
    unknown, dtype = fields.unknown(), _dtype(config)
    if unknown:
        notes.append(_unknown_note(unknown))
    return Model(
        name or model_type,
        model_type,
        layers,
        others,
        WEIGHT_BYTES.get(dtype, 2) if isinstance(dtype, str) else 2,
        fields.size(about["audio"]["positions"]) if "audio" in about else None,
        _positions(fields),
        tuple(notes),
        state_layers(fields, fields.layer_count()) if "states" in about else (),
        further=further,
        further_layers=(fields.optional(about["further"], least=0) or 0) if further else 0,
        packing=packing,
    )


def _positions(fields: Fields) -> int | None:
    """Return the number of usable learned positions; in some models they start after the row of the padding token."""
    about = fields.architecture
    if not about.get("positions") or not fields.flag(about.get("positions_when", True)):
        return None
    rows, after = fields.size(about["positions"]), about.get("positions_after")
    if after is None:
        return rows
    pad = fields.optional(after, least=0) if isinstance(after, str) else after
    return max(0, rows - (PADDING if pad is None else pad) - 1)


def _composite(config: Mapping[str, Any], about: Mapping[str, Any], name: str) -> Model:
    """Return a text model with its towers, each read from its own part of the config."""
    fields = Fields(config, about)
    inner, text_type = _text_of(config, about)
    named, own = _first_class(config), about["classes"]
    bare = named == own["base"]
    classes = architectures()[text_type]["classes"]
    model = model_of({**inner, "architectures": [classes["base"]] if bare else None}, name)
    present = {key: spec for key, spec in about["towers"].items() if not spec.get("optional") or config.get(key)}
    made = [(*tower_of(config, key, spec), key) for key, spec in present.items()]
    towers = [
        replace(tower, others=(*tower.others, *connector(fields, its, model.d_model))) for tower, _, its, _ in made
    ]
    strange = [f"{key}.{field}" for _, unknown, _, key in made for field in unknown]
    beside = about["text"].get("flat") and config.get(about["text"]["key"]) is None
    strange += [] if beside else fields.unknown()  # the notes of the text model already name flat fields
    notes = [*model.notes, *([about["note"]] if "note" in about else [])]
    notes += [note for key, note in about.get("uncounted", {}).items() if config.get(key)]
    if named not in (None, *own.values()):
        notes.append(f"the head of {short(named)} is not counted, only the model below it")
    if strange:
        notes.append(_unknown_note(strange))
    return replace(model, model_type=str(config["model_type"]), towers=tuple(towers), notes=tuple(notes))


def _text_of(config: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the config and the architecture of the text model inside."""
    spec = about["text"]
    text = config.get(spec["key"])
    if text is None and spec.get("flat"):  # the fields of the text model are at the top level of the config
        mine = {spec["key"], "model_type", *about["towers"], *about["defaults"], *about.get("neutral", ())}
        text = {key: value for key, value in config.items() if key not in mine}
    elif text is None:
        text = spec.get("missing", {})
    if not isinstance(text, Mapping):
        raise ValueError(f"has no {spec['key']}, where the text model's sizes are")
    kind = text.get("model_type", spec["type"])
    as_type = spec.get("as", {}).get(kind, kind) if isinstance(kind, str) else kind
    takes = spec.get("any", [])
    allowed = as_type in takes if isinstance(takes, list) else "classes" in architectures().get(str(as_type), {})
    if kind != spec["type"] and (not allowed or "text" in architectures()[as_type]):
        what = "text models are" if takes is True else f"{' or '.join(takes or [spec['type']])} is"
        raise ValueError(f"{spec['key']} has the architecture {short(kind)}; only {what} supported")
    outer = {key: config[key] for key in ("quantization_config",) if key in config}
    tied = config.get("tie_word_embeddings", about["defaults"].get("tie_word_embeddings", False))
    if spec.get("tie_either") and text.get("tie_word_embeddings"):
        tied = True
    inner = {**spec.get("defaults", {}), **outer, **text, "model_type": as_type, "dtype": _dtype(text, config)}
    if not spec.get("tie_inside"):
        inner["tie_word_embeddings"] = tied and not spec.get("untied")
    return {key: value for key, value in inner.items() if key not in spec.get("drop", ())}, as_type


def _unknown_note(fields: list[str]) -> str:
    shown = ", ".join(short(field) for field in fields[:5]) + (", ..." if len(fields) > 5 else "")
    return f"unknown fields, which are assumed to change no count: {shown}"


def _first_class(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _head(config: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether the language-modelling head is counted, and a note on any other head."""
    named = _first_class(config)
    if named in (None, about["classes"]["lm"]):
        return True, None
    if named == about["classes"]["base"]:
        return False, None
    return False, f"the head of {short(named)} is not counted, only the model below it"


def _dtype(*configs: Mapping[str, Any]) -> Any:
    """Return the first dtype that is not null, under its current or older name; transformers writes null for unset."""
    said = (config.get(key) for config in configs for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in said if dtype is not None), None)
