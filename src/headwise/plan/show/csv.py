"""Plans as one table of numbers, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv as writing
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .chart import check_plans

if TYPE_CHECKING:
    from ..costs.plan_data import PlanData

LISTS = {"notes", "card", "layers", "states", "towers", "contexts", "planned", "floors"}
"""The entries of a plan's `to_dict` that are not a number or a name; only JSON contains them."""


def csv(plans: Sequence[PlanData]) -> str:
    """Return the numbers of plans as CSV, one line per plan and context, followed by the lines of its heads plan.

    Columns are named as in `to_dict`, the outer name before the inner one. A value that a plan lacks is empty; one that
    all plans lack, such as the packing of the weights, has no column.

    Raises:
        TypeError: not a list of plans.
        ValueError: an empty list.

    Example:
        >>> from headwise.plan import of
        >>> head, line = csv([of("gpt-3", context=2048)]).splitlines()
        >>> dict(zip(head.split(","), line.split(",")))["cache_bytes"]
        '9663676416'
    """
    check_plans(plans)
    return csv_of([row for plan in plans for row in rows(plan)])


def csv_of(table: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the columns of all rows in order of appearance; missing values are empty.

    Example:
        >>> csv_of([{"name": "a", "bytes": 3}, {"name": "b", "batch": 2}]).splitlines()
        ['name,bytes,batch', 'a,3,', 'b,,2']
    """
    file = io.StringIO(newline="")
    writer = writing.DictWriter(file, list(dict.fromkeys(name for row in table for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return file.getvalue()


def rows(plan: PlanData, *, planned: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row for each context, then those after the heads plan."""
    whole = plan.to_dict()
    for cost in plan.contexts:
        yield {"name": plan.name, "heads_plan": planned, **dict(_flat({**whole, **cost.to_dict()}))}
    if plan.planned is not None:
        yield from rows(plan.planned, planned=True)


def _flat(values: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name in LISTS or value is None:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{outer}{name}_")
        else:
            yield outer + name, value
