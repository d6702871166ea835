"""The layers with an attention window, and the rules by which configs define them."""

from __future__ import annotations

from typing import Any

from ..shape import short
from .fields import FULL, Fields, everywhere

SLIDING = "sliding_attention"


def windows_of(fields: Fields, layers: int) -> list[int | None]:
    """Return the window of each layer, in keys including the query's own; None for a layer without a window.

    ``layer_types`` decides if the config has it, otherwise the rule of the architecture.

    Raises:
        ValueError: a layer of an unsupported type, or a sliding layer without a window.
    """
    rule: dict[str, Any] = fields.architecture.get("windows", {})
    if "states" in fields.architecture and fields.config.get("sliding_window") is None:
        return [None] * layers
    if not rule:
        alike = [fields.architecture.get("layer_word", FULL)] * layers
        kinds = fields.config.get("layer_types")
        if isinstance(kinds, list):
            kinds = [everywhere()["old_words"].get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        for name, wrong in (
            ("layer_types", kinds not in (None, alike)),
            ("sliding_window", fields.config.get("sliding_window") is not None),
        ):
            if wrong:
                raise ValueError(f"{name} = {short(fields.config[name])} is not supported for this architecture")
        return [None] * layers
    word = rule.get("word", SLIDING)  # null where the types of layers say something else
    sliding = None if word is None else fields.layer_types(layers, word)
    if sliding is None:
        sliding = _RULES[rule["rule"]](fields, rule, layers)
    if rule.get("last_full"):  # whatever layer_types says
        sliding[-1] = False
    window = _window(fields, rule) if any(sliding) else None
    return [window if slides else None for slides in sliding]


def _window(fields: Fields, rule: dict[str, Any]) -> int | None:
    """Return the window in keys; for an encoder it counts both sides, `local_attention // 2` each."""
    if "when" in rule and not fields.flag(rule["when"]):
        raise ValueError(f"layer_types has {SLIDING}, but {rule['when']} is off, so the window is not defined")
    called = rule.get("window", "sliding_window")
    window = fields.optional(called)
    if window is None:
        raise ValueError(f"{called} is null, and some layers are {SLIDING}")
    return 2 * (window // 2) + 1 if fields.architecture.get("stack") == "encoder" else window


def _is_on(fields: Fields, rule: dict[str, Any]) -> bool:
    """Return whether the config sets a window, and has not switched it off."""
    return fields.flag(rule.get("when", True)) and fields.optional("sliding_window") is not None


def _all(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for every layer if a window is on."""
    return [_is_on(fields, rule)] * layers


def _every(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for all but every n-th layer; with ``full_first`` the first layer is full."""
    field = rule.get("every_field")
    every = fields.size(field) if field else rule["every"]
    if "window" not in rule and fields.optional("sliding_window") is None:
        return [False] * layers
    first = 0 if rule.get("full_first") else 1
    return [(i + first) % every != 0 for i in range(layers)]


def _after(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers from a given index on."""
    on, start = _is_on(fields, rule), fields.size(rule["after"], least=0)
    return [on and i >= start for i in range(layers)]


def _odd_before(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for every other layer below a given index, starting with the first."""
    on, stop = fields.flag(rule["when"]), fields.size(rule["before"], least=0)
    return [on and (i + 1) % 2 != 0 and i < stop for i in range(layers)]


def _no_rope(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers without rotary positions, from a list or every n-th."""
    on = _is_on(fields, rule)
    listed = fields.numbers(rule["layers"], length=layers)
    every = fields.size(rule["every_field"])
    rope = listed if listed is not None else [int((i + 1) % every != 0) for i in range(layers)]
    return [on and not has for has in rope]


def _rope(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for the layers with rotary positions, from a list or all but every n-th."""
    every = fields.size(rule["every_field"])
    listed = fields.raw(rule["layers"])[1] or None
    rope = fields.numbers(rule["layers"], length=layers) if listed else None
    return [bool(has) for has in rope] if rope else [(i + 1) % every != 0 for i in range(layers)]


def _types(fields: Fields, rule: dict[str, Any], layers: int) -> list[bool]:
    """Return True for ``local`` layers, from a list of kinds with repeat counts: ``[[["global", "local"], 12]]``."""
    called, entries = fields.raw(rule["types"])
    pattern: list[str] = []
    wrong = ValueError(f"{called} names global or local for each of {layers} layers; got {short(entries)}")
    if not isinstance(entries, list):
        raise wrong
    for entry in entries:
        kinds, times = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(kinds, list) or type(times) is not int or not 0 <= times * len(kinds) <= layers:
            raise wrong
        pattern += kinds * times
    if len(pattern) != layers or any(kind not in ("global", "local") for kind in pattern):
        raise wrong
    listed = fields.config.get(rule["listed"])
    if listed not in (None, pattern):
        raise ValueError(f"{rule['listed']} contradicts {called}; got {short(listed)}")
    return [kind == "local" for kind in pattern]


_RULES = {
    "all": _all,
    "every": _every,
    "after": _after,
    "odd_before": _odd_before,
    "no_rope": _no_rope,
    "rope": _rope,
    "types": _types,
}
