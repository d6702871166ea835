"""The page: template, script and style joined under a content security policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from headwise.extras import missing_extra
from headwise.files.atomic_file import check_destination, put
from headwise.files.text import visible

from .escape import json_for_html
from .policy import hash_of as _hash

if TYPE_CHECKING:
    from headwise.look.result import Look

_SHARED = ("dom", "acting", "colour")
"""Scripts that the tour also uses; they come first."""

_SCRIPTS = (
    *("data", "text", "panels/heat", "panels/vectors", "panels/overview", "filter", "panels/chart", "panels/map"),
    *("panels/arcs", "sum", "panels/evidence", "panels/picture", "panels/tokens", "panels/table", "keys", "main"),
)
"""Scripts in order: each uses only earlier ones."""


def write(look: Look, path: str | os.PathLike[str]) -> int:
    """Write the report of a look; the file is written atomically.

    Args:
        look: the result of :func:`headwise.look.at`.
        path: the file to write; an existing file is replaced, a symbolic link is followed.

    Returns:
        The number of bytes written.

    Raises:
        TypeError: not a look, or not a path.
        FileNotFoundError: the folder does not exist.
        PermissionError: the folder is not writable.
        IsADirectoryError: the path is a folder.
        OSError: the path is a device or similar, or the disk is full.

    >>> import pathlib, tempfile
    >>> import headwise.report
    >>> from headwise.look import Look
    >>> look = Look(model="none", num_layers=0, num_heads=0, length=0, tokens=(), heads=(), kind="decoder",
    ...             seconds=0.0, version="0")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "report.html")
    ...     headwise.report.write(look, path) == path.stat().st_size
    True
    """
    return written(path, lambda: render(look))


def written(path: str | os.PathLike[str], rendered: Callable[[], str]) -> int:
    """Write a page atomically and return its number of bytes; the path is checked before the page is rendered."""
    check_destination(path)
    content = rendered().encode()
    put(content, path)
    return len(content)


def render(look: Look) -> str:
    """Return the report as one HTML text: data and code, without external addresses.

    The same look gives the same text. Strings of the look enter at two places only: as escaped JSON (see
    :func:`headwise.report.escape.json_for_html`), and as the page's title, autoescaped with control characters visible.
    """
    check_engine()
    from headwise.look.result import Look

    from .pack import page_data

    if not isinstance(look, Look):
        raise TypeError(f"a report is made of a headwise.look.Look; got {type(look).__name__}")

    return joined(
        "template.html.j2",
        title=look.model,
        data=page_data(look),
        scripts=[*(f"shared/{name}.js" for name in _SHARED), *(f"js/{name}.js" for name in _SCRIPTS)],
        styles=["shared/tokens.css", "report.css"],
        library="vendor/d3.min.js",
    )


def joined(
    template: str, *, title: str, data: object, scripts: Sequence[str], styles: Sequence[str], library: str = ""
) -> str:
    """Return one HTML text from a template, its data, and files of this package, under a content security policy.

    Args:
        template: the name of the template.
        title: untrusted; control characters are made visible.
        data: JSON, untrusted.
        scripts: files that make one script, in order.
        styles: files that make one style, in order.
        library: a file that makes a script of its own, before the other.
    """
    check_engine()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    vendored = _read(library) if library else ""
    script = "(() => {\n" + "\n".join(map(_read, scripts)) + "\n})();\n"
    style = "".join(map(_read, styles))
    allowed = " ".join(_hash(code) for code in (vendored, script) if code)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    environment = Environment(
        loader=PackageLoader("headwise.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(
        title=visible(title, limit=100),
        policy=policy,
        data=Markup(json_for_html(data)),
        library=Markup(vendored),
        script=Markup(script),
        style=Markup(style),
    )


def check_engine() -> None:
    """Raise `headwise.extras.MissingExtra` if the template engine is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise missing_extra("a report", "look", error) from None


def _read(path: str) -> str:
    return resources.files(__package__).joinpath(*path.split("/")).read_text(encoding="utf-8")
