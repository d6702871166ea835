"""The operators of the native library, called as they are: what they refuse, and that nothing crashes the process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from native_calls import NAMES, calls, results, tensors
from torch import Tensor

import headwise
from headwise.ops.masks import tiles
from headwise.ops.native import library as native_library
from headwise.ops.native.mask_arguments import MAPS, ROOM
from headwise.ops.statistics.request import MOST_OFFSETS
from headwise.ops.storage.paged import PAGE
from headwise.shapes import LEAST_FACTOR, MOST_FACTOR
from headwise.shapes.arguments import FAR
from headwise.testing import assert_same_bits

CSRC = Path(__file__).resolve().parents[2] / "csrc"

pytestmark = pytest.mark.skipif(native_library.error_for() is not None, reason=str(native_library.error_for()))


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [(2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, 8)]
    q, k, v = (torch.randn(size).to(dtype) for size in sizes)
    return q, k, v


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.ops.headwise.attend(query, key, value, 0.25, -FAR, FAR)


def attend_full(**changes: Any) -> tuple[Tensor, Tensor]:
    query, key, value = qkv()
    arguments = {
        "query": query, "key": key, "value": value, "scale": 0.25, "softcap": 0.0, "sinks": None, "low": -FAR,
        "high": FAR, "bounds": None, "segments": None, "dense": None, "alibi": None, "maps": None, "relative": None,
        "gate": None, "dropout": 0.0, "seed": None,
    }  # fmt: skip
    assert set(changes) <= set(arguments)
    return torch.ops.headwise.attend_full(**arguments | changes)


def emptied(x: Tensor, missing: int | None = None) -> Tensor:
    """Its storage freed behind its back, as sharding libraries do; or only its last bytes."""
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0 if missing is None else size - missing)
    return x


def off_by_a_byte(x: Tensor) -> Tensor:
    raw = torch.zeros(x.numel() * 4 + 4, dtype=torch.uint8)
    return torch.frombuffer(memoryview(raw.numpy())[1:-3], dtype=torch.float32).view(x.shape)


QUERIES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "three axes": (lambda q: q[0], r"query must have 4 axes, got \(4, 5, 16\)"),
    "five axes": (lambda q: q[None], "query: more than 4 axes"),
    "no axes": (lambda q: q.sum(), r"query must have 4 axes, got \(\)"),
    "another batch": (lambda q: q[:1], r"do not fit: \(1, 4, 5, 16\), \(2, 2, 7, 16\), \(2, 2, 7, 8\)"),
    "another head dim": (lambda q: q[..., :9], "do not fit"),
    "heads that do not group": (lambda q: q[:, :3], "a multiple of key heads"),
    "empty": (lambda q: q[:, :, :0], "empty"),
    "another dtype": (lambda q: q.half(), "one dtype"),
    "no float": (lambda q: q.long(), "one dtype"),
    "complex": (lambda q: q.cfloat(), "a dtype that headwise does not read"),
    "sparse": (lambda q: q.to_sparse(), "SparseCPU"),
    "freed": (emptied, "its storage does not hold its elements"),
    "half freed": (lambda q: emptied(q, 4 * q.numel() // 2), "its storage does not hold its elements"),
    "a byte freed": (lambda q: emptied(q, 1), "its storage does not hold its elements"),
    "odd address": (off_by_a_byte, "multiples of their size"),
    "endless": (lambda q: q[:, :, :1].expand(2, 4, 1 << 31, 16), r"more queries or keys than 2\*\*30"),
}


@pytest.mark.parametrize("case", QUERIES)
def test_refused_queries(case: str) -> None:
    make, why = QUERIES[case]
    query, key, value = qkv()
    with pytest.raises((RuntimeError, NotImplementedError), match=why):
        attend(make(query), key, value)


def test_refused_all_alike() -> None:
    for dtype in (torch.float64, torch.int64, torch.bool):
        with pytest.raises(RuntimeError, match="must be float32, bfloat16 or float16"):
            attend(*qkv(dtype))
    wide = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, 1 << 40)
    with pytest.raises(RuntimeError, match=r"a head dim above 2\*\*20"):
        attend(wide, wide, torch.zeros(1, 1, 1, 1))


B, H, T, S, V = 2, 4, 5, 7, 8
IDS = [torch.zeros(T, dtype=torch.int64), torch.zeros(S, dtype=torch.int64)]


def alibi(*offsets: int) -> list[Tensor]:
    return [torch.ones(H), torch.tensor(offsets)]


EXTRAS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": -1.0}, r"softcap must be 0, for none, or from 2\*\*-100 to 2\*\*100, got -1"),
    "softcap NaN": ({"softcap": float("nan")}, "softcap must be 0.* got nan"),
    "softcap Inf": ({"softcap": float("inf")}, "softcap must be 0.* got inf"),
    "softcap too great": ({"softcap": 2.0**101}, r"softcap must be 0.* got 2.5353e\+30"),
    "softcap of 0 in float32": ({"softcap": 1e-300}, "softcap must be 0.* got 1e-300"),
    "softcap too small": ({"softcap": 2.0**-101}, "softcap must be 0.* got 3.9443e-31"),
    "scale NaN": ({"scale": float("nan")}, r"scale must be 0 or in size from 2\*\*-100 to 2\*\*100, got nan"),
    "scale Inf": ({"scale": -float("inf")}, "scale must be 0 or in size.* got -inf"),
    "scale of no float32": ({"scale": -3.5e38}, r"scale must be 0 or in size.* got -3.5e\+38"),
    "scale of 0 in float32": ({"scale": 1e-300}, "scale must be 0 or in size.* got 1e-300"),
    "sinks": ({"sinks": torch.zeros(H + 1)}, r"sinks must be \(H\), got \(5\)"),
    "sinks' dtype": ({"sinks": torch.zeros(H).double()}, "sinks: a wrong dtype"),
    "sinks' steps": ({"sinks": torch.zeros(2 * H)[::2]}, "sinks must be contiguous"),
    "bounds": ({"bounds": torch.zeros(B, 3, dtype=torch.int64)}, "bounds: expected"),
    "bounds' dtype": ({"bounds": torch.zeros(B, 4)}, "bounds must be int64"),
    "segments, odd": ({"segments": IDS[:1]}, "segments must be at most 4 pairs"),
    "segments, many": ({"segments": IDS * 5}, "segments must be at most 4 pairs"),
    "segments, sizes": ({"segments": IDS[::-1]}, "segments: expected"),
    "segments, dtype": ({"segments": [x.int() for x in IDS]}, "a dtype that headwise does not read"),
    "dense": ({"dense": [torch.zeros(B, H, T, S + 1)]}, "dense does not broadcast"),
    "dense, axes": ({"dense": [torch.zeros(T, S)]}, "dense must have 4 axes"),
    "dense, many": ({"dense": [torch.zeros(1, 1, 1, 1)] * 9}, "at most 8 dense masks"),
    "dense, dtype": ({"dense": [torch.zeros(1, 1, T, S).long()]}, "must be bool or floating point"),
    "alibi": ({"alibi": [torch.zeros(H)]}, "alibi must be at most 4 pairs"),
    "alibi offsets": ({"alibi": [torch.zeros(H), torch.zeros(3, dtype=torch.int64)]}, "alibi offsets must be"),
    "alibi offsets, far": ({"alibi": alibi(FAR + 1)}, r"must lie from -2\*\*40 to 2\*\*40, got 1099511627777"),
    "alibi offsets, far back": ({"alibi": alibi(0, -(1 << 63))}, r"to 2\*\*40, got -9223372036854775808"),
    "gate": ({"gate": torch.zeros(B, H, T, V + 1)}, "gate does not broadcast"),
    "gate's dtype": ({"gate": torch.zeros(B, H, T, V, dtype=torch.bool)}, "must be floating point"),
    "dropout": ({"dropout": 1.5}, "between 0 and 1"),
    "dropout NaN": ({"dropout": float("nan")}, "between 0 and 1"),
    "no seed": ({"dropout": 0.5}, "dropout needs a seed"),
    "two seeds": ({"dropout": 0.5, "seed": torch.zeros(2, dtype=torch.int64)}, "one element"),
    "freed": ({"dense": [emptied(torch.zeros(B, H, T, S))]}, "its storage does not hold its elements"),
}


@pytest.mark.parametrize("case", EXTRAS)
def test_refused_extras(case: str) -> None:
    extras, why = EXTRAS[case]
    with pytest.raises(RuntimeError, match=why):
        attend_full(**extras)


def test_the_plain_operator_refuses_scales() -> None:
    for scale in (1e300, -(2.0**101), 2.0**-101, 1e-300, float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match="scale must be 0 or in size from"):
            torch.ops.headwise.attend(*qkv(), scale, -FAR, FAR)
    for scale in (2.0**100, -(2.0**100), 2.0**-100, -(2.0**-100), 0.0, -0.0):
        torch.ops.headwise.attend(*qkv(), scale, -FAR, FAR)


def test_dropout_keep_refuses() -> None:
    keep, seed = torch.ops.headwise.dropout_keep, torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="sizes must lie between"):
        keep(seed, 0.5, -1, 1, 0, 1, 1)
    with pytest.raises(RuntimeError, match=r"more elements than 2\*\*63"):
        keep(seed, 0.5, FAR, FAR, 0, FAR, FAR)
    assert keep(seed, 0.5, 0, 1, 0, 1, 1).shape == (0, 1, 1, 1)


def pending(x: Tensor) -> Tensor:
    """The same numbers with torch's negative bit, as the imaginary part of a conjugate has it: memory holds -x."""
    view = torch._neg_view(x.neg())
    assert view.is_neg() and torch.equal(view, x)
    return view


@pytest.mark.parametrize("name", NAMES)
def test_views_with_pending_operations(name: str) -> None:
    """A negated view is no copy: each argument, alone or in a list, is read as the numbers it stands for.

    Where an operator writes, torch refuses such a view.
    """
    arguments = calls()[name]
    written = [x for what, x in arguments.items() if name == "append_codes" and what.endswith(("_data", "_scale"))]
    wanted = results(name, arguments)
    for what, x, put in tensors(arguments):
        if x.dtype == torch.bool:
            continue
        if any(x is one for one in written):
            with pytest.raises(RuntimeError, match="Expected Tensor but got None"):
                results(name, put(pending(x)))
            continue
        for y, right in zip(results(name, put(pending(x))), wanted, strict=True):
            assert_same_bits(y, right, what=what)
    flat, spec = pytree.tree_flatten(arguments)
    stay = [x for x in flat if not isinstance(x, Tensor) or x.dtype == torch.bool] + written
    all_of_them = [x if any(x is one for one in stay) else pending(x) for x in flat]
    for y, right in zip(results(name, pytree.tree_unflatten(all_of_them, spec)), wanted, strict=True):
        assert_same_bits(y, right)


def test_a_negated_mask_of_the_library() -> None:
    """As it came to light: the imaginary part of a conjugate as a bias, and as slopes."""
    query, key, value = qkv()
    for make, size in ((headwise.bias, (T, S)), (headwise.alibi, (H,))):
        numbers = torch.rand(size)
        view = torch.complex(torch.zeros(size), -numbers).conj().imag
        assert view.is_neg() and torch.equal(view, numbers)
        ours = headwise.attention(query, key, value, mask=make(view), backend="native")
        assert_same_bits(ours, headwise.attention(query, key, value, mask=make(numbers), backend="native"))


def test_what_cannot_be_negated_is_refused() -> None:
    """torch has no negative of a bool; complex numbers are no masks, conjugate or not."""
    with pytest.raises(RuntimeError, match="carry out what is pending on one of them"):
        attend_full(dense=[torch._neg_view(torch.ones(1, 1, T, S, dtype=torch.bool))])
    for x in (torch.ones(1, 1, T, S).cfloat(), torch.ones(1, 1, T, S).cfloat().conj()):
        with pytest.raises(RuntimeError, match="a dtype that headwise does not read"):
            attend_full(dense=[x])
        with pytest.raises(RuntimeError, match="a dtype that headwise does not read"):
            attend(x.expand(2, 4, T, S), x.expand(2, 4, T, S), x.expand(2, 4, T, S))


def test_layout_of_the_results() -> None:
    out, lse = attend_full()
    assert out.shape == (B, H, T, V) and out.transpose(1, 2).is_contiguous()
    assert lse.shape == (B, H, T) and lse.is_contiguous() and lse.dtype == torch.float32


def test_instruction_sets() -> None:
    ops = torch.ops.headwise
    names = ops.isas().split(",")
    assert names[-1] == "baseline" and ops.isa() in names
    before = ops.isa()
    assert not ops.use_isa("abacus") and ops.isa() == before


def cpp_number(name: str) -> float:
    """A constant of csrc by its name: `constexpr T kName = 4`, or `int64_t{1} << 40`, or `0x1p-100`."""
    text = "".join(path.read_text("utf8") for path in [CSRC / "call" / "attention_call.h", *CSRC.glob("binding/*")])
    (value,) = re.findall(rf"\b{name} = ([^;,]+)[;,]", text)
    return float.fromhex(value) if "p" in value else eval(re.sub(r"int64_t\{(\d+)\}", r"\1", value), {})


def test_numbers_that_python_has_too() -> None:
    """A limit that differs would be a call that Python lets through and the kernel refuses, or a mask read wrongly."""
    shared = {
        "kFar": FAR, "kPageStep": PAGE, "kMinFactor": LEAST_FACTOR, "kMaxFactor": MOST_FACTOR,
        "kSide": tiles.SIDE, "kNone": tiles.NONE, "kAll": tiles.ALL, "kBits": tiles.BITS, "kMaxPicks": MOST_OFFSETS,
        "kMaxDense": ROOM["mask tensors"], "kMaxSegments": ROOM["pairs of segments"],
        "kMaxAlibi": ROOM["rules of ALiBi"], "kMaxMaps": ROOM[MAPS],
    }  # fmt: skip
    assert {name: cpp_number(name) for name in shared} == shared


def test_the_schema_that_python_has_too() -> None:
    """`attend_train`, which Python registers, takes the arguments of `attend_kept`, which the library registers."""
    kept, train = (getattr(torch.ops.headwise, name).default._schema for name in ("attend_kept", "attend_train"))
    assert str(train).partition(" -> ")[0].replace("attend_train", "attend_kept") == str(kept).partition(" -> ")[0]
