"""``headwise look A --against B``: compare two looks; all inputs are checked before the first is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import typer

from . import errors
from .options.models import quiet
from .options.texts import check_named

MAX_PLAN = 16_000_000


PLAN = "heads-plan.json"


def read_plan(kept: str | None, against: str | None) -> Any:
    """Return the heads plan of ``--kept``, or that of ``headwise prune`` in the other model's folder, or None."""
    check_named("--kept", kept)
    if kept is None and against is not None and os.path.isfile(os.path.join(against, PLAN)):
        kept = os.path.join(against, PLAN)
    if kept is None:
        return None
    if against is None:
        raise typer.BadParameter("--kept says which heads the other model kept; give it with --against")
    try:
        with open(kept, "rb") as file:
            return json.loads(file.read(MAX_PLAN))
    except OSError as error:
        raise typer.BadParameter(f"--kept {kept}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise typer.BadParameter(f'--kept {kept}: not JSON; write {{"layers": {{"0": {{"keep": [0, 1]}}}}}}') from None


def check_measured(model: str | None, against: str | None, options: Mapping[str, object]) -> None:
    """Raise BadParameter if only looks from .json files are shown and an option says what to measure."""
    named = [f"--{name}" for name, value in options.items() if value not in (None, False)]
    if named and model is not None and _is_look(model) and (against is None or _is_look(against)):
        raise typer.BadParameter(
            f"{named[0]} is for a model, and {model} is a finished look; omit the option, or name the model"
        )


def _is_look(name: str) -> bool:
    return name.lower().endswith(".json")


class LookPair(NamedTuple):
    """Two looks to compare, and the heads plan that pairs their heads, or None."""

    before: Any
    after: Any
    kept: Any

    @property
    def changes(self) -> Any:
        """The comparison, a `headwise.look.Comparison`."""
        from headwise.look import compare

        return compare(self.before, self.after, kept=self.kept)


def side_by_side(
    model: str | None, against: str | None, look_at: Callable[[str | None], Any], *, any_input: bool, kept: Any
) -> Any:
    """Return the look at a model, or the pair of looks at it and another; both names are checked before measuring."""
    looks = errors.together(lambda: _recorded(model, against=against, any_input=any_input))
    result = looks[0] or look_at(model)
    if against is None:
        return result
    return LookPair(result, looks[1] or look_at(against), kept)


def _recorded(model: str | None, *, against: str | None, any_input: bool) -> list[Any]:
    """Return for both names the look from a .json file, or None for a model.

    With two names, each model is checked to exist now, because the second is read long after the first.
    """
    looks: list[Any] = []
    for name in (model, against):
        if name is not None and _is_look(name):
            from headwise.look import read

            looks.append(read(name))
            continue
        looks.append(None)
        if name is not None and against is not None:
            quiet("headwise look")
            from headwise.hf.loading.model import checked

            checked(name, any_input=any_input)
    return looks
