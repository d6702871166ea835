"""Every way the op can be computed, as a test parameter: `@every_backend` and `attend(backend, q, k, v, ...)`.

A backend may refuse what it cannot honour, but only clearly, and only if it is not one of MUST. A refusal is
checked here and comes back as None: nothing is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

import headwise

MUST = ("auto", "reference", "blocks")  # these run everything that is valid
OPTIONAL = ("sdpa", "flex")
BACKENDS = (*MUST, *OPTIONAL)
# FlexAttention traces what it is given, and cannot trace the shape checker.
every_backend = pytest.mark.parametrize("backend", [*MUST, "sdpa", pytest.param("flex", marks=pytest.mark.unchecked)])


def attend(backend: str, *qkv: Any, **options: Any) -> Any:
    """`headwise.attention` by this backend; None where the backend refuses as it should."""
    if backend in MUST:
        return headwise.attention(*qkv, **options, backend=backend)
    try:
        return headwise.attention(*qkv, **options, backend=backend)
    except ValueError as refusal:
        check_refusal(backend, str(refusal), headwise.explain(*qkv, **options))
        return None


def check_refusal(backend: str, text: str, told: Any) -> None:
    """The refusal names the backend, says why in `explain`'s own words, and gives a way out."""
    assert told.backend != backend, f"auto chose {backend}, which then refused: {text}"
    why = told.others[backend]
    assert why and "able" not in why.split(",")[0], f"{backend} refuses, and explain says {why!r}"
    assert f"{backend!r} cannot" in text and why in text and "use 'auto' or" in text, f"unclear: {text!r} ({why!r})"
