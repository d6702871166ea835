"""What a report holds, read back from its HTML."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import Any


class Elements(HTMLParser):
    """The start tags with their attributes, and the text of each script and style."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.code: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("style", "script"):
            self.code.append(("json" if attrs else tag, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            kind, before = self.code.pop()
            self.code.append((kind, before + data))

    @property
    def data(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(next(code for kind, code in self.code if kind == "json"))
        return record


def inflated(data: dict[str, Any], part: str = "maps") -> bytes:
    return zlib.decompress(base64.b64decode(data[part]["data"]), -zlib.MAX_WBITS)


def numbers(data: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(inflated(data, "numbers"))
    return values


def values(data: dict[str, Any], label: str) -> list[float | None]:
    """The column of a number, by its name."""
    labels = [s["label"] for s in data["numbers"]["statistics"]]
    column: list[float | None] = numbers(data)["values"][labels.index(label)]
    return column
