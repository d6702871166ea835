"""Text about what was done to a checkpoint: RESHAPE.md, the note in README.md, and rows for a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...plan.model.heads_by_layer import CLASS_PREFIX, HOW
from ...plan.units import figures, show, show_bytes
from ..layout.protocol import CheckpointSource, ReshapableCheckpoint
from .verify import Proof, require

README, RESHAPE, PLAN = "README.md", "RESHAPE.md", "heads-plan.json"
ZEROED = (
    "Heads of this model were zeroed, not removed: it is as large and as slow as the original, and its outputs are "
    "those of the original with these heads switched off."
)
BY_LAYER = (
    "Each layer of this model has its own number of heads (heads_by_layer in config.json), which no class of "
    f"transformers takes. headwise registers classes that do, with the Auto classes of transformers: {HOW}."
)
Row = tuple[str, str, str]


def readme(title: str, *notes: str) -> bytes:
    """Return the README.md of the folder."""
    return f"# {title}\n\n{' '.join(notes)}\n\n{RESHAPE} has the details.\n".encode()


def proved(
    facts: dict[str, Any],
    source: ReshapableCheckpoint,
    proof: Proof | None,
    gates: list[list[int]] | None = None,
    *,
    same: bool = False,
    remark: Callable[[Path], str] | None = None,
) -> Callable[[Path], dict[str, bytes]]:
    """Return the `check` for `write`: it proves the finished folder, adds the proof to `facts`, and makes RESHAPE.md.

    With `proof` None there is no proof; `gates` and `same` are those of `Proof.request`. `remark` returns text for the
    end of RESHAPE.md.
    """

    def check(folder: Path) -> dict[str, bytes]:
        if proof is not None:
            answer = source.prove(folder, proof.request(gates, same=same))
            require(answer)
            facts["proof"] = answer
        return {RESHAPE: markdown(facts, source, "" if remark is None else remark(folder))}

    return check


def markdown(facts: Mapping[str, Any], source: CheckpointSource, further: str = "") -> bytes:
    """Return RESHAPE.md for these facts; `further` is Markdown for its end."""
    paragraphs = [f"# {facts['done']}", *(_sentence(note) for note in facts["notes"])]
    if facts["gone"]:
        heads = [(layer, ", ".join(map(str, heads))) for layer, heads in facts["gone"].items()]
        paragraphs.append(_table(("layer", f"heads {facts['change']}"), heads))
    paragraphs += [_table(head, body) for head, body in facts.get("tables", ())]
    paragraphs += [_table(("", "before", "after"), rows(facts)), " ".join(_proof(facts.get("proof")))]
    dropped = getattr(source, "dropped", ())
    if dropped:
        names = ", ".join(f"`{key}`" for key in dropped)
        paragraphs.append(f"Keys of config.json that its class does not know were left out: {names}.")
    paragraphs.append("The manifest beside this file has the checksum of every file, the original's too.")
    paragraphs += [further] if further else []
    return ("\n\n".join(paragraphs) + "\n").encode()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rows(facts: Mapping[str, Any]) -> list[Row]:
    """Return rows (name, before, after) of sizes and measurements."""
    return [*_sizes(facts), *_measured(facts.get("proof") or {})]


def _sizes(facts: Mapping[str, Any]) -> Iterator[Row]:
    before, after = facts["model_type"]
    yield "model_type", before, after
    for field, (one, other) in facts["counts"].items():
        yield field, str(one), str(other)
    yield from _pair("weights", facts["weight_bytes"], show_bytes)
    losses = facts.get("losses") or {}
    if "recovered" in losses:
        what = f"loss on {losses['tokens']} tokens that nothing was fitted to (nats/token)"
        changed = losses["pruned"] if "pruned" in losses else losses["regrouped"]
        yield f"{what}: before recovery", f"{losses['original']:.4f}", f"{changed:.4f}"
        yield f"{what}: recovered", f"{losses['original']:.4f}", f"{losses['recovered']:.4f}"
    plans = [plan or {} for plan in facts["plan"]]
    yield from _pair("parameters, planned", [plan.get("parameters") for plan in plans], show)
    caches = [plan.get("cache_bytes") or None for plan in plans]
    yield from _pair(f"cache of {facts['context']} tokens in float32, planned", caches, show_bytes)


def _measured(proof: Mapping[str, Any]) -> Iterator[Row]:
    loss, seconds = proof.get("loss"), proof.get("seconds") or {}
    yield from _pair("parameters", proof.get("parameters"), "{:,}".format)
    yield from _pair(f"cache of {proof.get('tokens')} tokens in float32", proof.get("cache_bytes"), show_bytes)
    yield from _pair("loss (nats/token)", loss, "{:.4f}".format)
    yield from _pair("perplexity", loss and [x and math.exp(min(x, 700.0)) for x in loss], "{:.4g}".format)
    what = f"{seconds['tokens']} tokens" if "tokens" in seconds else "1 input"
    yield from _pair(f"prefill, {what} (ms)", seconds.get("read"), _milliseconds)
    yield from _pair("decode, 1 token (ms)", seconds.get("write"), _milliseconds)


def _proof(proof: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the results of the proof, in sentences."""
    if proof is None:
        yield "Not verified: nobody loaded the result."
        return
    ours = ", which headwise.hf registers," if proof["class"].startswith(CLASS_PREFIX) else ""
    yield (
        f"Verified: transformers {proof['transformers']} loads it as {proof['class']}{ours} in a fresh process, with "
        "no tensor missing and none left over."
    )
    if "difference" in proof:
        same = "bit for bit" if proof["identical"] else f"the largest difference being {proof['difference']:.2g}"
        what = f"{proof['tokens']} tokens" if proof.get("tokens") else "a random input"
        yield (
            f"Its outputs on {what} (float32, up to {proof['largest']:.3g}) are those of the original with these heads "
            f"switched off, {same}."
        )


def _milliseconds(seconds: float) -> str:
    return figures(1000 * seconds)


def _pair(what: str, pair: Sequence[Any] | None, text: Callable[[Any], str]) -> Iterator[Row]:
    """Yield a row, if there is a value after the change."""
    if pair is not None and pair[1] is not None:
        yield what, "" if pair[0] is None else text(pair[0]), text(pair[1])
