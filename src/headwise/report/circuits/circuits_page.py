"""The page of a model's circuits: the graph of the heads that read each other, and its numbers as tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..escape import cut
from ..page import joined, written

if TYPE_CHECKING:
    from headwise.look import Circuits

MOST_PAIRS = 50
"""The most pairs of heads of each kind in the page: a graph of more lines cannot be read."""


def render_circuits(found: Circuits) -> str:
    """Return the page of a model's circuits as one HTML text, under the content security policy of a report.

    Raises:
        TypeError: not the result of :func:`headwise.look.circuits`.
    """
    from headwise.look import Circuits  # not at the top: the tour is made without torch

    if not isinstance(found, Circuits):
        raise TypeError(
            f"a page of circuits is made of what headwise.look.circuits returns; got {type(found).__name__}"
        )
    return joined(
        "circuits/circuits.html.j2",
        title=found.model,
        data=_data(found),
        scripts=["shared/dom.js", "shared/acting.js", "circuits/circuits.js"],
        styles=["shared/tokens.css", "shared/matrix.css", "circuits/circuits.css"],
    )


def write_circuits(found: Circuits, path: str | os.PathLike[str]) -> int:
    """Write the page of a model's circuits; the file is written atomically.

    Returns:
        The number of bytes written.

    Raises:
        TypeError: not the result of :func:`headwise.look.circuits`.
        OSError: as for :func:`headwise.report.write`.

    >>> import pathlib, tempfile
    >>> import headwise.report
    >>> from headwise.look import Circuits, Composition
    >>> found = Circuits("none", (Composition("k", (1, 0), (0, 2), 0.3, 0.1),), {"q": 1, "k": 1, "v": 1}, ())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "circuits.html")
    ...     headwise.report.write_circuits(found, path) == path.stat().st_size
    True
    """
    return written(path, lambda: render_circuits(found))


def _data(found: Circuits) -> dict[str, Any]:
    """Return the heads of the strongest pairs with their roles and writes, and the pairs by the heads' numbers."""
    from headwise.look.views import plain_words

    from ..numbers import rounded
    from ..role_catalog import marking

    pairs = found.strongest(MOST_PAIRS)
    places = sorted({place for one in pairs for place in (one.reader, one.writer)})
    names = {place: found.roles.get("{}.{}".format(*place)) for place in places}
    roles = list(dict.fromkeys(name for name in names.values() if name is not None))
    writes = {(one.layer, one.head): one for one in found.heads}
    number = {place: n for n, place in enumerate(places)}
    edges = [
        {
            "kind": one.kind,
            "reader": number[one.reader],
            "writer": number[one.writer],
            "value": rounded(one.value),
            "times": rounded(one.value / one.null),
        }
        for one in pairs
    ]
    counts = [sum(one.kind == kind for one in pairs) for kind in found.pairs]
    return {
        "model": cut(found.model, 300),
        "heads": [
            {
                "layer": place[0],
                "head": place[1],
                "role": None if (name := names[place]) is None else roles.index(name),
                "writes": [
                    rounded(getattr(writes.get(place), name, None))
                    for name in ("norm", "share", "logit", "copying", "suppressing")
                ],
            }
            for place in places
        ],
        "width": 1 + max([head for _, head in (*places, *writes)], default=0),
        "roles": [{**marking(name), "plain": plain_words.sentence(name)} for name in roles],
        "edges": edges,
        "most": max(counts, default=0),
        "pairs": sum(found.pairs.values()),
        "null": rounded(pairs[0].null) if pairs else None,
    }
