"""The operator of int8 keys and values, called directly: what it refuses, and what torch's own checks say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import BEST
from mask_cases import Sizes
from test_native_int8 import make as make_int8
from torch import Tensor

from headwise.testing import make_qkv

FAR = 1 << 40


def arguments(**change: Any) -> dict[str, Any]:
    q, key, value = make_int8(Sizes(2, 4, 2, 3, 7, 16, 8))
    values = {
        "query": q, "key": key.data, "key_scale": key.scale, "value": value.data, "value_scale": value.scale,
        "table": None, "length": 0, "scale": 0.25, "softcap": 0.0, "sinks": None, "low": -FAR, "high": FAR,
        "bounds": None, "segments": None, "dense": None, "alibi": None, "maps": None, "relative": None, "gate": None,
        "dropout": 0.0, "seed": None,
    }  # fmt: skip
    return values | {name: make(values[name]) for name, make in change.items()}


REFUSED: dict[str, tuple[dict[str, Callable[[Tensor], Tensor]], str]] = {
    "float keys": ({"key": lambda x: x.float()}, "one dtype: the query's, int8"),
    "uint8 values": ({"value": lambda x: x.to(torch.uint8)}, "value: packed rows"),
    "an int8 query": ({"query": lambda x: x.to(torch.int8)}, "a dtype that headwise does not read"),
    "a float64 query": ({"query": lambda x: x.double()}, "the query must be float32, bfloat16 or float16"),
    "a half scale": ({"key_scale": lambda x: x.half()}, "key_scale: a wrong dtype"),
    "four axes of scale": ({"value_scale": lambda x: x[..., None]}, r"value_scale must have 3 axes"),
    "a short scale": ({"key_scale": lambda x: x[..., :-1]}, r"key_scale must be \(B, K, S\), got \(2, 2, 6\)"),
    "one head of scale": ({"value_scale": lambda x: x[:, :1]}, r"value_scale must be \(B, K, S\)"),
    "other lengths": ({"value": lambda x: x[:, :, :-1]}, "do not fit"),
}


@pytest.mark.parametrize("backend", BEST)
@pytest.mark.parametrize("what", REFUSED)
def test_refused(backend: str, what: str) -> None:
    change, why = REFUSED[what]
    with pytest.raises(RuntimeError, match=why):
        torch.ops.headwise.attend_held(**arguments(**change))


@pytest.mark.parametrize("backend", BEST)
def test_no_other_operator_reads_bytes(backend: str) -> None:
    q, k, v = make_qkv(2, 4, 2, 3, 7, 16, 8)
    with pytest.raises(RuntimeError, match="a dtype that headwise does not read"):
        torch.ops.headwise.attend(q, k.to(torch.int8), v.to(torch.int8), 0.25, -FAR, FAR)
    ones = torch.ones(2, 4, 3, 8, dtype=torch.int8)
    for call in (arguments() | {"gate": ones}, arguments() | {"dense": [ones[..., :7]]}):
        with pytest.raises(RuntimeError, match="a dtype that headwise does not read"):
            torch.ops.headwise.attend_held(**call)


@pytest.mark.parametrize("backend", BEST)
def test_opcheck(backend: str) -> None:
    result = torch.library.opcheck(torch.ops.headwise.attend_held.default, tuple(arguments().values()))
    assert set(result.values()) == {"SUCCESS"}, result
