"""The operator decode_step called as it is: spoiled in every way it is refused in words, and has written nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import instructions, natives, needs_native
from native_cases import collected
from test_native_refusals import of_other_dtypes, of_other_sizes, of_other_storage, refused
from torch import Tensor

from headwise.nn import rotate
from headwise.ops.native.library import error_for
from headwise.testing import assert_same_bits

pytestmark = needs_native
FAR = 1 << 40
B, H, K, D, V, ROOM = 3, 4, 2, 14, 9, 256
WRITTEN = ("keys", "values", "key_scale", "value_scale")


@pytest.fixture(autouse=True)
def loaded() -> None:
    assert error_for() is None


def call(
    dtype: torch.dtype = torch.float32, paged: bool = False, small: bool = False, **changes: Any
) -> dict[str, Any]:
    """The arguments of a call by name, all in use."""
    table = torch.tensor([[4, 2], [0, 5], [1, 3]]) if paged else None
    rows, size = (6, 128) if paged else (B, ROOM)

    def store(n: int) -> Tensor:
        x = torch.randint(-127, 128, (rows, K, size, n))
        return x.to(torch.int8) if small else (x / 50).to(dtype)

    scales = [torch.rand(rows, K, size) + 0.01 if small else None for _ in range(2)]
    arguments: dict[str, Any] = {
        "query": torch.randn(B, H, 1, D).to(dtype), "key": torch.randn(B, K, 1, D).to(dtype),
        "value": torch.randn(B, K, 1, V).to(dtype), "cos": torch.randn(B, 3), "sin": torch.randn(B, 3), "first": 5,
        "turned": 6, "interleaved": True, "keys": store(D), "values": store(V), "key_scale": scales[0],
        "value_scale": scales[1], "table": table, "places": [127, 0, 200], "value_dim": V, "scale": 0.25,
        "softcap": 5.0, "sinks": torch.randn(H), "low": -FAR, "high": FAR,
        "bounds": torch.tensor([[-FAR, FAR, 0, 128], [-FAR, FAR, 0, 1], [60, FAR, 0, 201]]), "segments": None,
        "dense": None, "alibi": None, "maps": None, "relative": None, "gate": torch.rand(B, H, 1, V),
    }  # fmt: skip
    assert set(changes) <= set(arguments)
    return arguments | changes


def step(arguments: dict[str, Any]) -> Tensor:
    return torch.ops.headwise.decode_step(**arguments)


def of_parts(arguments: dict[str, Any]) -> Tensor:
    """What it gives by torch's rotation, indexing, and attention to what is held; the cache is written to."""
    a = dict(arguments)
    turned = []
    for x in (a["query"], a["key"]):
        inner, n = x[..., a["first"] :], a["cos"].shape[-1]
        angles = a["cos"].view(-1, 1, 1, n), a["sin"].view(-1, 1, 1, n)
        turned.append(torch.cat((x[..., : a["first"]], rotate(inner, *angles, interleaved=a["interleaved"])), -1))
    for b, place in enumerate(a["places"]):
        row, at = (b, place) if a["table"] is None else (int(a["table"][b, place // 128]), place % 128)
        for new, to in ((turned[1], a["keys"]), (a["value"], a["values"])):
            to[row, :, at] = new[b, :, 0]
    names = ("keys", "key_scale", "values", "value_scale", "table")
    length = max(a["places"]) + 1
    if a["table"] is None:
        a |= {name: a[name] if a[name] is None else a[name][:, :, :length] for name in WRITTEN}
    rules = list(a.values())[list(a).index("scale") :]
    cache = (turned[0], *(a[name] for name in names), length)
    out: Tensor = torch.ops.headwise.attend_held(*cache, *rules, 0.0, None)[0]
    return out


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


@natives
def test_the_bits_of_its_parts(backend: str) -> None:
    def check(inputs: dict[str, Any]) -> None:
        ours, theirs = copied(inputs), copied(inputs)
        assert_same_bits(step(ours), of_parts(theirs))
        for name in ("keys", "values"):
            assert_same_bits(ours[name], theirs[name], what=name)

    with instructions(backend), collected() as attempt:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for paged in (False, True):
                attempt((dtype, paged), check, call(dtype, paged))
                attempt((dtype, paged, "halves"), check, call(dtype, paged, interleaved=False))
                tiny = call(dtype, paged)
                tiny |= {"key": tiny["key"] * 1e-6, "query": tiny["query"] * 1e-38}
                attempt((dtype, paged, "denormals"), check, tiny)


@natives
def test_angles_in_the_dtype_of_the_query_are_rounded_at_each_step(backend: str) -> None:
    """As torch computes x * cos + rotate_half(x) * sin."""
    with instructions(backend):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            angle = torch.randn(B, 1, D)
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
            inputs = call(dtype, first=0, turned=D, interleaved=False) | {"cos": cos, "sin": sin}
            key = inputs["key"]
            half = torch.cat((-key[..., D // 2 :], key[..., : D // 2]), -1)
            step(inputs)
            for b, place in enumerate(inputs["places"]):
                expected = (key * cos[:, None]) + (half * sin[:, None])
                assert_same_bits(inputs["keys"][b, :, place], expected[b, :, 0])


def test_a_step_into_int8() -> None:
    """Has the bits of appending by append_codes, and of attending after it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = call(dtype, small=True) | {"cos": None, "sin": None, "turned": 0, "first": 0}
        ours, theirs = copied(inputs), copied(inputs)
        out = step(ours)
        spans = [n for b, place in enumerate(inputs["places"]) for n in (b, 0, b, place, 1)]
        stores = [theirs[name] for name in ("keys", "key_scale", "values", "value_scale")]
        torch.ops.headwise.append_codes(theirs["key"], theirs["value"], *stores, spans)
        for name in WRITTEN:
            assert_same_bits(ours[name], theirs[name], what=name)
        rules = list(inputs.values())[list(inputs).index("scale") :]
        views = [x[:, :, :201] for x in stores]
        assert_same_bits(out, torch.ops.headwise.attend_held(theirs["query"], *views, None, 0, *rules, 0.0, None)[0])


@pytest.mark.parametrize("kind", ["plain", "paged int8"])
def test_what_an_argument_may_not_be(kind: str) -> None:
    arguments = call() if kind == "plain" else call(torch.bfloat16, paged=True, small=True)
    step(copied(arguments))
    with collected() as attempt:
        for what, x in arguments.items():
            if not isinstance(x, Tensor):
                continue
            for how, bad in (
                *of_other_dtypes("decode_step", what, x), *of_other_sizes("decode_step", what, x), *of_other_storage(x),
            ):  # fmt: skip
                if what == "query" and how in map(str, (torch.float32, torch.float16)):
                    assert bad.dtype != arguments["key"].dtype
                fresh = copied(arguments)
                spoilt = fresh | {what: bad}
                attempt(f"{what}: {how}", refused_untouched, spoilt)


def refused_untouched(arguments: dict[str, Any]) -> None:
    """Refused, with every number of the cache where it was."""
    before = {name: arguments[name].clone() for name in WRITTEN if readable(arguments[name])}
    refused("decode_step", arguments)
    for name, x in before.items():
        assert torch.equal(arguments[name], x), f"{name} was written to"


def readable(x: Any) -> bool:
    whole = isinstance(x, Tensor) and x.layout == torch.strided
    return (
        whole and x.untyped_storage().nbytes() >= x.numel() * x.element_size() and x.data_ptr() % x.element_size() == 0
    )


def test_numbers_that_may_not_be() -> None:
    arguments, huge = call(), (1 << 63) - 1
    none = {"cos": None, "sin": None}
    with collected() as attempt:
        for changes in (
            {"places": []}, {"places": [0, 1]}, {"places": [0] * 4}, {"places": [-1]}, {"places": [ROOM]},
            {"places": [0, 0, huge]}, {"places": [0, -huge - 1, 0]}, {"turned": 5}, {"turned": 0}, {"turned": -2},
            {"turned": huge}, {"turned": huge - 1}, {"turned": 16}, {"first": -1}, {"first": 9}, {"first": huge},
            {"first": -huge - 1}, {"value_dim": 0}, {"value_dim": V - 1}, {"value_dim": huge}, {"values": None},
            {"value": None}, {"cos": None}, {"sin": None}, {"value": None, "values": None, "value_dim": D + 1},
            {"value": None, "values": None, "value_dim": 0}, {"scale": float("nan")}, {"softcap": -1.0},
            {"key_scale": torch.rand(B, K, ROOM)}, {"sin": torch.randn(B, 6)}, {"sin": torch.randn(3)},
        ):  # fmt: skip
            attempt(
                changes.keys() if "places" not in changes else changes, refused_untouched, copied(arguments) | changes
            )
        paged = call(paged=True)
        for table in (paged["table"] + 1, paged["table"] - 1, paged["table"] + (1 << 62), paged["table"][:, :1]):
            attempt(table.tolist(), refused_untouched, paged | {"table": table})
        attempt("place", refused_untouched, paged | {"places": [0, 0, 256]})
        same = torch.tensor([[4, 2], [0, 2], [1, 3]])
        attempt("one place of two rows", refused_untouched, paged | {"table": same, "places": [130, 130, 0]})
    step(paged | {"table": same, "places": [130, 129, 0]})  # a page that both read
    step(arguments | none | {"turned": -7, "first": huge})  # not read where nothing turns
    step(arguments | {"places": [5], "bounds": None})
    step(arguments | {"value": None, "values": None, "value_dim": D - 1, "gate": None})


def refused_for(why: str, arguments: dict[str, Any]) -> None:
    try:
        step(arguments)
    except RuntimeError as error:
        assert why in str(error)
    else:
        raise AssertionError("taken")


def test_a_cache_whose_elements_overlap_is_not_written_to() -> None:
    """Two threads would write to one place."""
    with collected() as attempt:
        for small in (False, True):
            arguments = call(small=small)
            for name in WRITTEN if small else WRITTEN[:2]:
                x = arguments[name]
                for how, axis in (("rows", 0), ("heads", 1), ("places", 2)):
                    spoilt = arguments | {name: x.narrow(axis, 0, 1).expand_as(x)}
                    attempt((name, how, small), refused_for, f"headwise: {name}: elements overlap", spoilt)


def test_any_layout_is_read() -> None:
    """Queries, new keys and angles with any strides; a cache whose rows are contiguous."""
    arguments = call(torch.bfloat16)
    wanted = step(copied(arguments))
    with collected() as attempt:
        for name in ("query", "key", "value", "cos", "sin", "keys", "values", "sinks", "bounds"):
            x = arguments[name]
            wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
            wide[..., ::2] = x
            turned = x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x
            for how, y in (("apart", wide[..., ::2]), ("turned", turned)):
                inputs = copied(arguments) | {name: y}
                apart = how == "apart" and name in ("keys", "values", "sinks", "bounds")
                if apart or (how == "turned" and name == "bounds"):
                    attempt((name, how), refused, "decode_step", inputs)
                else:
                    attempt((name, how), lambda inputs: assert_same_bits(step(inputs), wanted), inputs)
