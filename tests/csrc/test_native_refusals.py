"""Every tensor of every operator of the native library, spoiled in every way: refused in words, or read as it lies.

What Python has checked before does not count here: these calls reach the operators as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backends import needs_native
from native_calls import FAR, NAMES, B, H, S, T, V, calls, none, results, tensors
from native_cases import collected
from torch import Tensor

from headwise.ops.native import mask_arguments as lowering
from headwise.testing import assert_same_bits

pytestmark = needs_native
ANY_FLOAT = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
DTYPES = (*ANY_FLOAT, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64)

# What an argument may be beside what it is in `calls`.
OTHER_DTYPES = {"gate": ANY_FLOAT, **{f"dense {n}": ANY_FLOAT | {torch.bool} for n in range(3)}}
OTHER_AXES = {"bounds", "segments 0", "segments 1", "alibi 0", "seed"}  # some stand for (1, n) with one axis
FREE = {  # axes that nothing else of the call fixes
    **{name: {("query", 2), ("value", 3)} for name in ("attend", "attend_stored", "attend_stored, pages")},
    "attend_statistics": {("value", 3), ("features", 2)}, "attend_received": {("key", 1)},
}  # fmt: skip
LONGER = {("bounds", 1), ("table", 1), ("maps 1", 0)}  # a fifth number of each row, pages and bits not needed
# Read as rows next to each other, or wholly contiguous.
CONTIGUOUS = {
    "sinks": 0,
    "bounds": 1,
    "table": 1,
    "slots": 0,
    "key_data": 3,
    "value_data": 3,
    "features": 2,
    "top": 0,
    "largest": 0,
    "lse": 0,
    "ends": 0,
    "maps 0": 0,
    "maps 1": 0,
}


def refused(name: str, arguments: dict[str, Any]) -> None:
    """With our words, or torch's where the operator is not reached."""
    try:
        results(name, arguments)
    except NotImplementedError:
        return
    except RuntimeError as error:
        assert str(error).startswith("headwise: ") and len(str(error)) > 25, error
        return
    raise AssertionError("taken")


def of_other_dtypes(name: str, what: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    allowed = OTHER_DTYPES.get(what, set()) | {x.dtype}
    if what == "query" and name.startswith(("attend_held", "attend_stored")):  # beside int8 any that is served
        allowed |= {torch.float32, torch.bfloat16, torch.float16}
    if what in ("key", "value") and name == "append_codes":
        allowed |= ANY_FLOAT
    for dtype in DTYPES:
        if dtype not in allowed:
            yield f"{dtype}", x.to(dtype)


def of_other_sizes(name: str, what: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """An axis more or less, and each axis one longer, one shorter, or empty."""
    if what not in OTHER_AXES:
        yield "an axis less", x[0] if x.ndim else x
        yield "an axis more", x[None]
    yield "six axes", x[(None,) * (6 - x.ndim)]
    for axis in range(x.ndim):
        if (what, axis) in FREE.get(name, ()):
            continue
        yield f"axis {axis} shorter", x.narrow(axis, 0, x.shape[axis] - 1)
        if (what, axis) not in LONGER:
            yield f"axis {axis} longer", torch.cat([x, x.narrow(axis, 0, 1)], axis)
        if x.shape[axis] > 1:
            yield f"axis {axis} empty", x.narrow(axis, 0, 0)


def freed(x: Tensor, missing: int) -> Tensor:
    """Its storage without the last bytes."""
    x = x.clone()
    x.untyped_storage().resize_(x.untyped_storage().nbytes() - missing)
    return x


def of_other_storage(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    size = x.numel() * x.element_size()
    yield "without storage", freed(x, size)
    yield "with half of its storage", freed(x, size - size // 2)
    yield "a byte short", freed(x, 1)
    yield "sparse", x.to_sparse()
    if x.element_size() > 1:
        raw = torch.zeros(size + x.element_size(), dtype=torch.uint8).numpy()
        odd = torch.frombuffer(memoryview(raw)[1 : size + 1], dtype=x.dtype).view(x.shape)
        yield "at an odd address", odd


@pytest.mark.parametrize("name", NAMES)
def test_what_an_argument_may_not_be(name: str) -> None:
    arguments = calls()[name]
    results(name, arguments)
    with collected() as attempt:
        for what, x, put in tensors(arguments):
            for how, bad in (
                *of_other_dtypes(name, what, x),
                *(of_other_sizes(name, what, x) if what != "seed" else [("two of it", x.repeat(2))]),
                *of_other_storage(x),
                *([("on no device", x.to("meta"))] if " " in what else []),  # else torch asks for no numbers
            ):
                attempt(f"{what}: {how}", refused, name, put(bad))


def test_a_seed_is_one_number_or_five_in_a_row() -> None:
    """All of whose memory is there: what reads further than five, or in another order, reads no others' memory."""
    arguments = calls()["dropout_keep"]
    five = torch.tensor([7, H, 0, 0, 0])
    for seed in (five[:1], five):
        results("dropout_keep", arguments | {"seed": seed})
    with collected() as attempt:
        for bad in (torch.cat([five, five[-1:]]), five[:, None], apart(five, 0)):
            attempt(tuple(bad.shape), refused, "dropout_keep", arguments | {"seed": bad})


def apart(x: Tensor, axis: int, by: int = 3) -> Tensor:
    """The same numbers, those along one axis further apart; what lies between is 7."""
    wide = torch.full([*x.shape, by], 7).to(x.dtype)
    wide[..., 0] = x
    return wide.movedim(-1, axis + 1).flatten(axis, axis + 1).unfold(axis, 1, by)[..., 0]


@pytest.mark.parametrize("name", NAMES)
def test_any_layout_is_read_or_refused(name: str) -> None:
    """Elements further apart along any axis, and another order of axes: the same bits, where it is not refused."""
    arguments = calls()[name]
    wanted = results(name, arguments)

    def same(call: dict[str, Any]) -> None:
        for x, y in zip(results(name, call), wanted, strict=True):
            assert_same_bits(x, y)

    with collected() as attempt:
        for what, x, put in tensors(arguments):
            first = CONTIGUOUS.get(what, x.ndim)  # the first axis that must be contiguous
            for axis in range(x.ndim):
                laid = apart(x, axis)
                assert torch.equal(laid, x) and (x.shape[axis] == 1 or laid.stride() != x.stride())
                moved = [n for n in range(first, x.ndim) if x.shape[n] > 1 and laid.stride(n) != x.stride(n)]
                if moved:
                    attempt(f"{what}, axis {axis}", refused, name, put(laid))
                else:
                    attempt(f"{what}, axis {axis}", same, put(laid))
            turned = x.permute(*range(x.ndim)[::-1]).contiguous().permute(*range(x.ndim)[::-1])
            if first == x.ndim or turned.stride() == x.stride():
                attempt(f"{what}, turned", same, put(turned))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("attend", "append_codes", "dropout_keep")])
def test_how_many_there_may_be(name: str) -> None:
    """Of masks, segments and slopes; and with which others an argument goes."""
    arguments = calls()[name]
    with collected() as attempt:
        attempt("scale", refused, name, arguments | {"scale": float("nan")})
        if "dense" in arguments:
            dense, segments, alibi = arguments["dense"], arguments["segments"], arguments["alibi"]
            for changes in ({"dense": dense[1:2] * 7}, {"segments": segments * 4}, {"alibi": alibi * 4}, {"dense": []}):
                results(name, arguments | changes)
            for changes in (
                {"dense": dense[1:2] * 8}, {"segments": segments * 5}, {"alibi": alibi * 5}, {"alibi": alibi[:1]},
                {"segments": segments[:1]}, {"softcap": -1.0}, {"softcap": 1e300},
            ):  # fmt: skip
                attempt(changes, refused, name, arguments | changes)
        if "dropout" in arguments:
            for changes in ({"seed": None}, {"dropout": 1.5}, {"dropout": -0.1}, {"dropout": float("nan")}):
                attempt(changes, refused, name, arguments | changes)
        if "key_scale" in arguments:
            floats = {n: arguments[n].float() for n in ("key", "value")}
            none = {"key_scale": None, "value_scale": None}
            results(name, arguments | floats | none)
            for changes in ({"key_scale": None}, {"value_scale": None}, none, floats, floats | {"key_scale": None}):
                attempt(changes.keys(), refused, name, arguments | changes)


def test_bounds_put_no_row_outside_the_keys() -> None:
    """Whatever they say, no key before the first or behind the last is read: as the numbers next to the keys' own."""
    arguments = calls()["attend_full"] | {"segments": None, "dropout": 0.0, "low": 0, "high": 0}
    far, most = 1 << 62, (1 << 63) - 1
    ends = {-far: -99, -most - 1: -99, far: 99, most: 99, -FAR: -99, FAR: 99, -1: -1, S + 1: S + 1, -(1 << 31): -99}
    draw = torch.Generator().manual_seed(5)
    with collected() as attempt:
        for _ in range(60):
            picked = torch.tensor(list(ends))[torch.randint(len(ends), (B, 5), generator=draw)]
            inner = torch.randint(-T, S + 2, (B, 5), generator=draw)
            bounds = torch.where(torch.rand(B, 5, generator=draw) < 0.5, picked, inner)
            i, j = torch.arange(T)[:, None], torch.arange(S)
            low, high, start, stop, always = (
                x.apply_(lambda n: ends.get(n, n)).view(B, 1, 1, 1) for x in bounds.clone().unbind(1)
            )
            seen = ((j >= i + low) | (j < always)) & (j < i + high) & (j >= start) & (j < stop)
            plain = results(
                "attend_full", arguments | {"bounds": None, "low": -FAR, "high": FAR} | joined(arguments, seen)
            )
            for x, y in zip(results("attend_full", arguments | {"bounds": bounds}), plain, strict=True):
                attempt(bounds.tolist(), torch.testing.assert_close, x, y, rtol=1e-6, atol=1e-6)


def joined(arguments: dict[str, Any], seen: Tensor) -> dict[str, Any]:
    return {"dense": [*arguments["dense"], seen]}


def test_low_and_high_beyond_every_key() -> None:
    arguments = calls()["attend_full"] | {"bounds": None, "dropout": 0.0}
    most = (1 << 63) - 1
    with collected() as attempt:
        for low, high, near in (
            (-most - 1, most, (-99, 99)), (-most - 1, 2, (-99, 2)), (0, most, (0, 99)), (most, most, (99, 99)),
            (-most - 1, -most - 1, (-99, -99)), (most, -most - 1, (99, -99)),
        ):  # fmt: skip
            wanted = results("attend_full", arguments | {"low": near[0], "high": near[1]})
            for x, y in zip(results("attend_full", arguments | {"low": low, "high": high}), wanted, strict=True):
                attempt((low, high), assert_same_bits, x, y)


def test_an_axis_of_one_has_no_steps() -> None:
    """What must be contiguous is so with one element, whatever its stride; no columns at all are none to refuse."""
    one, wide = torch.randn(1, 1, 128, 16), torch.tensor([0.5, 9.0])[::2]
    ends, table = torch.full((1, 1, 1, 7), 0.25)[..., 0], torch.zeros(1, 2, dtype=torch.int64)[:, ::2]
    plain, query = none() | {"sinks": wide}, one[:, :, :1]
    assert wide.stride() == table.stride()[1:] == (2,) and ends.stride() == (7, 7, 7)
    full = results("attend_full", {"query": query, "key": one, "value": one, **plain, **UNGATED})
    cache = {"query": query, "key": one, "key_scale": None, "value": one, "value_scale": None, "table": table}
    for x, y in zip(results("attend_held", {**cache, "length": 128, **plain, **UNGATED}), full, strict=True):
        assert_same_bits(x, y)
    results("attend_received", {"query": query, "key": one, "top": ends, "largest": ends, **plain})
    empty = {"picks": torch.zeros(1, T, 0, dtype=torch.int64), "slots": torch.zeros(0, dtype=torch.int64), "sums": 0}
    columns = {"features": torch.zeros(B, S, 0), "bins": 0}
    *_, sums, pooled = results("attend_statistics", calls()["attend_statistics"] | empty | columns)
    assert sums.shape == (B, H, 0) and pooled.shape == (B, H, 3, 1)


UNGATED = {"gate": None, "dropout": 0.0, "seed": None}


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 1, -1], [1 << 40, 0, 1]])
def test_a_slot_that_is_none(slots: list[int]) -> None:
    refused("attend_statistics", calls()["attend_statistics"] | {"slots": torch.tensor(slots)})


def test_numbers_of_statistics_and_slopes_that_may_not_be() -> None:
    statistics, full = calls()["attend_statistics"], calls()["attend_full"]
    with collected() as attempt:
        for changes in ({"bins": S + 1}, {"bins": -1}, {"query_bins": 0}, {"query_bins": T + 1}, {"sums": -1}):
            attempt(changes, refused, "attend_statistics", statistics | changes)
        slots = statistics["slots"]
        apart = torch.zeros(len(slots), 2, dtype=torch.int64)[:, 0].copy_(slots)
        attempt("slots apart", refused, "attend_statistics", statistics | {"slots": apart})
        for offset in (-FAR - 1, FAR + 1):
            alibi = [torch.rand(H), torch.tensor([offset])]
            attempt(offset, refused, "attend_full", full | {"alibi": alibi})


def test_a_width_no_scratch_has_room_for() -> None:
    """Tensors of stride 0 may be as wide as they like; what is kept for each column may not."""
    wide, one, far = (1 << 20) + 1, torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)
    attend, statistics = torch.ops.headwise.attend, calls()["attend_statistics"]
    with pytest.raises(RuntimeError, match=r"a head dim above 2\*\*20"):
        attend(one, one, one.expand(1, 1, 1, wide), 1.0, -FAR, FAR)
    with pytest.raises(RuntimeError, match=r"more queries or keys than 2\*\*30"):
        attend(one, one.expand(1, 1, 1 << 30, 1), one.expand(1, 1, 1 << 30, 1), 1.0, -FAR, FAR)
    refused("attend_statistics", statistics | {"features": torch.zeros(wide).expand(B, S, wide)})
    columns = {"picks": far.expand(B, T, wide), "slots": torch.zeros(wide, dtype=torch.int64)}
    refused("attend_statistics", statistics | columns)
    for name in ("B", "H", "rows", "S", "first"):
        refused("dropout_keep", calls()["dropout_keep"] | {name: FAR + 1})
        refused("dropout_keep", calls()["dropout_keep"] | {name: -1})


def test_these_tests_can_fail() -> None:
    with pytest.raises(AssertionError, match="taken"):
        refused("attend_full", calls()["attend_full"] | {"gate": torch.rand(B, H, T, 1).expand(B, H, T, V)})


def test_an_index_of_other_axes_has_no_form() -> None:
    """Masks refuse it where they are made; a rule made by hand is not computed by the kernel."""
    with pytest.raises(lowering.UnsupportedMask, match="one number a row of the batch"):
        lowering._bounds((None, 0, 0, None, None), ([], [torch.ones(2, 3, dtype=torch.int64)], [], [], []))
    with pytest.raises(lowering.UnsupportedMask, match="an index has an axis"):
        lowering._int64(torch.tensor(3))
