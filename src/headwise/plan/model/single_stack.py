"""The parts of a model with one stack (a decoder or an encoder) from the fields of its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from ..config.fields import Fields, heads_of
from ..config.windows import chunks, windows_of
from ..shape import short
from .layer import AttentionLayer, Biases, Latent, LayerRole, PositionTerms, QkNorm
from .parts import BIASES, Part, linear, repeated, table, vector
from .recurrent import layer_kinds


def attention_layers(fields: Fields) -> list[AttentionLayer]:
    """Return the attention layers of a model with one stack.

    Raises:
        ValueError: a field with an invalid or unsupported value.
    """
    about = fields.architecture
    layers = fields.size("num_hidden_layers")
    role: LayerRole = "encoder" if about.get("stack") == "encoder" else "self"
    if "causal_unless" in about and fields.flag(about["causal_unless"]):
        raise ValueError(
            f"{about['causal_unless']} is on, and bidirectional attention is not supported for this architecture"
        )
    attends, _ = layer_kinds(fields, layers)
    windows, chunked = windows_of(fields, layers), chunks(fields)
    one = _latent_layer(fields) if about.get("latent") else plain_layer(fields, role)
    shared = about.get("one_layer_shared", False)
    return [
        replace(one, index=i, window=windows[i], chunked=chunked and windows[i] is not None, shared=shared and i > 0)
        for i in range(layers)
        if attends[i]
    ]


def plain_layer(fields: Fields, role: LayerRole) -> AttentionLayer:
    """Return the attention layer without latents."""
    heads, kv_heads, dim = heads_of(fields)
    width = fields.size("hidden_size")
    norm: dict[str, Any] = fields.architecture.get("qk_norm", {})
    over: QkNorm = norm.get("over", "") if fields.flag(norm.get("when", True)) else ""
    assert over in get_args(QkNorm)
    return AttentionLayer(
        role,
        0,
        width,
        heads,
        kv_heads,
        dim,
        dim,
        bias=biases(fields),
        qk_norm=over,
        qk_norm_bias=norm.get("bias", False),
        sinks=fields.choice("sinks"),
        gated=fields.choice("gated"),
        positions=_positions(fields),
        out_width=width if fields.choice("square_o") else None,
        sub_norm=width if fields.choice("sub_norms") else 0,
    )


def _positions(fields: Fields) -> PositionTerms | None:
    """Return the content-position terms of disentangled attention, from a list or a text such as ``c2p|p2c``."""
    about: dict[str, Any] | None = fields.architecture.get("disentangled")
    if about is None or not fields.flag(about["when"]):
        return None
    called, kinds = fields.raw(about["terms"])
    kinds = [word.strip() for word in kinds.lower().split("|")] if isinstance(kinds, str) else (kinds or [])
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"c2p", "p2c"}:
        raise ValueError(f"{called} names c2p or p2c; got {short(kinds)}")
    reach = [fields.optional(name, least=-1) or -1 for name in about["reach"]]
    span = next((number for number in reach if number > 0), None) or fields.size("max_position_embeddings")
    shared = fields.flag(about.get("shared"))
    return PositionTerms(
        2 * span, "c2p" in kinds, "p2c" in kinds, shared, about.get("key_bias", True), about.get("grows", False)
    )


def biases(fields: Fields) -> Biases:
    """Return the projections with biases: ``qkv_bias``, ``k_bias`` (default: as qkv) and ``o_bias`` of the config."""
    qkv = fields.choice("qkv_bias")
    key = fields.choice("k_bias") if "k_bias" in fields.architecture else qkv
    return Biases(qkv, key, qkv, fields.choice("o_bias"))


def _latent_layer(fields: Fields) -> AttentionLayer:
    heads = fields.size("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(
            f"num_key_value_heads = {kv_heads}, but in latent attention each of the {heads} heads has its own keys"
        )
    rope, value = fields.size("qk_rope_head_dim"), fields.size("v_head_dim")
    bias = fields.flag("attention_bias")
    latent = Latent(fields.size("kv_lora_rank"), rope, fields.optional("q_lora_rank"), bias)
    dim = fields.size("qk_nope_head_dim") + rope
    return AttentionLayer(
        "self", 0, fields.size("hidden_size"), heads, heads, dim, value, bias=Biases(o=bias), latent=latent
    )


# --- other parts ------------------------------------------------------------------------------------------------------


def other_parts(fields: Fields, *, with_head: bool) -> Iterator[Part]:
    """Yield all parts except attention: embeddings, norms, feed-forward layers, the unembedding.

    `with_head` is False for the bare model, whose class has no language-modelling head.
    """
    about, width = fields.architecture, fields.size("hidden_size")
    yield from _embeddings(fields, width)
    layers = fields.size("num_hidden_layers")
    stream = "encoder" if about.get("stack") == "encoder" else "decoder"
    norms = _norms(fields)
    for i in range(layers):
        shared = about.get("one_layer_shared") and i > 0
        skipped = about.get("first_norm") is False and i == 0
        made = [*_feed_forward(fields, i, stream)]
        norm = norm_size(fields, width) * (norms - skipped)
        made += [vector("norms", "norm", norm, stream=stream)] if norm else []
        yield from (_weightless(part) for part in made) if shared else made
    if fields.flag(about.get("final_norm", True)):
        yield vector("final_norm", "norm", norm_size(fields, width), stream=stream)
    if with_head:
        yield from _head(fields, width, stream)
    elif about.get("pooler"):
        yield linear("pooler", "head", width, width, bias=True, stream=stream)


def _norms(fields: Fields) -> int:
    """Return the number of norms per layer; 1 if parallel attention and feed-forward share a norm."""
    about = fields.architecture
    side = about.get("side_by_side")
    if side is None:
        return 1 if fields.choice("one_norm") else int(about.get("layer_norms", 2))
    number = fields.optional(side["norms"])
    two = number == 2 or (number is None and fields.flag(side["two_when"]))
    return 2 if two or not fields.flag(side["when"]) else 1


def further_parts(fields: Fields, attention: AttentionLayer) -> tuple[Part, ...]:
    """Return the layers that predict further tokens; each is a full layer on the embedding and the last layer's output.

    They use the embedding and the unembedding of the model; a checkpoint may contain copies of these.
    """
    about = fields.architecture.get("further")
    count = fields.optional(about, least=0) if about else 0
    if not count:
        return ()
    width, layers = fields.size("hidden_size"), fields.size("num_hidden_layers")
    one = [*attention.parts(), *_feed_forward(fields, layers, "further")]
    one += [linear("join", "mlp", 2 * width, width, stream="further")]
    one += [vector("norms", "norm", norm_size(fields, width) * (_norms(fields) + 3), stream="further")]
    return tuple(replace(repeated(part, count, count), stream="further") for part in one)


def norm_size(fields: Fields, width: int) -> int:
    """Return the number of parameters of one norm: its weights, and its biases if it is a LayerNorm with biases."""
    kind = fields.architecture.get("norm", "rms")
    biased = kind == "layer" and fields.flag(fields.architecture.get("norm_bias", True))
    return 0 if kind == "none" else width * (2 if biased else 1)


def _weightless(part: Part) -> Part:
    return Part(part.name, part.room, 0, part.macs, part.active, part.stream)


def _embeddings(fields: Fields, width: int) -> Iterator[Part]:
    about = fields.architecture
    stream = "encoder" if about.get("stack") == "encoder" else "decoder"
    how = about.get("embed_project")
    inner = fields.size("embedding_size") if how else width
    table_width = width if how == "both" else inner  # positions and token types are added at this width
    yield table("embeddings", fields.size("vocab_size"), inner, stream=stream)
    if about.get("positions") and fields.flag(about.get("positions_when", True)):
        rows = fields.size(about["positions"]) + about.get("position_extra", 0)
        yield table("positions", rows, table_width, stream=stream)
    if about.get("token_types") and fields.size(about["token_types"], least=0):
        yield table("token_types", fields.size(about["token_types"]), table_width, stream=stream)
    if about.get("embed_norm"):
        yield vector("embedding_norm", "norm", norm_size(fields, inner), stream=stream)
    if how == "both" and inner != width:
        yield linear("project_in", "embedding", inner, width, stream=stream)
        yield linear("project_out", "embedding", width, inner, stream=stream)
    elif how == "always" or (how == "in" and inner != width):
        yield linear("project_in", "embedding", inner, width, bias=True, stream=stream)
    if about.get("relative_buckets"):
        heads = fields.size("num_attention_heads")
        yield table(BIASES, fields.size(about["relative_buckets"]), heads, stream=stream)
    yield from _disentangled(fields, width, stream)


def _disentangled(fields: Fields, width: int, stream: str) -> Iterator[Part]:
    """Yield the parts that the position terms of all layers share, and the convolution at the first layer."""
    about, positions = fields.architecture.get("disentangled", {}), _positions(fields)
    if positions is not None:
        yield table("relative_positions", positions.rows, width, stream=stream)
    if "norm" in about and "layer_norm" in str(fields.raw(about["norm"])[1]).lower():
        yield vector("relative_norm", "norm", norm_size(fields, width), stream=stream)
    kernel = fields.optional(about["kernel"], least=0) if "kernel" in about else 0
    if kernel:
        groups = fields.size(about["groups"])
        if width % groups:
            raise ValueError(f"{about['groups']} = {groups} does not divide hidden_size = {width}")
        yield linear("conv", "mlp", width * kernel // groups, width, bias=True, stream=stream)
        yield vector("conv_norm", "norm", norm_size(fields, width), stream=stream)


def _head(fields: Fields, width: int, stream: str) -> Iterator[Part]:
    """Yield the unembedding; if it is tied to the embedding, its matrix has no parameters of its own."""
    about = fields.architecture
    inner = fields.size("embedding_size") if about.get("embed_project") else width
    vocab, tied = fields.size("vocab_size"), fields.flag("tie_word_embeddings")
    tied = tied or not fields.flag(about.get("own_head_when", True))
    if about.get("head_transform"):
        bias = fields.flag(about.get("head_transform_bias", True))
        yield linear("head_transform", "head", width, inner, bias=bias, stream=stream)
        yield vector("head_norm", "head", norm_size(fields, inner), stream=stream)
    added = vocab if fields.choice("head_bias") else 0
    own = added if tied else added * about.get("untied_biases", 1) + vocab * inner
    yield Part("lm_head", "head", own, vocab * inner, vocab * inner + added, stream)


# --- feed-forward -----------------------------------------------------------------------------------------------------


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


def _feed_forward(fields: Fields, index: int, stream: str) -> Iterator[Part]:
    about, width = fields.architecture, fields.size("hidden_size")
    gated = about.get("mlp", "gated") == "gated"
    moe: dict[str, Any] | None = about.get("moe")
    if moe and not _dense(fields, moe.get("dense"), index):
        yield from _experts(fields, moe, gated, stream)
        return
    inner = (
        fields.optional("intermediate_size")
        if fields.own.get("intermediate_size", "intermediate_size") in (fields.defaults)
        else None
    )
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
        return index < fields.size(rule["first"], least=0)
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
    bias = moe.get("expert_bias", False)
    one = feed_forward("experts", width, inner, gated=gated, bias=bias, stream=stream)
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
