"""Docstrings as the pages want them: sessions set apart as code, `:meth:` and the like as plain code."""

import re
from typing import Any

import griffe

SESSION = re.compile(r"^(?P<indent> *)>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)
ROLE = re.compile(r":(?:py:)?(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and "```" not in obj.docstring.value:
            obj.docstring.value = ROLE.sub(r"`\1`", SESSION.sub(fenced, obj.docstring.value))


def fenced(session: re.Match[str]) -> str:
    """The session between fences, as far in as it stands."""
    return f"{session['indent']}```pycon\n{session[0].rstrip()}\n{session['indent']}```"
