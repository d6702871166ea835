"""Attention of the newest token of each row in one native call, without views: the bits of the general call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import needs_native
from native_cases import collected
from test_decode_step import FLOATS, KINDS, a_cache, fill

import headwise
from headwise.cache.steps import Steps
from headwise.testing import assert_same_bits

pytestmark = needs_native


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_tokens_attend_in_one_call(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of views and the general call; which calls are taken."""
    plain = kind != "rolling, first"  # its first tokens are no band
    full = headwise.segments(torch.tensor([[1]]), torch.ones(1, 126, dtype=torch.int64))
    calls: dict[str, tuple[dict[str, Any], bool]] = {
        "nothing": ({}, plain), "scale": ({"scale": 0.3}, plain), "backend": ({"backend": "native"}, plain),
        "window": ({"mask": headwise.window(9)}, plain), "lse": ({"return_lse": True}, False),
        "at numbers": ({"mask": headwise.window(4, 6, offset=100)}, False), "softcap": ({"softcap": 3.0}, False),
        "sinks": ({"sinks": torch.rand(6)}, False), "gate": ({"gate": torch.rand(6)}, False),
        "reference": ({"backend": "reference"}, False), "segments": ({"mask": full}, False),
    }  # fmt: skip
    taken: list[bool] = []
    inner = Steps._attend_newest

    def watched(cache: Any, *inputs: Any) -> Any:
        out = inner(cache, *inputs)
        taken.append(out is not None)
        return out

    def check(cache: Any, call: dict[str, Any], expected: bool) -> None:
        query = torch.randn(cache.batch, 6, 1, 13).to(dtype)
        for patched in (watched, lambda *_: None):
            monkeypatch.setattr(Steps, "_attend_newest", patched)
            outs.append(cache.attend(query, **call))
        ours, theirs = outs[-2:]
        assert taken.pop() is expected
        for a, b in zip(ours, theirs, strict=True) if call.get("return_lse") else [(ours, theirs)]:
            assert_same_bits(a, b)

    outs: list[Any] = []
    with torch.no_grad(), collected() as attempt:
        for name, (call, expected) in calls.items():
            if not (name == "segments" and "rolling" in kind):
                attempt(name, check, fill(a_cache(kind, 2, 2, 13, 11, dtype), [126, 126], dtype), call, expected)
        attempt("rows apart", check, fill(a_cache(kind, 2, 2, 13, 11, dtype), [126, 3], dtype), {}, False)
        padded = fill(a_cache(kind, 2, 2, 13, 11, dtype), [5, 6], dtype)
        padded.append(torch.ones(2, 2, 1, 13).to(dtype), torch.ones(2, 2, 1, 11).to(dtype), lengths=[1, 0])
        attempt("padding", check, padded, {}, False)
