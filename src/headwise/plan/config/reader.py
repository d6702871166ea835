"""The attention shape from a model's config.json: a strict reader of a few known fields.

A config is untrusted input. Only the fields below are read, and each is checked; everything else in the file is ignored
and nothing is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...files.strict_json import parse_object
from ..shape import AttentionShape, short

MAX_BYTES = 1_000_000

# The names of each size in existing configs; the usual name is first.
ALIASES = {
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "value_dim": ("v_head_dim",),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
}
LARGEST = {
    "d_model": 1_000_000,
    "num_heads": 10_000,
    "num_kv_heads": 10_000,
    "head_dim": 100_000,
    "value_dim": 100_000,
    "num_layers": 100_000,
}
NESTED = ("text_config",)

# Fields of some architectures that may override the fields above, and the size that each of them must equal.
ELSEWHERE: dict[str, str | int] = {
    "attention_hidden_size": "d_model",
    "attention_head_dim": "head_dim",
    "attention_head_size": "head_dim",
    "d_head": "head_dim",
    "dim_head": "head_dim",
    "embed_dim": "d_model",
    "head_ratio": 1,
    "kv_channels": "head_dim",
    "multi_query_group_num": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "true_hidden_size": "d_model",
}


def parse(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raises ValueError for anything else."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("is no regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror or type(error).__name__})") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes, so it is no model's config.json")
    return parse_object(raw)


def shape_of(config: dict[str, Any]) -> AttentionShape:
    """Return the attention shape of a parsed config; raises ValueError."""
    for name in NESTED:
        if isinstance(config.get(name), dict):
            config = config[name]
    if config.get("kv_lora_rank") is not None:
        raise ValueError("kv_lora_rank: latent attention has no such shape; give the sizes yourself")
    sizes = {name: _size(config, name) for name in ALIASES}
    for name in ("d_model", "num_heads"):
        if sizes[name] is None:
            raise ValueError(f"has no {name}: none of {', '.join(ALIASES[name])}")
    if _flag(config, "multi_query"):
        if sizes["num_kv_heads"] is not None:
            raise ValueError("says both multi_query and a number of key-value heads; give the sizes yourself")
        sizes["num_kv_heads"] = 1
    shape = AttentionShape.of(**sizes, bias=_flag(config, "attention_bias"))  # type: ignore[arg-type]
    _check_elsewhere(config, shape)
    return shape


def _check_elsewhere(config: dict[str, Any], shape: AttentionShape) -> None:
    """Raise ValueError if another field of the config changes the sizes of its attention in an unknown way."""
    inner = config.get("attn_config")
    said = {name: (config.get(name), meant) for name, meant in ELSEWHERE.items()}
    said["attn_config.kv_n_heads"] = (inner.get("kv_n_heads") if isinstance(inner, dict) else None), "num_kv_heads"
    for name, (value, meant) in said.items():
        known = getattr(shape, meant) if isinstance(meant, str) else meant
        if value is not None and value != known:
            what = f"{meant} = {known}" if isinstance(meant, str) else str(known)
            raise ValueError(
                f"{name} = {short(value)} is not {what}, and how this architecture then shapes its attention is not "
                "known; give the sizes yourself"
            )


def _size(config: dict[str, Any], name: str) -> int | None:
    """Return a size under any of its names; None if it is absent or null."""
    values = {alias: config[alias] for alias in ALIASES[name] if config.get(alias) is not None}
    for alias, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{alias} is a whole number; got {short(value)}")
        if not 1 <= value <= LARGEST[name]:
            raise ValueError(f"{alias} is between 1 and {LARGEST[name]}; got {short(value)}")
    if len(set(values.values())) > 1:
        raise ValueError(f"contradicts itself: {', '.join(f'{a} = {v}' for a, v in values.items())}")
    return next(iter(values.values()), None)


def _flag(config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is true or false; got {short(value)}")
    return bool(value)
