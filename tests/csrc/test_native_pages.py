"""Keys and values in pages through the operator itself: the bits of one piece, and every table that is none refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import instructions, natives, needs_native
from native_cases import collected, dtypes
from torch import Tensor

from headwise.cache import Quantized, quantize
from headwise.ops.storage.paged import gathered
from headwise.testing import assert_same_bits, make_qkv

FAR = 1 << 40
PAGE = 128

pytestmark = needs_native


def attend(query: Tensor, key: Any, value: Any, table: Tensor | None = None, length: int = 0, **changes: Any) -> Any:
    """(out, lse) of `attend_held`; keys and values are tensors or `Quantized`."""
    (key, key_scale), (value, value_scale) = (
        (x.data, x.scale) if isinstance(x, Quantized) else (x, None) for x in (key, value)
    )
    rules: dict[str, Any] = {
        "scale": 0.25, "softcap": 0.0, "sinks": None, "low": -FAR, "high": FAR, "bounds": None, "segments": None,
        "dense": None, "alibi": None, "maps": None, "relative": None, "gate": None, "dropout": 0.0, "seed": None,
    }  # fmt: skip
    assert set(changes) <= set(rules)
    cache = (query, key, key_scale, value, value_scale, table, length)
    return torch.ops.headwise.attend_held(*cache, *(rules | changes).values())


def one_piece(pages: Any, table: Tensor, length: int) -> Any:
    if isinstance(pages, Quantized):
        return Quantized(gathered(pages.data, table, length), gathered(pages.scale, table, length))
    return gathered(pages, table, length)


def drawn(draw: torch.Generator, B: int, S: int, size: int, T: int, dtype: torch.dtype, bytes: bool) -> tuple[Any, ...]:
    """(query, keys in pages, values in pages, table) with pages of other rows, and of nobody, among them.

    Rows share some of their pages. Where nothing may look lies NaN, or 127 with a scale of NaN.
    """
    N = -(-S // size)
    P = B * N + 2
    query, key, value = make_qkv(P, 4, 2, size, size, 19, 13)
    table = torch.randperm(P, generator=draw)[: B * N].view(B, N)
    if B > 1:
        table[1, 0] = table[0, 0]
    used = torch.zeros(P, size, dtype=torch.bool)
    for row in table:
        for n, page in enumerate(row):
            used[page, : min(size, S - n * size)] = True
    bad = ~used[:, None, :, None]
    if bytes:
        key, value = (
            Quantized(x.data.masked_fill(bad, 127), x.scale.masked_fill(bad[..., 0], math.nan))
            for x in map(quantize, (key, value))
        )
    else:
        key, value = (x.to(dtype).masked_fill(bad, math.nan) for x in (key, value))
    return query[:B, :, :T].to(dtype), key, value, table


@pytest.mark.sweep
@natives
@dtypes
@pytest.mark.parametrize("bytes", [False, True], ids=["floats", "int8"])
def test_bits_of_one_piece(backend: str, dtype: torch.dtype, bytes: bool) -> None:
    """Lengths at the edges of pages and splits, one query and many, shared pages, a table longer than the keys."""
    draw = torch.Generator().manual_seed(3)
    with instructions(backend), collected() as attempt:
        for size, S in ((PAGE, 1), (PAGE, 127), (PAGE, 128), (PAGE, 129), (2 * PAGE, 385), (PAGE, 1153)):
            for T in (1, 3, 29):
                query, key, value, table = drawn(draw, 2, S, size, T, dtype, bytes)
                pieces = [one_piece(x, table, S) for x in (key, value)]
                longer = torch.cat([table, torch.full((2, 1), 1 << 40)], 1)  # what is not needed is not looked at
                for what, rules in (
                    ("all", {}),
                    ("causal", {"high": S - T + 1}),
                    ("window", {"low": S - T - 69, "high": S - T + 1}),
                    ("bounds", {"bounds": torch.tensor([[-FAR, FAR, 3, S - 1], [-FAR, FAR, 0, S]])}),
                ):
                    ours = attend(query, key, value, longer[:, : table.shape[1] + T % 2], S, **rules)
                    for x, y in zip(ours, attend(query, *pieces, **rules), strict=True):
                        attempt(f"S = {S}, T = {T}, {what}", assert_same_bits, x, y)
                        attempt(f"S = {S}, T = {T}, {what}", lambda x=x: assert_finite(x))


def assert_finite(x: Tensor) -> None:
    assert not bool(x.isnan().any()), "what lies beside the keys was read"


def arguments(**change: Callable[[Any], Any]) -> dict[str, Any]:
    query, key, value = make_qkv(2, 4, 2, PAGE, PAGE, 16, 8)
    values = {
        "query": query[:, :, :3],
        "key": key,
        "value": value,
        "table": torch.tensor([[0, 1], [1, 0]]),
        "length": 200,
    }
    return values | {name: make(values[name]) for name, make in change.items()}


REFUSED: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "a page behind the last": ({"table": lambda x: x + 1}, r"the table names page 2 of \(2, 2, 128, 16\)"),
    "a page before the first": ({"table": lambda x: x - 1}, "the table names page -1 of"),
    "a page far off": ({"table": lambda x: x << 62}, "the table names page 4611686018427387904 of"),
    "the last row's last page": (
        {"table": lambda x: x.index_put((torch.tensor([1]), torch.tensor([1])), torch.tensor([2]))},
        "the table names page 2 of",
    ),
    "too few pages": ({"table": lambda x: x[:, :1]}, r"room for all keys in its N pages, got \(2, 1\)"),
    "one key too many": ({"length": lambda x: 257}, r"room for all keys in its N pages, got \(2, 2\)"),
    "no pages": ({"table": lambda x: x[:, :0]}, "room for all keys in its N pages"),
    "a row too few": ({"table": lambda x: x[:1]}, r"the table must be \(B, N\)"),
    "a row too many": ({"table": lambda x: torch.cat([x, x[:1]])}, r"the table must be \(B, N\)"),
    "one axis": ({"table": lambda x: x[0]}, "table must have 2 axes"),
    "int32": ({"table": lambda x: x.int()}, "a dtype that headwise does not read"),
    "float": ({"table": lambda x: x.float()}, "table must be int64"),
    "every other page": ({"table": lambda x: x.repeat_interleave(2, 1)[:, ::2]}, "the rows of the table must be"),
    "pages of 127": ({"key": lambda x: x[:, :, :127], "value": lambda x: x[:, :, :127]}, "a multiple of 128 keys"),
    "empty pages": ({"key": lambda x: x[:, :, :0], "value": lambda x: x[:, :, :0]}, "a multiple of 128 keys"),
    "other pages of values": ({"value": lambda x: torch.cat([x, x])}, "do not fit"),
    "no length": ({"length": lambda x: 0}, "pages hold at least one key, got a length of 0"),
    "less than no length": ({"length": lambda x: -128}, "got a length of -128"),
    "a length beyond any": ({"length": lambda x: 1 << 62}, r"more queries or keys than 2\*\*30"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, why = REFUSED[case]
    attend(**arguments())
    with pytest.raises(RuntimeError, match=why):
        attend(**arguments(**change))


@pytest.mark.parametrize("length", [1, 128, 129, 256])
def test_as_many_keys_as_the_table_has_room_for(length: int) -> None:
    call = arguments(length=lambda x: length)
    pieces = [one_piece(call[x], call["table"], length) for x in ("key", "value")]
    for x, y in zip(attend(**call), attend(call["query"], *pieces), strict=True):
        assert_same_bits(x, y)
