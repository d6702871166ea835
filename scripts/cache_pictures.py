"""Draws the pictures of docs/int8.md and docs/caches.md from the packaged model: `python scripts/cache_pictures.py`.

`rotation.svg` has one key before and after its rotation, and the error of all keys with and without one. `dropping.svg`
has the mass that the keys of one head received, and which of them it keeps.
"""

from __future__ import annotations

import inspect
import io
import statistics as numbers
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

import headwise
import headwise.hf
from headwise import models
from headwise.ops.storage.packed import rotated

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
TOKENS, KEPT, NEWEST = 128, 32, 8
BLUE, ORANGE, GREY, INK = "#2f6db5", "#d9722b", "#c9c9c9", "#444444"


def probed() -> list[Any]:
    """Return the attention calls of the packaged model on a text of the standard library."""
    tiny = headwise.hf.load(models.tiny_path())
    ids = torch.tensor([tiny.tokenizer(inspect.getsource(numbers)).input_ids[:TOKENS]])
    tiny.model.set_attn_implementation("headwise")
    with torch.no_grad(), headwise.nn.probe(tiny.model) as seen:
        tiny.model(ids)
    return list(seen.calls)


def peak(x: Tensor) -> Tensor:
    """Return the largest magnitude of a token over the root mean square of its numbers."""
    return x.abs().amax(-1) / x.square().mean(-1).sqrt()


def plainly_coded(x: Tensor, bits: int) -> Tensor:
    """Return tokens as they come back from codes of so many bits, with one scale each and without a rotation."""
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / most
    return (x / scale).round().clamp(-most, most) * scale


def rotation_figure(calls: list[Any]) -> Figure:
    """Draw the key whose largest channel stands out most, before and after its rotation, and the errors of all keys."""
    keys = torch.cat([call.key.flatten(0, 2) for call in calls])
    key = keys[peak(keys).argmax()]
    unit = key.square().mean().sqrt()
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    before, after, errors = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for axes, x, title in ((before, key, "a key"), (after, rotated(key), "the same key, rotated")):
        axes.bar(range(len(x)), (x / unit).tolist(), color=BLUE, width=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("channel")
        axes.set_ylim(*(1.1 * float((key / unit).abs().max()) * side for side in (-1, 1)))
    before.set_ylabel("number / root mean square")
    size = keys.square().mean().sqrt()
    bits = (8, 4, 3)
    plain = [float((plainly_coded(keys, b) - keys).square().mean().sqrt() / size) for b in bits]
    coded = [headwise.cache.quantize(keys[None, None], b).dequantize()[0, 0] for b in bits[1:]]
    turned = [float((x - keys).square().mean().sqrt() / size) for x in coded]
    places = torch.arange(3).float()
    errors.bar((places - 0.2).tolist(), plain, 0.38, color=GREY, label="as they are")
    errors.bar((places[1:] + 0.2).tolist(), turned, 0.38, color=BLUE, label="rotated")
    errors.set_xticks(range(3), [f"{b} bits" for b in bits])
    errors.set_title("error of all keys", fontsize=10)
    errors.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    errors.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def dropping_figure(calls: list[Any]) -> Figure:
    """Draw the mass received by the keys of the last layer's first key-value head, and which of them it keeps."""
    call = calls[-1]
    received = headwise.statistics(call.query, call.key, **call.scoring).received
    mass = received.unflatten(1, (call.key.shape[1], -1)).mean(2)[0, 0]
    score = mass.clone()
    score[-NEWEST:] = torch.inf
    kept = set(score.topk(KEPT).indices.tolist())
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    colours = [GREY if n not in kept else ORANGE if n >= TOKENS - NEWEST else BLUE for n in range(TOKENS)]
    axes.bar(range(TOKENS), mass.tolist(), color=colours, width=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("position of the key")
    axes.set_ylabel("mass received")
    for colour, label in ((BLUE, "kept: most mass"), (ORANGE, f"kept: the newest {NEWEST}"), (GREY, "dropped")):
        axes.bar([0], [0], color=colour, label=label)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    return figure


def svg_of(figure: Figure) -> str:
    """Return a figure as SVG, the same for the same numbers."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def main() -> None:
    calls = probed()
    for name, figure in (("rotation", rotation_figure(calls)), ("dropping", dropping_figure(calls))):
        (IMAGES / f"{name}.svg").write_text(svg_of(figure))


if __name__ == "__main__":
    main()
