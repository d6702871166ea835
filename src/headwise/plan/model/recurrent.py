"""Layers with a state of fixed size instead of keys and values: linear attention, state spaces, convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config.fields import FULL, Fields
from ..shape import short
from .parts import Part, linear, vector

FLOAT32 = 4


@dataclass(frozen=True)
class StateLayer:
    """One layer with a state: its parameters, and its state for a text of any length.

    Attributes:
        index: Index of the layer in the stack.
        kind: The family: delta, kda, mamba, mamba2, conv or lightning.
        conv: The number of values of its last convolution inputs, in the model's dtype.
        state: The number of values of its recurrent state.
        state_bytes: Bytes of a value of the state; None for the model's dtype.
        matrices: Its matrices and vectors.
    """

    index: int
    kind: str
    conv: int
    state: int
    state_bytes: int | None
    matrices: tuple[Part, ...]

    def parts(self) -> tuple[Part, ...]:
        """Return every matrix and vector."""
        return self.matrices

    def bytes(self, number_bytes: int) -> int:
        """Return the bytes of the state of one text, where the model's dtype has `number_bytes` bytes.

        Example:
            >>> StateLayer(0, "mamba", 96, 384, 4, ()).bytes(2)
            1728
        """
        return self.conv * number_bytes + self.state * (self.state_bytes or number_bytes)


def layer_kinds(fields: Fields, layers: int) -> tuple[list[bool], list[bool]]:
    """Return for each layer whether it has attention, and whether it has a state; a layer may have both.

    Raises:
        ValueError: a layer of an unsupported kind, or no layer with attention.
    """
    about: dict[str, Any] | None = fields.architecture.get("states")
    if about is None:
        return [True] * layers, [False] * layers
    if about.get("both"):
        return [True] * layers, [True] * layers
    blocks = fields.blocks()
    states = fields.layer_types(layers, about.get("word", "")) if blocks is None else None
    if blocks is not None:
        attention, states = [kind == FULL for kind in blocks], [kind == about["word"] for kind in blocks]
    elif states is not None:
        attention = [not state for state in states]
    else:
        attention = _RULES[about["rule"]](fields, about, layers)
        states = [not has for has in attention]
    if not any(attention):
        raise ValueError("no layer has attention; a model with only state layers is not supported")
    return attention, states


def _every(fields: Fields, about: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers with attention: every n-th, or the last if there are fewer and the rule says so."""
    every = fields.size(about["every"]) if isinstance(about["every"], str) else about["every"]
    attention = [(i + 1) % every == 0 for i in range(layers)]
    if about.get("last") and not any(attention):
        attention[-1] = True
    return attention


def _listed_twice(fields: Fields, about: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers with attention: those that a part of the config counts from 1, or every fourth."""
    inside = fields.section(about["inside"])
    full, state = (inside.get(about[key]) for key in ("full", "state"))
    if full is None or state is None:
        return [i > 0 and i % 4 == 0 for i in range(layers)]
    both = [*full, *state] if isinstance(full, list) and isinstance(state, list) else []
    if not all(type(n) is int for n in both) or sorted(both) != list(range(1, layers + 1)):
        raise ValueError(f"{about['inside']} names each of the layers 1 to {layers} once; got {short(inside)}")
    return [i + 1 in full for i in range(layers)]


def _period(fields: Fields, about: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers with attention: one in each period."""
    period, offset = fields.size(about["period"]), fields.size(about["offset"], least=0)
    if offset >= period:
        raise ValueError(f"{about['offset']} = {offset} is not below {about['period']} = {period}")
    return [i % period == offset for i in range(layers)]


def _indices(fields: Fields, about: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers with attention: those in a list; if it is null, all or none."""
    listed = fields.numbers(about["indices"])
    return [about.get("null_is_all", False) if listed is None else i in listed for i in range(layers)]


_RULES: dict[str, Callable[[Fields, dict[str, Any], int], list[bool]]] = {
    "every": _every,
    "odd": lambda fields, about, layers: [i % 2 == 0 for i in range(layers)],
    "period": _period,
    "indices": _indices,
    "listed_twice": _listed_twice,
    "none": lambda fields, about, layers: [False] * layers,
}


def state_layers(fields: Fields, layers: int) -> tuple[StateLayer, ...]:
    """Return the layers with a state in a model with one stack; empty for most models."""
    about: dict[str, Any] | None = fields.architecture.get("states")
    if about is None:
        return ()
    _, where = layer_kinds(fields, layers)
    conv, state, parts = _KINDS[about["kind"]](fields, about)
    dtype = None if about.get("state") == "model" else FLOAT32
    return tuple(StateLayer(i, about["kind"], conv, state, dtype, tuple(parts)) for i in range(layers) if where[i])


# --- the families -----------------------------------------------------------------------------------------------------

StateSizes = tuple[int, int, list[Part]]  # sizes of the convolution inputs and of the state, and the parts


def _matrix(name: str, inputs: int, outputs: int, *, bias: bool = False) -> Part:
    return linear(name, "state", inputs, outputs, bias=bias)


def _numbers(name: str, size: int) -> Part:
    return vector(name, "state", size)


def _conv(channels: int, kernel: int, *, bias: bool) -> Part:
    """Return a convolution of each channel separately: kernel multiply-adds per channel and token."""
    size = channels * kernel + (channels if bias else 0)
    return Part("conv", "state", size, channels * kernel, size)


def _delta(fields: Fields, about: dict[str, Any]) -> StateSizes:
    """Return the sizes of a gated delta rule layer: a key-by-value matrix per head, updated by outer products."""
    width, kernel = fields.size("hidden_size"), fields.size("linear_conv_kernel_dim")
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    key_dim = fields.optional("linear_key_head_dim") or int(0.75 * width / keys)
    value_dim = fields.optional("linear_value_head_dim") or 2 * key_dim
    if values % keys:
        raise ValueError(f"linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = {keys}")
    channels = 2 * keys * key_dim + values * value_dim
    parts = [
        _matrix("in_proj", width, channels + values * value_dim + 2 * values),
        _conv(channels, kernel, bias=False),
        _numbers("decay", 2 * values),
        _numbers("state_norm", value_dim),
        _matrix("out_proj", values * value_dim, width),
    ]
    return channels * kernel, values * key_dim * value_dim, parts


def _kda(fields: Fields, about: dict[str, Any]) -> StateSizes:
    """Return the sizes of a delta rule layer with a decay for each channel, from a narrow matrix pair."""
    inside = fields.section(about["inside"])
    own = Fields({name: inside[old] for old, name in about["fields"].items() if old in inside}, fields.architecture)
    width = fields.size("hidden_size")
    heads, dim, kernel = (
        (own if name in own.config else fields).size(name)
        for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    )
    inner = heads * dim
    parts = [_matrix("in_proj", width, 3 * inner + heads), _conv(3 * inner, kernel, bias=False)]
    for name in ("decay", "gate"):
        parts += [_matrix(f"{name}_down", width, dim), _matrix(f"{name}_up", dim, inner)]
    parts += [_numbers("decay", inner + heads), _numbers("state_norm", dim), _matrix("out_proj", inner, width)]
    return 3 * inner * kernel, heads * dim * dim, parts


def _mamba(fields: Fields, about: dict[str, Any]) -> StateSizes:
    """Return the sizes of a selective state space layer, with a separate state for each channel."""
    width, kernel, state = (fields.size(name) for name in ("hidden_size", "mamba_d_conv", "mamba_d_state"))
    inner = fields.size("mamba_expand") * width
    automatic = fields.raw("mamba_dt_rank")[1] == "auto"
    rank = -(-width // 16) if automatic else fields.size("mamba_dt_rank")
    bias = fields.flag("mamba_proj_bias")
    parts = [
        _matrix("in_proj", width, 2 * inner, bias=bias),
        _conv(inner, kernel, bias=fields.flag("mamba_conv_bias")),
        _matrix("x_proj", inner, rank + 2 * state),
        _matrix("dt_proj", rank, inner, bias=True),
        _numbers("decay", inner * state + inner),
        _numbers("state_norm", rank + 2 * state),
        _matrix("out_proj", inner, width, bias=bias),
    ]
    return inner * kernel, inner * state, parts


def _mamba2(fields: Fields, about: dict[str, Any]) -> StateSizes:
    """Return the sizes of a state space layer with one decay per head."""
    width, kernel, state = (fields.size(name) for name in ("hidden_size", "mamba_d_conv", "mamba_d_state"))
    heads, groups = fields.size("mamba_n_heads"), fields.size("mamba_n_groups")
    own = fields.optional("mamba_d_ssm") if "mamba_d_ssm" in fields.defaults else None
    if "head_dim" in about:
        own = heads * fields.size(about["head_dim"])
    inner = fields.size("mamba_expand") * width if own is None else own
    if inner % heads:
        raise ValueError(f"mamba_n_heads = {heads} does not divide the {inner} channels of the state layers")
    dim = None if "head_dim" in about else fields.raw("mamba_d_head")[1]
    if dim not in (None, "auto", inner // heads):
        raise ValueError(f"mamba_d_head = {short(dim)} times mamba_n_heads = {heads} is not {inner}, the channels")
    channels = inner + 2 * groups * state
    in_bias, out_bias = (fields.flag(about.get(f"{side}_bias", "mamba_proj_bias")) for side in ("in", "out"))
    parts = [
        _matrix("in_proj", width, inner + channels + heads, bias=in_bias),
        _conv(channels, kernel, bias=fields.flag("mamba_conv_bias")),
        _numbers("decay", 3 * heads),
        *([_numbers("state_norm", inner)] if fields.flag(about.get("norm", True)) else []),
        _matrix("out_proj", inner, width, bias=out_bias),
    ]
    return channels * kernel, heads * (inner // heads) * state, parts


def _short_conv(fields: Fields, about: dict[str, Any]) -> StateSizes:
    """Return the sizes of a convolution between two gates; it has no recurrent state."""
    width, kernel, bias = fields.size("hidden_size"), fields.size("conv_L_cache"), fields.flag("conv_bias")
    parts = [
        _matrix("in_proj", width, 3 * width, bias=bias),
        _conv(width, kernel, bias=bias),
        _matrix("out_proj", width, width, bias=bias),
    ]
    return width * kernel, 0, parts


def _lightning(fields: Fields, about: dict[str, Any]) -> StateSizes:
    """Return the sizes of linear attention with a fixed decay per head: a D by D matrix for each head."""
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    dim = fields.optional("head_dim") or width // heads
    inner = heads * dim
    parts = [
        _matrix("qkv_proj", width, 3 * inner),
        _matrix("gate_proj", width, inner),
        _numbers("state_norm", inner),
        _matrix("out_proj", inner, width),
    ]
    return 0, heads * dim * dim, parts


_KINDS: dict[str, Callable[[Fields, dict[str, Any]], StateSizes]] = {
    "delta": _delta,
    "kda": _kda,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "conv": _short_conv,
    "lightning": _lightning,
}
