"""The table of what loads as what, in the documentation, is the one that the code goes by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.hf import layouts
from headwise.plan.config.fields import architectures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reshape.md"


def describe(name: str, about: Mapping[str, Any]) -> str:
    fields = about.get("fields") or architectures()[name]
    if "text" in fields:
        inner = fields["text"]["type"]
        return describe(inner, {**layouts()["families"][inner], **about})
    if "inexact" in about:
        return f"zeros only: {about['inexact']}"
    if fields.get("heads_by_layer"):
        return f"headwise_{name}, with heads by layer, after `import headwise.hf`"
    if not (fields.get("latent") or "head_dim" in fields.get("names", {}) or "head_dim" in fields["defaults"]):
        return "zeros only: a head has d_model / num_heads numbers"
    text = "itself" + (", where the number of heads divides d_model" if about.get("loads") == "divides" else "")
    others = [
        choice["class"]
        + (f" ({', '.join(f'{k} = {v}' for k, v in choice['when'].items())})" if "when" in choice else "")
        for choice in about.get("instead", ())
    ]
    if others:
        text += f"; else {', '.join(others)}"
    if "same_heads" in about:
        text += "; the same heads in all layers of a stack, which share a table of position biases"
    return text


def test_the_page_says_what_the_table_says() -> None:
    rows = dict(re.findall(r"^\| ([a-z0-9_-]+) \| (.+) \|$", PAGE.read_text("utf8"), re.M))
    assert rows.pop("model_type") == "pruned, it loads as"
    assert rows == {name: describe(name, about) for name, about in layouts()["families"].items()}
