"""Draws the pictures of docs/masks.md, docs/module.md and docs/huggingface.md: `python scripts/part_pictures.py`.

`picked.svg` has the keys that each query of the packaged model picks, and the mass that they hold; `qk-clip.svg` the
largest logits of a layer in training, with and without clipping; `gate.svg` what a layer writes where it is to
write nothing, with and without a learned gate; `hybrid.svg` what the cache of a hybrid model holds, from its config.
"""

from __future__ import annotations

from typing import Any

import torch
from cache_pictures import BLUE, GREY, IMAGES, INK, ORANGE, TOKENS, probed, svg_of
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

import headwise
from headwise import MultiHeadAttention, plan
from headwise.nn import GatedMultiHeadAttention, MaxLogitAttention, headwise_gate

CHOSEN = 8
MODEL = "qwen3.6-27b"


def picked_figure(calls: list[Any]) -> Figure:
    """Draw which keys the queries of one head pick, and how much of each head's weights the best n keys hold."""
    weights = torch.cat([headwise.weights(call.query, call.key, **call.scoring)[0] for call in calls])
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    picture, curves = figure.subplots(1, 2, width_ratios=(2, 3))
    shares = weights[:, -64:].sort(-1, descending=True).values.cumsum(-1).mean(1)  # (heads, n): of the last queries
    head = int(shares[:, CHOSEN - 1].argsort()[len(shares) // 2])
    one = weights[head]
    best = one.topk(CHOSEN, dim=-1)
    seen = torch.zeros_like(one, dtype=torch.bool).scatter(-1, best.indices, best.values > 0)
    allowed = torch.ones_like(seen).tril()
    picture.imshow((allowed.int() + seen.int()).numpy(), cmap=_colours(), vmin=0, vmax=2, interpolation="nearest")
    picture.set_xlabel("key")
    picture.set_ylabel("query")
    picture.set_title(f"{CHOSEN} keys a query", fontsize=10)
    numbers = torch.arange(1, shares.shape[1] + 1)
    for share in shares:
        curves.plot(numbers.tolist(), share.tolist(), color=GREY, linewidth=0.8)
    curves.plot(numbers.tolist(), shares.median(0).values.tolist(), color=BLUE, linewidth=2, label="median head")
    curves.axvline(CHOSEN, color=ORANGE, linewidth=1, linestyle="--")
    curves.set_xscale("log", base=2)
    curves.set_ylim(0, 1)
    curves.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    curves.set_xlabel("best keys")
    curves.set_title("share of the weights on them, each head", fontsize=10)
    curves.legend(frameon=False, fontsize=8, loc="lower right")
    low, middle = float(shares[:, CHOSEN - 1].min()), float(shares[:, CHOSEN - 1].median())
    print(f"picked: the best {CHOSEN} of {TOKENS} keys hold {middle:.1%} in the median head, {low:.1%} in the least")
    return figure


def _colours() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(["#ffffff", "#e6e6e6", BLUE])


def clip_figure() -> Figure:
    """Draw the largest logit of each head of a layer in training, with QK-clip and without."""
    threshold, steps = 10.0, 300
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, clipped in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        rows, losses = trained(threshold if clipped else None, steps)
        for head in rows.mT:
            axes.plot(range(steps), head.tolist(), color=BLUE, linewidth=1)
        axes.axhline(threshold, color=ORANGE, linewidth=1, linestyle="--")
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_title("with QK-clip" if clipped else "without", fontsize=10)
        print(f"qk-clip: {clipped}, largest logit {rows[-1].max():.1f}, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    figure.axes[0].set_ylabel("largest logit of a head")
    return figure


def trained(threshold: float | None, steps: int) -> tuple[Tensor, list[float]]:
    """Return the largest logits (steps, H) of a layer that learns `questions`, and its losses.

    After each step, heads above the threshold have their queries and keys scaled down, as in docs/module.md.
    """
    torch.manual_seed(0)
    layer = MultiHeadAttention(18, 4, head_dim=16, inner=MaxLogitAttention())
    optimizer, source = torch.optim.Adam(layer.parameters(), lr=3e-2), torch.Generator().manual_seed(1)
    rows, losses = [], []
    for _ in range(steps):
        x, target, _ = questions(32, source)
        loss = (layer(x, mask=headwise.causal()) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        logits = layer.inner.max_logits
        rows.append(logits.clone())
        losses.append(loss.item())
        optimizer.step()
        if threshold is not None:
            with torch.no_grad():
                factor = (threshold / logits.clamp(min=threshold)).sqrt()
                for proj in (layer.q_proj, layer.k_proj):
                    proj.weight.unflatten(0, (4, -1)).mul_(factor[:, None, None])
    return torch.stack(rows), losses


def gate_figure() -> Figure:
    """Draw the error of tokens with and without something to write, without and with a gate, and the gate itself."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    errors, gates = figure.subplots(1, 2)
    kinds = ("nothing to write", "an answer to write")
    x, target, asks = questions(256, torch.Generator().manual_seed(9))
    for place, name in ((-0.2, "without a gate"), (0.2, "with a gate")):
        layer = answering(name == "with a gate")
        with torch.no_grad():
            off = (layer(x, mask=headwise.causal()) - target).square().mean(-1)
        rms = [off[asks == kind].mean().sqrt().item() for kind in (False, True)]
        errors.bar([place, 1 + place], rms, 0.38, color=BLUE if place > 0 else GREY, label=name)
        print(f"gate: {name}, error {rms[0]:.3f} and {rms[1]:.3f}", end="")
        if isinstance(layer, GatedMultiHeadAttention):
            with torch.no_grad():
                gate = layer.gate(x).amax(1)
            values = [gate[asks == kind].mean().item() for kind in (False, True)]
            gates.bar([0, 1], values, 0.5, color=BLUE)
            print(f", gate {values[0]:.2f} and {values[1]:.2f}", end="")
        print()
    for axes, title in ((errors, "error of the output (root mean square)"), (gates, "gate of the more open head")):
        axes.set_xticks([0, 1], kinds)
        axes.set_title(title, fontsize=10)
    gates.set_ylim(0, 1)
    errors.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def questions(rows: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (rows, T, M), what is to be written, and which tokens ask.

    Each text has one token that answers, its first. A token that asks is to write the words of it, and all others are
    to write nothing. No token is empty, so that no weight is without an effect.
    """
    T, W = 32, 16
    words = torch.randn(rows, T, W, generator=source)
    asks, answers = torch.rand(rows, T, generator=source) < 0.25, torch.zeros(rows, T, dtype=torch.bool)
    answers[:, 0], asks[:, 0] = True, False
    x = torch.cat([words, 2.0 * asks[..., None].float(), 2.0 * answers[..., None].float()], -1)
    target = torch.zeros_like(x)
    target[..., :W] = words[:, :1] * asks[..., None]
    return x, target, asks


def answering(gated: bool) -> MultiHeadAttention:
    """Return a layer that learned to answer."""
    torch.manual_seed(0)
    kind, more = (GatedMultiHeadAttention, {"gate": headwise_gate}) if gated else (MultiHeadAttention, {})
    layer = kind(18, 2, head_dim=16, **more)
    optimizer, source = torch.optim.Adam(layer.parameters(), lr=1e-2), torch.Generator().manual_seed(1)
    for _ in range(400):
        x, target, _ = questions(32, source)
        loss = (layer(x, mask=headwise.causal()) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return layer


def hybrid_figure() -> Figure:
    """Draw the bytes that a hybrid model keeps by length: keys and values of its layers that attend, and its states."""
    contexts = [2**n for n in range(10, 19)]
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    found, small = (plan.of(MODEL, context=tuple(contexts), **how) for how in ({}, {"kv_dtype": "int8"}))
    attend, layers = len(found.model.layers), plan.cards()[MODEL]["config"]["num_hidden_layers"]
    held = [cost.cache_bytes for cost in found.contexts]
    lines = {
        f"if all {layers} layers attended": ([n * layers // attend for n in held], GREY, "--"),
        f"keys and values of the {attend} layers that attend": (held, BLUE, "-"),
        "the same in 8 bits": ([cost.cache_bytes for cost in small.contexts], BLUE, ":"),
        f"states of the other {layers - attend}": ([cost.state_bytes for cost in found.contexts], ORANGE, "-"),
    }
    for label, (numbers, colour, style) in lines.items():
        axes.plot(contexts, [n / 2**30 for n in numbers], color=colour, linestyle=style, label=label)
        print(f"hybrid: {label}: {numbers[-1] / 2**30:.3g} GiB at {contexts[-1]:,} tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens")
    axes.set_ylabel("GiB")
    axes.legend(frameon=False, fontsize=8)
    axes.tick_params(colors=INK)
    return figure


def main() -> None:
    figures = {
        "picked": picked_figure(probed()),
        "qk-clip": clip_figure(),
        "gate": gate_figure(),
        "hybrid": hybrid_figure(),
    }
    for name, figure in figures.items():
        (IMAGES / f"{name}.svg").write_text(svg_of(figure))


if __name__ == "__main__":
    main()
