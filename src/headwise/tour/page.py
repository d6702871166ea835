"""The page: prose, claims, scripts, style and data under a content security policy."""

from __future__ import annotations

import base64
import re
from importlib import resources
from typing import Any

from headwise.extras import missing_extra
from headwise.files.text import visible
from headwise.report.escape import json_for_html
from headwise.report.policy import hash_of

from .facts import cards, formation, read_json
from .mathml import scripts_in_html
from .weights import TourCheckpoint

SCRIPTS = (
    *(f"engine/{name}.js" for name in ("memory", "weights", "tokens", "parts", "model", "session")),
    *(
        f"page/{name}.js"
        for name in ("words", "dom", "state", "figures", "maps", "claims", "experiments", "open", "keys")
    ),
    *(
        f"sections/{name}.js"
        for name in (
            *("type", "one", "pattern", "split", "grid", "off", "join"),
            *("learn", "order", "cache", "share", "cost", "online", "ledger"),
        )
    ),
    "main.js",
)
"""Scripts in order: each uses only earlier ones when it is loaded."""

SHARED = ("dom", "acting", "colour")
"""Scripts of the report, which come first."""

STYLES = ("page.css", "figures.css", "sections.css")

VERDICTS = {
    "shown": "the page shows it",
    "half true": "true with a condition, which the text beside it names",
    "wrong": "the numbers, or the named facts, contradict it",
    "not in this model": "true of other models; this one has nothing of the kind",
    "not tested": "nothing here can test it, and no source is known",
}


def render(checkpoint: TourCheckpoint, text: str, *, packaged: bool) -> str:
    """Return the tour of a model as one HTML text; the same arguments give the same text.

    Args:
        checkpoint: the model that runs in the page.
        text: the text of the model when the page opens.
        packaged: whether it is the packaged model, whose numbers the prose cites.

    Raises:
        headwise.extras.MissingExtra: the template engine is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise missing_extra("the tour", "look", error) from None
    libraries = [_of_report("vendor", "d3.min.js"), _read("vendor", "tokenizers.min.js")]
    shared = [_of_report("shared", f"{name}.js") for name in SHARED]
    script = "(() => {\n" + "\n".join([*shared, *(_read("js", *name.split("/")) for name in SCRIPTS)]) + "\n})();\n"
    style = "\n".join([_of_report("shared", "tokens.css"), *(_read("css", name) for name in STYLES)])
    hashes = " ".join(hash_of(code) for code in (*libraries, script))
    policy = (
        f"default-src 'none'; script-src {hashes} 'wasm-unsafe-eval'; style-src {hash_of(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    environment = Environment(
        loader=PackageLoader(__package__, "chapter"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["typeset"] = _typeset
    return environment.get_template("page.html.j2").render(
        title=visible(checkpoint.name, limit=100),
        packaged=packaged,
        policy=policy,
        style=Markup(style),
        libraries=[Markup(code) for code in libraries],
        script=Markup(script),
        chapter=Markup(json_for_html(_chapter(checkpoint, text, packaged))),
        tokenizer=Markup(json_for_html([checkpoint.tokenizer, checkpoint.tokenizer_config])),
        weights=checkpoint.packed(),
        claims=claims(),
        formulas={name: Markup(scripts_in_html(one["mathml"])) for name, one in read_json("formulas.json").items()},
        cards=cards(),
        roles=read_json("facts.json")["roles"],
        verdicts=VERDICTS,
        numbers=read_json("facts.json")["numbers"],
        heads=read_json("facts.json")["heads"],
        regroup=read_json("facts.json")["regroup"],
        text=text,
    )


def _typeset(text: str) -> str:
    """Return the text with W_Q, d_k, h_kv, head_i and similar names as a letter or word with an index."""
    from markupsafe import Markup, escape

    names = re.compile(r"\b([Wdh])_(Q|K|V|O|kv|k|model)(?![A-Za-z0-9_])")
    return Markup(names.sub(r"<i>\1</i><sub>\2</sub>", str(escape(text))).replace("head_i", "head<sub><i>i</i></sub>"))


def claims() -> dict[str, dict[str, Any]]:
    """Return the claims by id, in the order of the page."""
    return {claim["id"]: claim for claim in read_json("claims.json")}


def _chapter(checkpoint: TourCheckpoint, text: str, packaged: bool) -> dict[str, Any]:
    facts = read_json("facts.json")
    return {
        "name": checkpoint.name,
        "packaged": packaged,
        "text": text,
        "config": checkpoint.config,
        "tensors": checkpoint.tensors,
        "claims": list(claims().values()),
        "cards": cards(),
        "accepted": facts["accepted"]["architectures"],
        "roles": facts["roles"],
        "regroup": facts["regroup"],
        "heads": facts["heads"],
        "formation": formation(checkpoint.curve),
        "wasm": base64.b64encode(resources.files(__package__).joinpath("gemm.wasm").read_bytes()).decode("ascii"),
    }


def _read(*parts: str) -> str:
    return resources.files(__package__).joinpath(*parts).read_text(encoding="utf-8")


def _of_report(*parts: str) -> str:
    return resources.files("headwise.report").joinpath(*parts).read_text(encoding="utf-8")
