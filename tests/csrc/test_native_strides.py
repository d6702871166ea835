"""The native kernel reads any strides: each memory layout of each tensor gives the bits of the contiguous copy.

Layouts are `headwise.testing.STRIDES` and two of the last axis; what lies in the gaps and around is NaN, or 1e30.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from backends import attend, natives
from draw import drawn
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from torch import Tensor

import headwise
from headwise.testing import STRIDES, assert_same_bits, make_qkv, strided

# The shape checker takes a third of the time of thousands of calls; it sees their kind in test_meaning.py.
pytestmark = pytest.mark.unchecked

LAST = ("expanded 3", "order 3012 and step 2")
FORMS = {
    "decoding": Sizes(2, 4, 2, 1, 70, 24, 20),
    "a few rows": Sizes(2, 2, 2, 3, 67, 11, 13),
    "many rows": Sizes(2, 6, 3, 53, 67, 24, 20),
    "odd dims": Sizes(2, 2, 1, 19, 41, 11, 13),
}
forms = pytest.mark.parametrize("n", FORMS.values(), ids=FORMS)


def lay(x: Tensor, pattern: str, slack: float = math.nan) -> Tensor:
    """`strided`, with two more patterns: the last axis of stride 0, and far apart with a gap after each entry."""
    if pattern == "expanded 3":
        return strided(x[..., :1].expand(x.shape), "odd offset", slack=slack)[..., :1].expand(x.shape)
    if pattern in LAST:
        wide = torch.full((x.shape[3], *x.shape[:2], 2 * x.shape[2] + 1), slack, dtype=torch.float64).to(x.dtype)
        return wide[..., 1::2].permute(1, 2, 3, 0).copy_(x)
    return strided(x, pattern, slack=slack)


def layouts(x: Tensor, slack: float = math.nan) -> Iterator[tuple[str, Tensor]]:
    for pattern in (*STRIDES, *LAST):
        yield pattern, lay(x, pattern, slack)


def once(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with contiguous tensors; the same numbers are computed once."""
    known: dict[Any, Any] = {}

    def clean(**plain: Tensor) -> Any:
        numbers = ((name, x.dtype, x.shape, torch.cat((x.flatten(),)).view(torch.uint8)) for name, x in plain.items())
        key = tuple((*what, data.numpy().tobytes()) for *what, data in numbers)
        if key not in known:
            known[key] = call(**plain)
        return known[key]

    return clean


def same(call: Callable[..., Any], odd: dict[str, Tensor], clean: Callable[..., Any] | None = None) -> None:
    """The call with odd tensors is the call with their contiguous copies, to the bit."""
    ours = call(**odd)
    theirs = (clean or call)(**{name: x.contiguous() for name, x in odd.items()})
    for x, y, what in zip(ours, theirs, ("out", "lse"), strict=False):
        assert_same_bits(x, y, what=what)
        assert not bool(x.isnan().any()), f"{what}: a gap was read"


@native_dtypes
@forms
def test_query_key_and_value(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    tensors = dict(zip(("query", "key", "value"), make_qkv(*n, dtype=dtype), strict=True))

    def call(**change: Tensor) -> Any:
        return attend(backend, **{**tensors, **change}, mask=headwise.causal(), return_lse=True)

    clean = once(call)
    with collected() as attempt:
        for name, pattern in drawn([*product(tensors, (*STRIDES, *LAST))]):
            attempt(f"{name}, {pattern}", same, call, {name: lay(tensors[name], pattern)}, clean)


@native_dtypes
@forms
def test_all_three_at_once(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Each with a layout of its own, and 1e30 in the gaps; also without lse, which is another operator."""
    q, k, v = make_qkv(*n, dtype=dtype)
    every = (*STRIDES, *LAST)
    slack = min(1e30, torch.finfo(dtype).max)
    with collected() as attempt:
        for i in drawn(range(len(every))):
            odd = {
                name: lay(x, every[(i * step + shift) % len(every)], slack)
                for name, x, step, shift in (("query", q, 1, 0), ("key", k, 2, 5), ("value", v, 3, 11))
            }
            attempt(f"{i}", same, lambda **x: [attend(backend, **x)], odd)


@native_dtypes
@forms
def test_projections_as_they_come(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """One projection (B, T, (H + K + K) * D), split and transposed: what a model hands over, nothing copied."""
    B, H, K, T, _, D, _ = n
    fused = make_qkv(B, 1, 1, T, 1, (H + 2 * K) * D, 1, dtype=dtype)[0][:, 0]
    q, k, v = (x.unflatten(2, (-1, D)).transpose(1, 2) for x in fused.split([H * D, K * D, K * D], dim=2))
    assert T == 1 or not (q.is_contiguous() or k.is_contiguous() or v.is_contiguous())
    ours = attend(backend, q, k, v, mask=headwise.causal())
    assert_same_bits(ours, attend(backend, q.contiguous(), k.contiguous(), v.contiguous(), mask=headwise.causal()))


@pytest.mark.sweep
@native_dtypes
@forms
def test_dense_masks(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """keep and bias in every layout, and in every broadcast form of a layout."""
    B, H, T, S = n.B, n.H, n.T, n.S
    qkv = make_qkv(*n, dtype=dtype)
    source = torch.Generator().manual_seed(3)
    kept, added = torch.rand(B, H, T, S, generator=source) > 0.4, torch.randn(B, H, T, S, generator=source)
    shapes = [(a, b, c, d) for a in (1, B) for b in (1, H) for c in (1, T) for d in (1, S)]

    def call(x: Tensor) -> Any:
        mask = headwise.keep(x) if x.dtype == torch.bool else headwise.bias(x)
        return attend(backend, *qkv, mask=mask, return_lse=True)

    clean = once(call)
    with collected() as attempt:
        for x in (kept, added, added.to(dtype), added.double()):
            for pattern in drawn((*STRIDES, *LAST)):
                attempt(f"{x.dtype}, {pattern}", same, call, {"x": lay(x, pattern)}, clean)
            patterns = ("step 3 in 3", "order 0132", "odd offset", "step 2 in 2", "expanded")
            for shape, pattern in drawn([*product(shapes, patterns)]):
                part = x[tuple(slice(0, size) for size in shape)]
                odd = part.expand(B, H, T, S) if pattern == "expanded" else lay(part, pattern)
                attempt(f"{x.dtype} {shape}, {pattern}", same, call, {"x": odd}, clean)


@natives
@forms
def test_masks_of_integers_sinks_gates_and_slopes(backend: str, n: Sizes) -> None:
    """Small tensors need not be packed either, nor be int64."""
    qkv = make_qkv(*n)
    B, H, T, S = n.B, n.H, n.T, n.S
    source = torch.Generator().manual_seed(4)

    def spread(x: Tensor, last: bool = True) -> Tensor:
        """Every third entry of a longer tensor, or with its axes swapped in memory."""
        wide = torch.full((*x.shape[:-1], 3 * x.shape[-1] + 2), 77).to(x.dtype)[..., 2:]
        return wide[..., ::3][..., : x.shape[-1]].copy_(x) if last else x.mT.contiguous().mT

    ids = {"T": torch.randint(3, (B, T), generator=source), "S": torch.randint(3, (B, S), generator=source)}
    gate = torch.rand(B, H, T, n.V, generator=source)
    cases: dict[str, Callable[[Callable[[Tensor], Tensor]], dict[str, Any]]] = {
        "lengths": lambda f: {"mask": headwise.lengths(f(torch.tensor([S, S - 2])), f(torch.tensor([0, 3])))},
        "offset": lambda f: {"mask": headwise.window(30, 1, offset=f(torch.tensor([S - T, S - T - 2])))},
        "segments": lambda f: {"mask": headwise.segments(f(ids["T"]), f(ids["S"]))},
        "segments of all": lambda f: {"mask": headwise.segments(f(ids["T"][0]), f(ids["S"][:1]))},
        "slopes": lambda f: {"mask": headwise.alibi(f(headwise.alibi_slopes(H)))},
        "slopes (B,)": lambda f: {"mask": headwise.alibi(f(torch.rand(B, H)))},
        "sinks": lambda f: {"sinks": f(torch.linspace(-1, 1, H))},
        **{
            f"gate of {rank}": lambda f, r=rank: {
                "gate": f(gate[:1, :, 0, 0].view(H) if r == 1 else gate[(..., *[0] * (4 - r))])
            }
            for rank in (1, 2, 3, 4)
        },
    }
    forms_of = {
        "spread": spread,
        "int32": lambda x: x.int() if x.dtype == torch.int64 else x,
        "swapped": lambda x: spread(x, last=x.ndim < 2),
    }
    with collected() as attempt:
        for name, make in cases.items():
            torch.manual_seed(0)
            plain = attend(backend, *qkv, **make(lambda x: x.contiguous()), return_lse=True)
            for form, change in forms_of.items():
                torch.manual_seed(0)
                ours = attend(backend, *qkv, **make(change), return_lse=True)
                for x, y in zip(ours, plain, strict=True):
                    attempt(f"{name}, {form}", assert_same_bits, x, y)


@native_dtypes
def test_out_lies_batch_time_head(backend: str, dtype: torch.dtype) -> None:
    """Its memory is (B, T, H, V), so that joining the heads copies nothing; the same for any strides in."""
    n = FORMS["many rows"]
    q, k, v = make_qkv(*n, dtype=dtype)
    for query in (q, lay(q, "order 3210")):
        out = attend(backend, query, k, v)
        assert out.transpose(1, 2).is_contiguous() and out.storage_offset() == 0
        lse = attend(backend, query, k, v, return_lse=True)[1]
        assert lse.is_contiguous()


def test_there_are_thirty_layouts_and_they_differ() -> None:
    x = make_qkv(2, 3, 1, 5, 1, 7, 1)[0]
    laid = {(odd.stride(), odd.storage_offset()) for _, odd in layouts(x)}
    assert len(laid) == len(STRIDES) + len(LAST) >= 35
    assert_same_bits(lay(x, LAST[1]), x)
    assert_same_bits(lay(x, LAST[0]), x[..., :1].expand(x.shape).contiguous())


def test_a_gap_that_is_read_would_be_seen() -> None:
    """A kernel that takes every tensor for a contiguous one reads gaps and neighbours."""
    tensors = dict(zip(("query", "key", "value"), make_qkv(*FORMS["many rows"]), strict=True))

    def careless(**change: Tensor) -> Any:
        flat = {
            name: x.as_strided(x.shape, x.contiguous().stride()) if name in change else x
            for name, x in {**tensors, **change}.items()
        }
        return headwise.attention(**flat, return_lse=True, backend="blocks")

    for name, x in tensors.items():
        for pattern in ("order 0213", "step 2 in 2", "order 3012 and step 2"):
            with pytest.raises(AssertionError):
                same(careless, {name: lay(x, pattern)})
