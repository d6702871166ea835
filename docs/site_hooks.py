"""Parts of the site that are not Markdown: formulas without a script, and the tour as a page of its own."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

LOADS = re.compile(
    r"<(?:script|img|iframe|link rel=\"(?:stylesheet|icon|preload)\")[^>]*?(?:src|href)=\"?https?://[^>]*>"
)
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.S)
TOUR = "the-tour.html"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the tour of the packaged model to the files of the site."""
    from headwise.models import default_text, tiny_path
    from headwise.tour import read, render

    files.append(File.generated(config, TOUR, content=render(read(tiny_path()), default_text(), packaged=True)))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Replace each formula that the arithmatex extension has marked by MathML."""
    from headwise.tour.mathml import scripts_in_html

    def mathml(match: re.Match[str]) -> str:
        formula = html.unescape(match[2]).strip()
        return scripts_in_html(convert(formula, display="block" if match[1] == "div" else "inline"))

    return FORMULA.sub(mathml, content)


def on_post_build(config: Any, **_: Any) -> None:
    """Raise PluginError if a page loads a script, a style or a picture from another host."""
    for page in Path(config.site_dir).rglob("*.html"):
        found = page.name != TOUR and LOADS.search(page.read_text("utf8"))
        if found:
            raise PluginError(f"{page.name} loads from another host: {found[0]}")
