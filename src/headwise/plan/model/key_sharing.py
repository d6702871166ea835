"""The layers that read the keys and values of an earlier layer instead of making their own."""

from __future__ import annotations

from ..config.fields import Fields
from ..config.windows import windows_of


def owners_of_keys(fields: Fields, layers: int) -> list[int | None]:
    """Return for each layer the index of the layer whose keys and values it reads; None if it makes its own.

    The last layers read those of the last layer before them that has the same kind of window.

    Raises:
        ValueError: more such layers than layers, or one without an earlier layer of its kind.
    """
    name = fields.architecture.get("last_without_keys")
    count = fields.optional(name, least=0) if name else 0
    if not count:
        return [None] * layers
    if count >= layers:
        raise ValueError(f"{name} = {count} leaves none of {layers} layers that makes keys and values")
    kinds = [window is None for window in windows_of(fields, layers)]
    first = layers - count
    before = {kind: i for i, kind in enumerate(kinds[:first])}
    for kind in kinds[first:]:
        if kind not in before:
            raise ValueError(f"{name} = {count}: no earlier layer has the keys that the last layers read")
    return [None] * first + [before[kind] for kind in kinds[first:]]
