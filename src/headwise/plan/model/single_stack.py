"""The parts of a model with one stack (a decoder or an encoder) from the fields of its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from ..config.fields import Fields, heads_of
from ..config.windows import windows_of
from ..shape import check_heads, short
from .feed_forward import feed_forward_parts
from .key_sharing import owners_of_keys
from .layer import AttentionLayer, Biases, Latent, LayerRole, PositionTerms, QkNorm
from .layer_inputs import layer_input_parts, model_input_parts
from .parts import BIASES, Part, linear, repeated, table, vector
from .recurrent import layer_kinds
from .sparse import Indexer, shared_keys


def attention_layers(fields: Fields) -> list[AttentionLayer]:
    """Return the attention layers of a model with one stack.

    Raises:
        ValueError: a field with an invalid or unsupported value.
    """
    about = fields.architecture
    layers = fields.layer_count()
    role: LayerRole = "encoder" if about.get("stack") == "encoder" else "self"
    if "causal_unless" in about and fields.flag(about["causal_unless"]):
        raise ValueError(
            f"{about['causal_unless']} is on, and bidirectional attention is not supported for this architecture"
        )
    attends, _ = layer_kinds(fields, layers)
    windows, chunked = windows_of(fields, layers), about.get("windows", {}).get("chunked", False)
    one = _latent_layer(fields) if about.get("latent") else plain_layer(fields, role)
    shared = about.get("one_layer_shared", False)
    full = _full_layer(fields, one) if "full_layers" in about else one
    owners, indexers, own_keys = owners_of_keys(fields, layers), _indexers(fields, layers), shared_keys(fields, layers)
    return [
        replace(
            one if windows[i] is not None else full,
            index=i,
            window=windows[i],
            chunked=chunked and windows[i] is not None,
            shared=shared and i > 0,
            keys_of=owners[i],
            indexer=indexers[i],
            shared_key=own_keys[i],
        )
        for i in range(layers)
        if attends[i]
    ]


def _full_layer(fields: Fields, one: AttentionLayer) -> AttentionLayer:
    """Return the layer without a window where it has other heads than those with a window."""
    about: dict[str, str] = fields.architecture["full_layers"]
    alone = fields.flag(about["keys_as_values"])
    kv_heads = fields.optional(about["kv_heads"]) if alone else None
    kv_heads, dim = one.num_kv_heads if kv_heads is None else kv_heads, fields.size(about["head_dim"])
    overrides = fields.section("per_layer_config")
    if overrides:
        windows = windows_of(fields, fields.layer_count())
        own = [overrides.get(str(i), overrides.get(i)) for i in range(len(windows))]
        alike = [entry for entry, window in zip(own, windows, strict=True) if window is None]
        known = {"head_dim", "num_key_value_heads"}
        if any(window is not None and entry for entry, window in zip(own, windows, strict=True)) or any(
            entry != alike[0] or not isinstance(entry, Mapping) or not set(entry) <= known for entry in alike
        ):
            raise ValueError(f"per_layer_config gives all layers without a window the same heads; got {short(own)}")
        inner = Fields({**fields.config, **(alike[0] if alike else {})}, fields.architecture)
        dim = inner.size("head_dim")
        kv_heads = inner.size("num_key_value_heads")
    check_heads(one.d_model, one.num_heads, kv_heads, dim)
    return replace(one, num_kv_heads=kv_heads, head_dim=dim, value_dim=dim, keys_as_values=alone)


def _indexers(fields: Fields, layers: int) -> list[Indexer | None]:
    """Return the indexer of each layer; some layers attend to the keys that the one before chose."""
    about: dict[str, str] | None = fields.architecture.get("indexer")
    if about is None:
        return [None] * layers
    if fields.optional("q_lora_rank") is None:
        raise ValueError("q_lora_rank is null, but the indexer reads the latent of the queries: give its width")
    one = Indexer(fields.size(about["heads"]), fields.size(about["dim"]), fields.size(about["top_k"]))
    if one.dim < fields.size("qk_rope_head_dim"):
        raise ValueError(f"{about['dim']} = {one.dim} is less than qk_rope_head_dim, the part that is rotated")
    if "kinds" not in about:
        return [one] * layers
    kinds = fields.words(about["kinds"], layers, ("full", "shared"))
    letters = fields.config.get(about["letters"])
    if kinds is None and letters is not None:
        named = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        known = isinstance(letters, (str, list)) and all(isinstance(n, str) and n in named for n in letters)
        if not known or len(letters) != layers:
            raise ValueError(f"{about['letters']} has F or S for each of {layers} layers; got {short(letters)}")
        kinds = [named[letter] for letter in letters]
    if kinds is None:
        every, offset = (fields.optional(about[name], least=0) for name in ("every", "offset"))
        every, offset = max(every or 0, 1), 2 if offset is None else offset
        kinds = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if kinds[0] == "shared":
        raise ValueError(f"{about['kinds']} starts with shared, and there is no earlier layer to share with")
    return [replace(one, shared=kind == "shared") for kind in kinds]


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
    layers = fields.layer_count()
    yield from model_input_parts(fields, layers)
    stream = "encoder" if about.get("stack") == "encoder" else "decoder"
    norms = _norms(fields)
    for i in range(layers):
        shared = about.get("one_layer_shared") and i > 0
        skipped = about.get("first_norm") is False and i == 0
        made = [*feed_forward_parts(fields, i, stream), *layer_input_parts(fields)]
        norm = norm_size(fields, width) * (norms - skipped)
        made += [vector("norms", "norm", norm, stream=stream)] if norm else []
        yield from (replace(part, parameters=0, matrices=()) for part in made) if shared else made
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
        more = about.get("moe", {}).get("norms", 0) if fields.flag(about.get("moe", {}).get("beside")) else 0
        return 1 if fields.choice("one_norm") else int(about.get("layer_norms", 2)) + more
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
    one = [*attention.parts(), *feed_forward_parts(fields, layers, "further")]
    one += [linear("join", "mlp", 2 * width, width, stream="further")]
    one += [vector("norms", "norm", norm_size(fields, width) * (_norms(fields) + 3), stream="further")]
    return tuple(replace(repeated(part, count, count), stream="further") for part in one)


def norm_size(fields: Fields, width: int) -> int:
    """Return the number of parameters of one norm: its weights, and its biases if it is a LayerNorm with biases."""
    kind = fields.architecture.get("norm", "rms")
    biased = kind == "layer" and fields.flag(fields.architecture.get("norm_bias", True))
    return 0 if kind == "none" else width * (2 if biased else 1)


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
    tied = (tied or not fields.flag(about.get("own_head_when", True))) and not about.get("never_tied")
    if about.get("head_transform"):
        bias = fields.flag(about.get("head_transform_bias", True))
        yield linear("head_transform", "head", width, inner, bias=bias, stream=stream)
        yield vector("head_norm", "head", norm_size(fields, inner), stream=stream)
    added = vocab if fields.choice("head_bias") else 0
    own = added if tied else added * about.get("untied_biases", 1) + vocab * inner
    yield Part("lm_head", "head", own, vocab * inner, vocab * inner + added, stream)
