"""A strict reader of config fields: sizes must be in range, flags must be bools, and unknown fields are reported."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..shape import check_heads, short

LARGEST = 10_000_000
LARGEST_OF = {"num_hidden_layers": 10_000, "encoder_layers": 10_000, "decoder_layers": 10_000, "hidden_size": 1_000_000}
HEADS_AT_MOST = 10_000
FULL = "full_attention"
BLOCKS = ("linear_attention", FULL, "mlp", "moe")


@functools.cache
def architectures() -> dict[str, dict[str, Any]]:
    """Return the entries of `architectures.json` by ``model_type``.

    ``classes`` are the class names in transformers; ``defaults`` the relevant fields with their default values;
    ``names`` maps the standard names of sizes to those of the config; ``aliases`` are other names of a field;
    ``null_means`` names the field that replaces a null. The following entries describe the model; each is a constant or
    the name of the bool field that decides:

    - ``stack``: a decoder if absent, ``encoder``, or ``pair`` for both; ``text`` describes the text model inside;
    - attention: ``qkv_bias k_bias o_bias qk_norm sinks sub_norms square_o one_kv_head kv_heads_when gated latent
      windows disentangled`` and ``relative_buckets``; ``indexer`` and ``layer_word`` of sparse attention;
      ``full_layers`` (other heads where there is no window), ``last_without_keys``;
    - feed-forward: ``mlp`` (gated if absent, or plain), ``mlp_bias wide activation_numbers moe inner_by_layer``
      and ``wider_without_keys``;
    - norms: ``norm`` (rms if absent, layer, none), ``norm_bias layer_norms one_norm side_by_side first_norm
      final_norm``;
    - inputs and head: ``positions positions_when position_extra token_types embed_norm embed_project audio pooler
      head_transform head_bias own_head_when never_tied``;
    - special cases of transformers' classes: ``one_layer_shared untied_biases untied_tables``;
    - ``heads_by_layer``: `headwise.hf` has classes in which each layer has its own number of heads;
    - inputs of layers: ``layer_inputs`` (an embedding for each), ``streams`` (parallel residual streams);
    - ``blocks``: each layer is one part alone, of the kinds in a list or a text of letters;
    - other layers: ``further`` (the number of layers that predict further tokens), ``states``, ``towers``,
      ``connector``;
    - checks and notes: ``must``, ``must_in`` and ``must_equal`` (required values), ``neutral`` (fields that change no
      count), ``marks`` and ``note`` (printed with the counts).
    """
    return json.loads((Path(__file__).parent / "architectures.json").read_bytes())


@functools.cache
def everywhere() -> dict[str, Any]:
    """Return the entries of `neutral.json` for all architectures: fields without effect, required values, marks."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / "neutral.json").read_bytes())
    return {**content, "fields": frozenset(content["fields"])}


class Fields:
    """The fields of one config, read by the rules of its architecture.

    Sizes are requested by their standard name; `names` of the architecture maps it to the name in the config, and
    `aliases` are the other names that transformers accepts. All spellings are read, and contradictions raise an error.
    Absent fields get the default of the architecture.

    Raises:
        ValueError: a one-line message, from every method, for a field with an invalid value.
    """

    def __init__(self, config: Mapping[str, Any], architecture: Mapping[str, Any]) -> None:
        self.config = config
        self.architecture = architecture
        self.own: dict[str, str] = architecture.get("names", {})
        self.aliases: dict[str, str] = architecture.get("aliases", {})
        self.defaults: dict[str, Any] = architecture["defaults"]
        self._check_supported()

    def _check_supported(self) -> None:
        must: dict[str, Any] = {name: [value] for name, value in self.architecture.get("must", {}).items()}
        for name, allowed in {**everywhere()["must"], **must}.items():
            actual = None if name in self.architecture.get("read", ()) else self.config.get(name)
            if actual is not None and not any(type(actual) is type(value) and actual == value for value in allowed):
                raise ValueError(f"{name} = {short(actual)} changes the model in a way that is not supported")
        for inside, fixed in self.architecture.get("must_in", {}).items():
            part = self.section(inside)
            for name, value in fixed.items():
                if part.get(name, value) != value:
                    raise ValueError(
                        f"{inside}.{name} = {short(part[name])} changes the model in a way that is not supported"
                    )
        for name, other in self.architecture.get("must_equal", {}).items():
            actual = self.config.get(name)
            if actual is not None and actual != self.raw(other)[1]:
                raise ValueError(f"{name} = {short(actual)} differs from {other}, and that is not supported")
        for name in everywhere()["activation_fields"]:
            activation = self.config.get(name)
            word = activation.split("-")[-1] if isinstance(activation, str) else ""
            if word in everywhere()["refused_activations"] and name not in must:
                raise ValueError(f"{name} = {activation!r} has learned parameters, and that is not supported")

    def section(self, name: str) -> Mapping[Any, Any]:
        """Return the object in a field of the config; an empty one if the field is absent or null."""
        value = self.config.get(name) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is an object; got {short(value)}")
        return value

    def raw(self, name: str) -> tuple[str, Any]:
        """Return the name that the config uses and the unchecked value; the default if the field is absent."""
        own = self.own.get(name, name)
        names = dict.fromkeys((own, name, *(alias for alias, field in self.aliases.items() if field == own)))
        present = {n: self.config[n] for n in names if n in self.config}
        if len({repr(value) for value in present.values()}) > 1:
            raise ValueError(f"contradicts itself: {', '.join(f'{n} = {short(v)}' for n, v in present.items())}")
        called, value = next(iter(present.items()), (own, self.defaults.get(own)))
        instead = self.architecture.get("null_means", {})
        return self.raw(instead[own]) if value is None and own in instead else (called, value)

    def optional(self, name: str, *, least: int = 1) -> int | None:
        """Return the int of a field, at least `least`, or None."""
        called, value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{called} is a whole number; got {short(value)}")
        most = HEADS_AT_MOST if "heads" in name else LARGEST_OF.get(name, LARGEST)
        if not least <= value <= most:
            raise ValueError(f"{called} is between {least} and {most}; got {short(value)}")
        return value

    def size(self, name: str, *, least: int = 1) -> int:
        """Return the int of a field that must not be null."""
        value = self.optional(name, least=least)
        if value is None:
            raise ValueError(f"{self.own.get(name, name)} is null, and a whole number is needed")
        return value

    def flag(self, choice: str | bool | None) -> bool:
        """Return a bool of the architecture: a constant, or the value of the bool field with this name."""
        if not isinstance(choice, str):
            return bool(choice)
        called, value = self.raw(choice)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{called} is true or false; got {short(value)}")
        return bool(value)

    def choice(self, name: str) -> bool:
        """Return `flag` of the architecture's entry `name`."""
        return self.flag(self.architecture.get(name))

    def text(self, name: str) -> str:
        """Return the string of a field."""
        called, value = self.raw(name)
        if not isinstance(value, str):
            raise ValueError(f"{called} is a string; got {short(value)}")
        return value

    def numbers(self, name: str, *, length: int | None = None) -> list[int] | None:
        """Return a list of ints of at least 0, checked for `length` if given; None if the field is null."""
        called, value = self.raw(name)
        if value is None:
            return None
        whole = isinstance(value, list) and all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
        )
        if not whole or (length is not None and len(value) != length):
            count = "" if length is None else f"{length} "
            raise ValueError(f"{called} is a list of {count}whole numbers; got {short(value)}")
        return list(value)

    def layer_types(self, layers: int, word: str) -> list[bool] | None:
        """Return for each layer whether ``layer_types`` names it `word` (and not full attention); None without it."""
        types = self.words("layer_types", layers, (FULL, word)) if "layer_types" in self.defaults else None
        return None if types is None else [kind == word for kind in types]

    def words(self, name: str, layers: int | None, known: Sequence[str]) -> list[str] | None:
        """Return the list of one name per layer, each of them `known`, under its newer name; None if it is null."""
        called, words = self.raw(name)
        if words is None:
            return None
        if not isinstance(words, list) or (layers is not None and len(words) != layers) or not words:
            raise ValueError(f"{called} is a list of {'' if layers is None else layers} names; got {short(words)}")
        words = [everywhere()["old_words"].get(word, word) if isinstance(word, str) else word for word in words]
        for word in words:
            if word not in known:
                raise ValueError(f"{called} has {short(word)}; only {' and '.join(known)} are supported")
        return words

    def layer_count(self) -> int:
        """Return the number of layers: a field, or the length of the list of the layers' kinds."""
        kinds = self.blocks()
        return self.size("num_hidden_layers") if kinds is None else len(kinds)

    def blocks(self) -> list[str] | None:
        """Return the kind of each layer where a layer has only one part, such as a feed-forward layer; else None.

        Its config has a list of kinds, or a text with one letter per layer.
        """
        about = self.architecture.get("blocks")
        if about is None:
            return None
        kinds, letters = self.words(about["kinds"], None, BLOCKS), self.config.get(about["letters"])
        if kinds is not None or letters is None:
            return kinds or list(about["default"])
        if not isinstance(letters, str) or not letters or not set(letters) <= set(about["alphabet"]):
            raise ValueError(f"{about['letters']} has the letters {', '.join(about['alphabet'])}; got {short(letters)}")
        return [about["alphabet"][letter] for letter in letters]

    def unknown(self) -> list[str]:
        """Return the names of unknown config fields, which are reported because they might change the model."""
        about, general = self.architecture, everywhere()
        known = {*self.defaults, *self.own, *self.aliases, "head_dim", "layer_types", "sliding_window"}
        known.update(*(about.get(kind, ()) for kind in ("must", "must_in", "must_equal", "neutral", "marks")))
        known.update(about["blocks"][key] for key in ("kinds", "letters") if "blocks" in about)
        known.update(general["must"], general["marks"], general["fields"])
        return [name for name in self.config if name not in known]

    def marks(self) -> list[str]:
        """Return notes on features of this config that the counts leave out."""
        on = {**everywhere()["marks"], **self.architecture.get("marks", {})}
        return [note for name, note in on.items() if self._is_on(name)]

    def _is_on(self, name: str) -> bool:
        _, value = self.raw(name)
        return value is False if name == "tie_word_embeddings" else bool(value)


def heads_of(fields: Fields) -> tuple[int, int, int]:
    """Return (H, K, D): query heads, key-value heads, head dim; by default K = H and D = d_model / H.

    Raises:
        ValueError: sizes that are not divisible.
    """
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    known = fields.own.get("num_key_value_heads", "num_key_value_heads") in fields.defaults
    kv_heads = fields.optional("num_key_value_heads") if known else None
    kv_heads = heads if kv_heads is None else kv_heads
    if "one_kv_head" in fields.architecture and not fields.choice("kv_heads_when"):
        kv_heads = 1 if fields.choice("one_kv_head") else heads
        number = fields.config.get("num_key_value_heads")
        if number not in (None, kv_heads):
            raise ValueError(
                f"contradicts itself: num_key_value_heads = {short(number)}, but other fields give {kv_heads}"
            )
    dim = fields.optional("head_dim")
    check_heads(width, heads, kv_heads, dim)
    if "head_dim" not in fields.defaults and dim not in (None, width // heads):
        raise ValueError(f"head_dim = {dim} is not supported for this architecture; only d_model / num_heads is")
    return heads, kv_heads, width // heads if dim is None else dim
