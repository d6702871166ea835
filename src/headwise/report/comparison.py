"""The page of two looks side by side: both matrices of heads, roles gained and lost, and what changed in each head."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .escape import cut
from .page import joined, written

if TYPE_CHECKING:
    from headwise.look.compare import HeadChange
    from headwise.look.result import Look

MOST_SCORES = 3
"""The most scores of a head in the page: those that changed most."""


def render_comparison(before: Look, after: Look, *, kept: Mapping[Any, Any] | None = None) -> str:
    """Return the page of two looks as one HTML text, under the same content security policy as a report.

    Args:
        before: the first look.
        after: the second look.
        kept: the heads of the first look that the second kept, as for :func:`headwise.look.compare`.

    Raises:
        TypeError, ValueError: as for :func:`headwise.look.compare`.
    """
    from headwise.look.compare import compare  # not at the top: the tour is made without torch
    from headwise.look.views import palette

    from .numbers import rounded
    from .role_catalog import marking

    changes = compare(before, after, kept=kept)
    names = palette.in_order({s.name for look in (before, after) for head in look.heads for s in head.roles})
    counts = {name: [_count(look, name) for look in (before, after)] for name in names}
    index = {name: i for i, name in enumerate(names)}
    data = {
        "sides": [
            {
                "model": cut(look.model),
                "width": look.num_heads,
                "heads": [[h.layer, h.head, [[index[s.name], rounded(s.value)] for s in h.roles]] for h in look.heads],
            }
            for look in (before, after)
        ],
        "roles": [{**marking(name), "counts": counts[name]} for name in names],
        "pairs": [_pair(change, index) for change in changes.heads],
        "summary": [cut(line, 300) for line in changes.summary()],
    }
    return joined(
        "pair/comparison.html.j2",
        title=f"{before.model} and {after.model}",
        data=data,
        scripts=["shared/dom.js", "shared/acting.js", "shared/matrix.js", "pair/comparison.js"],
        styles=["shared/tokens.css", "shared/matrix.css"],
    )


def write_comparison(
    before: Look, after: Look, path: str | os.PathLike[str], *, kept: Mapping[Any, Any] | None = None
) -> int:
    """Write the page of two looks side by side; the file is written atomically.

    Returns:
        The number of bytes written.

    Raises:
        TypeError, ValueError: as for :func:`headwise.look.compare`.
        OSError: as for :func:`headwise.report.write`.

    >>> import pathlib, tempfile
    >>> import headwise.report
    >>> from headwise.look import Look
    >>> look = Look("none", 0, 0, 0, (), (), "decoder", 0.0, "0")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "changes.html")
    ...     headwise.report.write_comparison(look, look, path) == path.stat().st_size
    True
    """
    return written(path, lambda: render_comparison(before, after, kept=kept))


def _count(look: Look, name: str) -> int | None:
    """Return the number of heads that play a role; None if the look did not measure it."""
    return len(look.with_role(name)) if any(name in head.scores for head in look.heads) else None


def _pair(change: HeadChange, index: Mapping[str, int]) -> dict[str, Any]:
    from headwise.look.views import palette

    from .numbers import rounded

    moved = sorted(change.scores.items(), key=lambda one: -abs(one[1][1] - one[1][0]))[:MOST_SCORES]
    return {
        "before": [change.layer, change.head],
        "after": [change.other_layer, change.other_head],
        "gained": [index[name] for name in change.after if name not in change.before],
        "lost": [index[name] for name in change.before if name not in change.after],
        "moved": rounded(change.moved),
        "near": rounded(change.near),
        "scores": [
            [cut(palette.label(name)), rounded(first), rounded(second)]
            for name, (first, second) in moved
            if abs(second - first) >= 0.005
        ],
    }
