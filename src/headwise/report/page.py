"""The page: template, script and style joined under a content security policy."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from headwise.extras import missing_extra
from headwise.files.text import visible

from .escape import json_for_html
from .policy import hash_of as _hash

if TYPE_CHECKING:
    from headwise.look.result import Look

_SHARED = ("dom", "acting", "colour")
"""Scripts that the tour also uses; they come first."""

_SCRIPTS = tuple(
    f"{name}.js"
    for name in (
        *(
            "data",
            "text",
            "panels/heat",
            "panels/vectors",
            "panels/overview",
            "filter",
            "panels/chart",
            "panels/map",
            "panels/arcs",
            "sum",
            "panels/evidence",
            "panels/picture",
        ),
        *("panels/tokens", "panels/table", "keys", "main"),
    )
)
"""Scripts in order: each uses only earlier ones."""


def render(look: Look) -> str:
    """Return the report as one HTML text: data and code, without external addresses.

    The same look gives the same text. Strings of the look enter at two places only: as escaped JSON (see
    :func:`headwise.report.escape.json_for_html`), and as the page's title, autoescaped with control characters visible.
    """
    check_engine()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from headwise.look.result import Look

    from .pack import page_data

    if not isinstance(look, Look):
        raise TypeError(f"a report is made of a headwise.look.Look; got {type(look).__name__}")

    library = _read("vendor", "d3.min.js")
    script = (
        "(() => {\n"
        + "\n".join([*map(_shared, _SHARED), *(_read("js", *name.split("/")) for name in _SCRIPTS)])
        + "\n})();\n"
    )
    style = _read("shared", "tokens.css") + _read("report.css")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    environment = Environment(
        loader=PackageLoader("headwise.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("template.html.j2").render(
        title=visible(look.model, limit=100),
        policy=policy,
        data=Markup(json_for_html(page_data(look))),
        library=Markup(library),
        script=Markup(script),
        style=Markup(style),
    )


def check_engine() -> None:
    """Raise `headwise.extras.MissingExtra` if the template engine is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise missing_extra("a report", "look", error) from None


def _shared(name: str) -> str:
    return _read("shared", f"{name}.js")


def _read(*parts: str) -> str:
    return resources.files(__package__).joinpath(*parts).read_text(encoding="utf-8")
