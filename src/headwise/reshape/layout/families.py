"""The attention layers of a checkpoint: names, sizes, and how each of their tensors divides into heads."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...plan.config.fields import Fields, architectures, heads_of
from ...plan.model.heads_by_layer import FIELD, base_type, by_layer_config, has_heads_by_layer, original_config
from ...plan.model.recurrent import layer_kinds
from ...plan.shape import short
from .head_axes import Sizes, TensorRuns, form

ROLES = ("encoder", "self", "cross")
NEEDED = {"queries": {"q"}, "keys": {"k", "n"}, "values": {"v"}, "output": {"o"}}


@dataclass(frozen=True)
class Layer:
    """One attention layer of a checkpoint.

    Attributes:
        key: Name of the layer, as in `headwise.plan`: ``3``; in an encoder-decoder also ``encoder.3`` and ``cross.3``.
        role: ``self``, ``encoder`` or ``cross``.
        index: Index among the layers of this role.
        prefix: Prefix of the names of its tensors.
        sizes: Numbers of heads, and sizes of a head.
        tensors: How each of its tensors divides into heads, by name.
    """

    key: str
    role: str
    index: int
    prefix: str
    sizes: Sizes
    tensors: Mapping[str, TensorRuns]


@dataclass(frozen=True)
class CheckpointLayout:
    """The known architecture of one checkpoint, and its attention layers.

    Attributes:
        model_type: `model_type` of the config.
        about: Entry of the architecture in the table of layouts.
        fields: Fields of the config, as `headwise.plan` reads them.
        config: The content of config.json; for a multimodal model, only the config of its text model.
        layers: Attention layers of the text model.
        outer: For a multimodal model, the key of the text config, and all of config.json.
    """

    model_type: str
    about: Mapping[str, Any]
    fields: Fields
    config: Mapping[str, Any]
    layers: tuple[Layer, ...]
    outer: tuple[str, Mapping[str, Any]] | None = None

    def whole(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return all of config.json, with `config` as the config of the text model."""
        if self.outer is None:
            return dict(config)
        name, outer = self.outer
        return {**outer, name: dict(config)}

    @property
    def d_model(self) -> int:
        """The width of the residual stream."""
        return self.fields.size("hidden_size")

    @property
    def has_head_dim(self) -> bool:
        """True if the config can state the head dim; otherwise it is d_model / num_heads, which pruning changes."""
        return "head_dim" in self.fields.own or "head_dim" in self.fields.defaults or self.is_latent

    @property
    def is_latent(self) -> bool:
        """True if keys and values are projected from a small shared vector (latent attention)."""
        return bool(self.fields.architecture.get("latent"))

    @property
    def by_layer(self) -> bool:
        """True if a class exists whose layers have different numbers of heads."""
        return has_heads_by_layer(base_type(self.model_type) or self.model_type)

    @cached_property
    def counts(self) -> dict[str, list[Layer]]:
        """The layers by the config field that counts their query heads; layers of one field have equally many heads.

        Where each layer may have its own number, the key is the layer's entry in the list, with that layer alone.
        """
        if self.by_layer:
            return {f"{FIELD}[{layer.index}]": [layer] for layer in self.layers}
        table: dict[str, list[Layer]] = {}
        for layer in self.layers:
            table.setdefault(heads_field(self.fields, layer.role), []).append(layer)
        return table

    def field_name(self, field: str) -> str:
        """Return the name of a field of `counts` for messages about all layers."""
        return heads_field(self.fields, self.counts[field][0].role) if self.by_layer else field

    @property
    def same_heads(self) -> tuple[str, ...]:
        """The roles whose layers share a table with one column per head, and so must keep the same heads."""
        return tuple(self.about.get("same_heads", ()))

    def layer(self, key: str) -> Layer:
        """Return the layer named `key`; raise ValueError if there is none."""
        for layer in self.layers:
            if layer.key == key:
                return layer
        keys = [layer.key for layer in self.layers]
        raise ValueError(f"no layer {short(key)}; the layers are {', '.join(_ends(keys))}")


def _ends(keys: list[str]) -> list[str]:
    """Return the first and the last layer of each role as a range, or the name of a role's only layer."""
    ends = []
    for role in ROLES:
        mine = [key for key in keys if (key.partition(".")[0] if "." in key else "self") == role]
        ends += [" to ".join(dict.fromkeys((mine[0], mine[-1])))] if mine else []
    return ends


def family_of(config: Mapping[str, Any], names: Iterable[str], layouts: Mapping[str, Any]) -> CheckpointLayout:
    """Return the architecture and the attention layers of a checkpoint with this config and these tensor names.

    Raises:
        ValueError: in one line: an architecture that is not in the table, a config that contradicts itself, missing
            layers or attention tensors, or attention tensors that the table does not know and that would be left
            unchanged.
    """
    model_type, families = config.get("model_type"), layouts["families"]
    base = base_type(model_type) or model_type
    about = families.get(base) if isinstance(base, str) else None
    if about is None or not isinstance(model_type, str):
        near = difflib.get_close_matches(str(model_type)[:60], families, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(families))}"
        raise ValueError(f"how {short(model_type)} stores its heads is not known; {hint}")
    outer = None
    known = about.get("fields") or architectures()[str(base)]
    if "text" in known:
        part, text_type = known["text"]["key"], known["text"]["type"]
        inner = config.get(part)
        if not isinstance(inner, Mapping):
            raise ValueError(f"has no {part}, where the text model's sizes are")
        outer, config = (part, config), inner
        about, known = {**families[text_type], **about}, architectures()[text_type]
    plain, heads = original_config(config)
    fields = Fields(plain, known)
    for name, value in about.get("when", {}).items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} = {short(config[name])}: how such a checkpoint stores its heads is not known")
    names = list(names)
    layers: list[Layer] = []
    for way in (about, {**about, **about.get("in_memory", {})}):
        layers = _layers(fields, way, layouts["forms"], names)
        if layers:
            break
    if not layers:
        paths = ", ".join(about["layers"].values())
        raise ValueError(f"there are no weights of attention where {model_type} has them ({paths})")
    if heads is not None:
        layers = [replace(layer, sizes=replace(layer.sizes, H=n, K=n)) for layer, n in zip(layers, heads, strict=True)]
    return CheckpointLayout(model_type, about, fields, config, tuple(layers), outer)


def _layers(fields: Fields, way: Mapping[str, Any], forms: Mapping[str, Any], names: list[str]) -> list[Layer]:
    known = {name: form(text) for name, text in {**forms[way["form"]], **way.get("tensors", {})}.items()}
    layers = []
    for role, path in way["layers"].items():
        numbered = _found(path, names)
        if not numbered:
            continue
        if "states" in fields.architecture:  # of a hybrid model only some layers have attention
            attends, _ = layer_kinds(fields, fields.layer_count())
            expected = [index for index, attention in enumerate(attends) if attention]
        else:
            expected = list(range(fields.size(_standard(role, fields, "layers"))))
        if way.get("shares_its_path"):  # other kinds of layers have their weights there, too
            numbered = {index: one for index, one in numbered.items() if index in expected}
        if sorted(numbered) != expected:
            odd = sorted(set(numbered) ^ set(expected))[0]
            what = "missing" if odd in expected else "one too many"
            raise ValueError(
                f"config.json counts {len(expected)} layers, and the weights hold {len(numbered)} at {path}: number "
                f"{odd} is {what}; further layers (that predict several tokens, say) would keep heads that the config "
                "denies"
            )
        alone = len(way["layers"]) == 1
        sizes = sizes_of(fields, role)
        for index, (prefix, tensors) in sorted(numbered.items()):
            key = str(index) if alone or role == "self" else f"{role}.{index}"
            layers.append(Layer(key, role, index, prefix, sizes, _forms(prefix, tensors, known)))
    if layers and {layer.role for layer in layers} != set(way["layers"]):
        missing = next(path for role, path in way["layers"].items() if role not in {layer.role for layer in layers})
        raise ValueError(f"there are no weights of {missing}, which the architecture has")
    return layers


def _found(path: str, names: list[str]) -> dict[int, tuple[str, list[str]]]:
    """Return the layers at a path: by index, the prefix and the remaining names of their tensors."""
    before, after = path.split("{}")
    match_of = re.compile(rf"((?:.*\.)?){re.escape(before)}(\d{{1,6}}){re.escape(after)}\.(.+)").fullmatch
    layers: dict[int, tuple[str, list[str]]] = {}
    roots = set()
    for name in names:
        match = match_of(name)
        if match is None:
            continue
        roots.add(match[1])
        prefix = name[: -len(match[3])]
        layers.setdefault(int(match[2]), (prefix, []))[1].append(match[3])
    if len(roots) > 1:
        raise ValueError(f"two parts of the model have layers at {path}: {', '.join(map(repr, sorted(roots)))}")
    return layers


def _forms(prefix: str, tensors: list[str], known: Mapping[str, TensorRuns]) -> dict[str, TensorRuns]:
    """Return how each tensor of a layer divides into heads, by its full name; raise ValueError for unknown tensors."""
    unknown = sorted(set(tensors) - set(known))
    if unknown:
        raise ValueError(
            f"{prefix}{unknown[0]}: not a tensor that such a layer is known to have, and it might belong to single "
            "heads; remove it from the checkpoint if it does not, or tell us"
        )
    forms = {prefix + name: known[name] for name in tensors}
    parts = set().union(*(one.parts() for name, one in forms.items() if not name.endswith("bias")))
    for what, some in NEEDED.items():
        if not parts & some:
            raise ValueError(f"{prefix.rstrip('.')}: the weights of its {what} are missing; get the checkpoint anew")
    return forms


def check_shapes(family: CheckpointLayout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless every attention tensor has the shape that the config states."""
    for layer in family.layers:
        for name, one in layer.tensors.items():
            if not one.fits(shapes[name], layer.sizes):
                sizes = layer.sizes
                raise ValueError(
                    f"{name} is {tuple(shapes[name])}, which is not of {sizes.H} query and {sizes.K} key-value heads "
                    f"of {sizes.D} numbers, as config.json has it; config and weights do not belong together"
                )


# --- config fields ---------------------------------------------------------------------------------------------------


def heads_field(fields: Fields, role: str) -> str:
    """Return the name of the config field that counts the query heads of a role's layers."""
    return fields.raw(_standard(role, fields, "heads"))[0]


def _standard(role: str, fields: Fields, what: str) -> str:
    """Return the standard name of the field that counts a role's `what`, "heads" or "layers"."""
    if fields.architecture.get("stack") != "pair":
        return {"heads": "num_attention_heads", "layers": "num_hidden_layers"}[what]
    return f"encoder_{what}" if role == "encoder" else f"decoder_{what}"


def sizes_of(fields: Fields, role: str) -> Sizes:
    """Return the sizes of a role's layers; raise ValueError if the config contradicts itself."""
    if fields.architecture.get("latent"):
        heads, rope = fields.size("num_attention_heads"), fields.size("qk_rope_head_dim")
        return Sizes(heads, heads, fields.size("qk_nope_head_dim") + rope, fields.size("v_head_dim"), rope)
    if fields.architecture.get("stack") != "pair":
        heads, kv_heads, dim = heads_of(fields)
        return Sizes(heads, kv_heads, dim, dim)
    width, heads = fields.size("hidden_size"), fields.size(_standard(role, fields, "heads"))
    if "head_dim" in fields.own:
        dim = fields.size("head_dim")
    elif width % heads:
        raise ValueError(f"d_model must be a multiple of num_heads: {width} / {heads} leaves {width % heads} over")
    else:
        dim = width // heads
    return Sizes(heads, heads, dim, dim)


def spellings(fields: Fields, standard: str) -> list[str]:
    """Return every name that this config uses for a field; if it has none, the architecture's own name."""
    own = fields.own.get(standard, standard)
    names = dict.fromkeys((own, standard, *(alias for alias, field in fields.aliases.items() if field == own)))
    return [name for name in names if name in fields.config] or [own]


def with_heads(family: CheckpointLayout, counts: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the config with other numbers of (query heads, key-value heads), by the fields of `Family.counts`."""
    config, fields = dict(family.config), family.fields
    if base_type(family.model_type):
        return by_layer_config(config, [counts[field][0] for field in family.counts])
    for field, layers in family.counts.items():
        heads, kv_heads = counts[field]
        sizes = layers[0].sizes
        if (heads, kv_heads) == (sizes.H, sizes.K):
            continue
        config |= dict.fromkeys(spellings(fields, _standard(layers[0].role, fields, "heads")), heads)
        if "num_key_value_heads" in fields.defaults:
            config |= dict.fromkeys(spellings(fields, "num_key_value_heads"), kv_heads)
        if family.has_head_dim and not family.is_latent:
            config |= dict.fromkeys(spellings(fields, "head_dim"), sizes.D)
    return config
