"""The feed-forward layers of a model with one stack: dense ones, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config.fields import Fields
from ..shape import short
from .key_sharing import owners_of_keys
from .parts import Part, linear, repeated, vector


def feed_forward(name: str, width: int, inner: int, *, gated: bool, bias: bool, stream: str) -> Part:
    """Return a feed-forward layer: two matrices, or three with a gate.

    Example:
        >>> feed_forward("mlp", 4096, 11008, gated=True, bias=False, stream="decoder").parameters == 3 * 4096 * 11008
        True
    """
    ups = 2 if gated else 1
    matrices = (ups + 1) * width * inner
    size = matrices + (ups * inner + width if bias else 0)
    return Part(name, "mlp", size, matrices, size, stream, ((width, inner, ups), (inner, width, 1)))


def feed_forward_parts(fields: Fields, index: int, stream: str) -> Iterator[Part]:
    """Yield the feed-forward layer of one layer of the stack, or its mixture; some have both, side by side.

    Raises:
        ValueError: a field with an invalid value.
    """
    about, width = fields.architecture, fields.size("hidden_size")
    gated = about.get("mlp", "gated") == "gated"
    moe: dict[str, Any] | None = about.get("moe")
    blocks = fields.blocks()
    if blocks is not None:
        if blocks[index] not in ("mlp", "moe"):
            return
        moe = moe if blocks[index] == "moe" else None
    if moe and "beside" in moe:
        if fields.flag(moe["beside"]):
            yield from _experts(fields, moe, gated, stream)
    elif moe and not _dense(fields, moe.get("dense"), index):
        yield from _experts(fields, moe, gated, stream)
        return
    inner = _inner(fields, index)
    if inner is None:
        if "wide" not in about:
            raise ValueError("intermediate_size is null, and a whole number is needed")
        inner = about["wide"] * width
    if moe and "dense_width" in moe:
        inner = fields.size(moe["dense_width"])
    if "adjusted" in about:
        inner = _adjusted(fields, about["adjusted"], inner)
    yield feed_forward("mlp", width, inner, gated=gated, bias=fields.choice("mlp_bias"), stream=stream)
    if about.get("activation_numbers"):
        yield vector("activation", "mlp", about["activation_numbers"], stream=stream)
    if fields.choice("sub_norms"):
        yield vector("sub_norm", "norm", inner, stream=stream)


def _inner(fields: Fields, index: int) -> int | None:
    """Return the width of a dense layer, or None if the config does not say it; some configs list one per layer."""
    about = fields.architecture
    called = fields.own.get("intermediate_size", "intermediate_size")
    if called not in fields.defaults:
        return None
    if isinstance(fields.raw("intermediate_size")[1], list) and about.get("inner_by_layer"):
        listed = fields.numbers("intermediate_size", length=fields.layer_count())
        if listed is None or not listed[index] >= 1:
            raise ValueError(f"{called} is at least 1 in every layer; got {short(listed)}")
        return listed[index]
    inner = fields.optional("intermediate_size")
    wider = about.get("wider_without_keys")
    without = wider and fields.flag(wider) and owners_of_keys(fields, fields.layer_count())[index] is not None
    return 2 * inner if without and inner is not None else inner


def _adjusted(fields: Fields, about: dict[str, str], inner: int) -> int:
    """Return two thirds of the width, times a factor, rounded up to a multiple, if the config says so."""
    if not fields.flag(about["when"]):
        return inner
    inner = int(2 * inner / 3)
    called, factor = fields.raw(about["factor"])
    if factor is None:
        return inner
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor <= 1000:
        raise ValueError(f"{called} is a number above 0; got {short(factor)}")
    multiple = fields.size(about["multiple"])
    return -(-int(factor * inner) // multiple) * multiple


def _dense(fields: Fields, rule: dict[str, Any] | None, index: int) -> bool:
    """Return whether a layer of a mixture model is dense."""
    if rule is None:
        return False
    if rule["rule"] == "first":
        kinds = fields.words(rule["kinds"], fields.layer_count(), ("dense", "sparse")) if "kinds" in rule else None
        first = fields.size(rule["first"], least=0) if isinstance(rule["first"], str) else rule["first"]
        return index < first if kinds is None else kinds[index] == "dense"
    if rule["rule"] == "none":
        return fields.size(rule["experts"], least=0) == 0
    if rule["rule"] == "listed":
        listed, step = fields.numbers(rule["only"]), fields.size(rule["step"])
        return (index + 1) % step != 0 if listed is None else index not in listed
    if rule["rule"] == "period":
        off = index % fields.size(rule["period"]) != fields.size(rule["offset"], least=0)
        return off or fields.size("num_experts") == 1
    only = fields.numbers(rule["only"]) or []
    return index in only or fields.size("num_experts", least=0) == 0 or (index + 1) % fields.size(rule["step"]) != 0


def _experts(fields: Fields, moe: dict[str, Any], gated: bool, stream: str) -> Iterator[Part]:
    width, inner = fields.size("hidden_size"), fields.size(moe["width"])
    experts, used = fields.size(moe["experts"]), fields.size(moe["per_token"])
    if used > experts:
        raise ValueError(f"{moe['per_token']} = {used} is more than the number of experts, {experts}")
    yield linear("router", "mlp", width, experts, bias=moe.get("router_bias", False), stream=stream)
    if moe.get("router_scales"):
        yield vector("router_scales", "mlp", width + experts, stream=stream)
    latent = fields.optional(moe["latent"]) if "latent" in moe else None
    if latent is not None:
        biased = fields.choice("mlp_bias")
        yield linear("expert_down", "mlp", width, latent, bias=biased, stream=stream)
        yield linear("expert_up", "mlp", latent, width, bias=biased, stream=stream)
    bias = moe.get("expert_bias", False)
    one = feed_forward("experts", latent or width, inner, gated=gated, bias=bias, stream=stream)
    yield repeated(one, experts, used)
    shared = None
    if "shared" in moe:
        shared = fields.size(moe["shared"], least=0)
    elif "shared_times" in moe:
        shared = inner * (fields.optional(moe["shared_times"], least=0) or 0)
    if shared:
        biased = fields.choice("mlp_bias")
        yield feed_forward("shared_experts", width, shared, gated=gated, bias=biased, stream=stream)
    if moe.get("shared_gate"):
        yield linear("shared_gate", "mlp", width, 1, stream=stream)
