"""The page of the effects of heads on an answer: a heatmap by head (and position), the texts, and the metric."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .escape import cut
from .page import joined, written

if TYPE_CHECKING:
    from headwise.look import Attribution, Patching

MOST_EFFECTS = 60_000
"""The most effects by position in the page: those of the heads with the largest effects."""

MOST_TOKENS = 3000
"""The most tokens of a text in the page."""


def render_effects(result: Patching | Attribution) -> str:
    """Return the page of a patching or an attribution as one HTML text, under the content security policy of a report.

    Raises:
        TypeError: not the result of :func:`headwise.look.patch` or :func:`headwise.look.attribute`.
    """
    from headwise.look import Attribution, Patching  # not at the top: the tour is made without torch

    if isinstance(result, Patching):
        data = _of_patching(result)
    elif isinstance(result, Attribution):
        data = _of_attribution(result)
    else:
        raise TypeError(
            "a page of effects is made of what headwise.look.patch or headwise.look.attribute returns; got "
            f"{type(result).__name__}"
        )
    return joined(
        "effects/effects.html.j2",
        title=result.model,
        data=data,
        scripts=["shared/dom.js", "shared/acting.js", "shared/matrix.js", "effects/effects.js"],
        styles=["shared/tokens.css", "shared/matrix.css", "effects/effects.css"],
    )


def write_effects(result: Patching | Attribution, path: str | os.PathLike[str]) -> int:
    """Write the page of a patching or an attribution; the file is written atomically.

    Returns:
        The number of bytes written.

    Raises:
        TypeError: not the result of :func:`headwise.look.patch` or :func:`headwise.look.attribute`.
        OSError: as for :func:`headwise.report.write`.

    >>> import pathlib, tempfile
    >>> import headwise.report
    >>> from headwise.look import HeadPatch, Patching
    >>> found = Patching("none", "logit of 'x' minus 'y'", 2.0, 1.0, ("a",), ("b",), (HeadPatch(0, 0, None, 0.5),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "patch.html")
    ...     headwise.report.write_effects(found, path) == path.stat().st_size
    True
    """
    return written(path, lambda: render_effects(result))


def _of_patching(found: Patching) -> dict[str, Any]:
    """Return the data of a patching. If positions were patched, a head's effect is the largest of its positions."""
    from .numbers import rounded

    effects: dict[tuple[int, int], list[float]] = {}
    for one in found.heads:
        effects.setdefault((one.layer, one.head), []).append(one.effect)
    largest = {place: max(row, key=abs) for place, row in effects.items()}
    legend = "Orange restores the answer, blue works against it."
    positions: list[list[Any]] = []
    if found.by_position:
        legend += " The number of a head is its effect at the position where it is largest."
        kept = sorted(range(len(effects)), key=lambda n: -abs([*largest.values()][n]))
        rows = [*effects.values()]
        positions = [[n, [rounded(effect) for effect in rows[n]]] for n in kept[: MOST_EFFECTS // len(rows[0])]]
    return {
        "title": "Which heads carry the answer",
        "model": cut(found.model, 300),
        "metric": cut(f"The metric is the {found.metric}: {found.clean:.3f} on the clean text, {found.corrupted:.3f} "
                      "on the corrupted one."),
        "texts": [_text("clean text", found.clean_tokens), _text("corrupted text", found.corrupted_tokens)],
        "sentences": [
            "The model reads the corrupted text, and one head's output is replaced by its output on the clean text. "
            "The effect is the share of the metric's difference that this restores: 0 is as corrupted, 1 is as clean, "
            "and a negative effect is of a head that works against the answer."
        ],
        "legend": legend,
        **_heads(largest),
        "positions": positions,
    }  # fmt: skip


def _of_attribution(found: Attribution) -> dict[str, Any]:
    heads = sum(one.effect or 0.0 for one in found.heads)
    sentences = [
        f"The effect of a head is what it adds directly to the logit of {found.answer!r} minus that of "
        f"{found.wrong!r} after the last token of the text; what later layers make of its output is not in it.",
        f"All heads together add {heads:+.3f}, everything else {found.rest:+.3f}, in all {found.difference:+.3f}.",
    ]
    if any(one.effect is None for one in found.heads):
        sentences.append(
            "A head with a dash reaches the logits through a later norm only and has no effect of its own."
        )
    return {
        "title": "Which heads write the answer",
        "model": cut(found.model, 300),
        "metric": cut(f"The logit of {found.answer!r} minus that of {found.wrong!r} is {found.difference:+.3f}."),
        "texts": [_text("text", found.tokens)],
        "sentences": sentences,
        "legend": f"Orange adds to {found.answer!r}, blue to {found.wrong!r}.",
        **_heads({(one.layer, one.head): one.effect for one in found.heads}),
        "positions": [],
    }


def _heads(effects: dict[tuple[int, int], float | None] | dict[tuple[int, int], float]) -> dict[str, Any]:
    """Return the heads with their effects, and the number of heads of the widest layer."""
    from .numbers import rounded

    heads = [[*place, rounded(effect)] for place, effect in effects.items()]
    return {"heads": heads, "width": 1 + max(head for _, head in effects)}


def _text(label: str, tokens: tuple[str, ...]) -> dict[str, Any]:
    return {"label": label, "tokens": [cut(token, 60) for token in tokens[:MOST_TOKENS]]}
