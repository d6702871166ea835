"""What was done to a checkpoint, in words: RESHAPE.md, the note in README.md, and the same as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..plan.units import show, show_bytes
from .source import Source

README, RESHAPE = "README.md", "RESHAPE.md"
ZEROED = (
    "Heads of this model were zeroed, not taken out: it is as large and as slow as the original, and its outputs are those "
    "of the original with these heads switched off."
)


def readme(title: str, *notes: str) -> bytes:
    """The folder's README."""
    return f"# {title}\n\n{' '.join(notes)}\n\n{RESHAPE} has the details.\n".encode()


def markdown(facts: Mapping[str, Any], source: Source) -> bytes:
    """RESHAPE.md of the facts."""
    lines = [f"# {facts['done']}", "", *(_paragraph(text) for text in facts["notes"]), *_heads(facts), *_sizes(facts)]
    lines += _proof(facts.get("proof"))
    dropped = getattr(source, "dropped", ())
    if dropped:
        lines += [_paragraph(f"Keys of config.json that were left out: {', '.join(f'`{key}`' for key in dropped)}.")]
    lines += ["", "Files and checksums, of the original too: the manifest beside this file."]
    return ("\n".join(lines).rstrip() + "\n").encode()


def _paragraph(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}\n"


def _heads(facts: Mapping[str, Any]) -> list[str]:
    if not facts.get("gone"):
        return ["No head was changed.\n"]
    rows = [f"| {layer} | {', '.join(map(str, heads))} |" for layer, heads in facts["gone"].items()]
    return [f"| layer | heads that {facts['verb']} |", "|---|---|", *rows, ""]


def _sizes(facts: Mapping[str, Any]) -> list[str]:
    before, after = facts["weight_bytes"]
    lines = [f"| | before | after |", "|---|---|---|", f"| model_type | {facts['model_type'][0]} | {facts['model_type'][1]} |"]
    lines += [f"| {field} | {one} | {other} |" for field, (one, other) in facts["counts"].items()]
    lines += [f"| weights | {show_bytes(before)} | {show_bytes(after)} |"]
    for name, what in (("parameters", "parameters as planned"), ("cache_bytes", "cache as planned, float32")):
        plans = facts["plan"]
        if all(plan is not None and plan[name] for plan in plans):
            shown = [show(plan[name]) if name == "parameters" else show_bytes(plan[name]) for plan in plans]
            context = f" at {facts['context']} tokens" if name == "cache_bytes" else ""
            lines += [f"| {what}{context} | {shown[0]} | {shown[1]} |"]
    return [*lines, ""]


def _proof(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return ["Not verified: the result was not loaded.\n"]
    lines = [
        f"Loaded by transformers {told['transformers']} as {told['class']} in a fresh process: no tensor missing, none left "
        "over.",
    ]
    if "difference" in told:
        same = "bit for bit" if told["identical"] else f"up to {told['difference']:.2g}"
        lines += [
            f"Its outputs on {told['tokens']} tokens (float32, the largest {told['largest']:.3g}) are those of the original "
            f"with these heads switched off, {same}."
        ]
    lines += ["", "| | before | after |", "|---|---|---|", *_pair("parameters", told["parameters"], "{:,}".format)]
    lines += _pair(f"cache of {told['tokens']} tokens, float32", told["cache_bytes"], show_bytes)
    lines += _pair("loss a token", told["loss"], "{:.4f}".format)
    lines += _pair("perplexity", [x if x is None else math.exp(min(x, 700.0)) for x in told["loss"]], "{:.4g}".format)
    seconds = told.get("seconds", {})
    lines += _pair(f"milliseconds to read {seconds.get('tokens', '')} tokens", seconds.get("read"), _milliseconds)
    lines += _pair("milliseconds for each token written", seconds.get("write"), _milliseconds)
    return [*lines, ""]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def _pair(what: str, pair: Sequence[Any] | None, text: Any) -> list[str]:
    """A row of a table, where there is anything to tell."""
    if pair is None or pair[1] is None:
        return []
    return [f"| {what} | {'' if pair[0] is None else text(pair[0])} | {text(pair[1])} |"]
