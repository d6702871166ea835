"""Every mask and option through the native kernel, across its tiles: against float64, with lse.

`test_meaning.py` holds each mask against its definition as a loop, at small sizes and by every backend. Here the same
masks cross tiles and splits, in every dtype; then dense masks of every broadcast form and dtype, ALiBi, softcap,
sinks, gates, and calls that hold more rules than the kernel's operator takes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache, reduce
from operator import and_
from typing import Any

import pytest
import torch
from backends import attend, natives
from draw import drawn
from mask_cases import MASKS, Sizes
from native_cases import DTYPES, Answer, answer_of, check, collected, native_dtypes
from torch import Tensor

import headwise
from headwise import Mask
from headwise.testing import assert_same_bits, make_qkv

pytestmark = pytest.mark.unchecked

FORMS = {
    "many rows": Sizes(2, 6, 3, 67, 131, 19, 17),
    "a chunk": Sizes(2, 6, 3, 9, 193, 16, 24),
    "decoding": Sizes(2, 6, 3, 1, 131, 19, 17),
    "decoding, split": Sizes(2, 2, 1, 1, 1031, 16, 16),
    "more queries than keys": Sizes(2, 2, 1, 131, 67, 16, 16),
}
forms = pytest.mark.parametrize("form", FORMS)
# Several rules at once, long enough for tiles that are empty, mixed and full.
LONG: dict[str, Any] = {
    "window 40": lambda n: headwise.window(40, 5),
    "causal & window 33": lambda n: headwise.causal() & headwise.window(33, None),
    "documents": lambda n: headwise.causal() & headwise.segments(_steps(n.T, 23, n.S - n.T), _steps(n.S, 23, 0)),
    "documents (B,)": lambda n: headwise.segments(_both(n, n.T, n.S - n.T), _both(n, n.S, 0)),
    "lengths & window": lambda n: headwise.lengths(torch.tensor([n.S, n.S // 3])) & headwise.window(20, 9),
    "keep of a block": lambda n: headwise.keep(_block(n, 64, 128)),
    "two keeps": lambda n: headwise.keep(_block(n, 30, 100)) & headwise.keep(~_block(n, 50, 70)),
}


def _steps(count: int, size: int, first: int) -> Tensor:
    return (torch.arange(count) + first) // size


def _both(n: Sizes, count: int, first: int) -> Tensor:
    return torch.stack([_steps(count, 17, first), _steps(count, 41, first)])[: n.B]


def _block(n: Sizes, start: int, stop: int) -> Tensor:
    keys = torch.arange(n.S)
    return (keys < start) | (keys >= stop)


@cache
def wanted(form: str, name: str, dtype: torch.dtype) -> Answer:
    n = FORMS[form]
    mask = MASKS[name](n).mask if name in MASKS else LONG[name](n)
    return answer_of(make_qkv(*n, dtype=dtype), mask=mask)


@pytest.mark.sweep
@native_dtypes
@forms
def test_every_mask(backend: str, dtype: torch.dtype, form: str) -> None:
    with collected() as attempt:
        for name in drawn((*MASKS, *LONG)):
            attempt(name, check, backend, wanted(form, name, dtype))


@cache
def with_options(form: str, name: str | None, options: tuple[str, ...], dtype: torch.dtype) -> Answer:
    n = FORMS[form]
    source = torch.Generator().manual_seed(5)
    known: dict[str, Any] = {
        "softcap": 1.3,
        "scale": -0.3,
        "sinks": torch.randn(n.H, generator=source, dtype=torch.float64).to(dtype),
    }
    arguments = {key: known[key] for key in options}
    return answer_of(make_qkv(*n, dtype=dtype), **arguments, mask=None if name is None else MASKS[name](n).mask)


@pytest.mark.sweep
@native_dtypes
@forms
def test_options_with_every_kind_of_mask(backend: str, dtype: torch.dtype, form: str) -> None:
    names = (None, "causal", "window 3 2", "lengths start", "segments (B,)", "keep BHTS", "bias BHTS", "alibi (B,)")
    with collected() as attempt:
        every = [x for k in range(1, 4) for x in itertools.combinations(("softcap", "scale", "sinks"), k)]
        for name, options in drawn([*itertools.product((*names, "all kinds"), every)]):
            attempt(f"{name}, {options}", check, backend, with_options(form, name, options, dtype))


@cache
def dense_answers(form: str, dtype: torch.dtype) -> list[tuple[str, Answer]]:
    """Bool, and floats of each dtype, in all sixteen broadcast forms of four axes and with fewer axes."""
    n = FORMS[form]
    qkv = make_qkv(*n, dtype=dtype)
    full = torch.rand(n.B, n.H, n.T, n.S, generator=torch.Generator().manual_seed(6))
    shapes = [((a, b, c, d), 4) for a in (1, n.B) for b in (1, n.H) for c in (1, n.T) for d in (1, n.S)]
    shapes += [((1, n.H, n.T, n.S), 3), ((1, 1, n.T, n.S), 2), ((1, 1, 1, n.S), 1)]
    answers = []
    for (shape, axes), kind in drawn([*itertools.product(shapes, (torch.bool, torch.float64, *DTYPES))]):
        part = full[tuple(slice(0, size) for size in shape)].reshape(shape[4 - axes :])
        bias = (3 * part - 1).masked_fill(part < 0.2, -math.inf)
        mask = headwise.keep(part > 0.4) if kind == torch.bool else headwise.bias(bias.to(kind))
        answers.append((f"{kind} {tuple(part.shape)}", answer_of(qkv, mask=mask)))
    return answers


@pytest.mark.sweep
@native_dtypes
@forms
def test_dense_masks_of_every_form(backend: str, dtype: torch.dtype, form: str) -> None:
    with collected() as attempt:
        for what, wanted in dense_answers(form, dtype):
            attempt(what, check, backend, wanted)


@cache
def alibi_answers(form: str, dtype: torch.dtype) -> list[Answer]:
    """Slopes (H,) and (B, H), offsets of each kind, two rules at once; slopes in the query's dtype."""
    n = FORMS[form]
    slopes = headwise.alibi_slopes(n.H)
    batched = torch.rand(n.B, n.H, generator=torch.Generator().manual_seed(7))
    offsets = (None, 0, 70, -5, 1000, torch.tensor([3]), torch.tensor([n.S - n.T, 11]))
    masks = [headwise.alibi(s, offset=o) for s in (slopes, batched) for o in offsets]
    masks += [headwise.alibi(slopes) & headwise.alibi(batched, offset=3), headwise.causal() & headwise.alibi(slopes)]
    masks += [headwise.alibi(slopes.to(dtype)), headwise.alibi(-slopes) & headwise.window(30, 30)]
    return [answer_of(make_qkv(*n, dtype=dtype), mask=mask) for mask in masks]


@pytest.mark.sweep
@native_dtypes
@forms
def test_alibi(backend: str, dtype: torch.dtype, form: str) -> None:
    with collected() as attempt:
        for number, wanted in enumerate(alibi_answers(form, dtype)):
            attempt(number, check_relative, backend, wanted)


def check_relative(backend: str, wanted: Answer) -> None:
    """`check`, the largest score being what the bias makes it: far keys leave few bits."""
    mask, (T, S) = wanted.options["mask"], (wanted.out.shape[2], wanted.qkv[1].shape[2])
    tallest = wanted.tallest + float(mask.added(T, S).abs().nan_to_num(posinf=0).max())
    check(backend, replace(wanted, tallest=tallest))


@pytest.mark.sweep
@native_dtypes
@forms
def test_gates(backend: str, dtype: torch.dtype, form: str) -> None:
    """Of each rank and with axes of 1: the output times the gate, rounded once."""
    n = FORMS[form]
    qkv = make_qkv(*n, dtype=dtype)
    plain = exact_out(backend, qkv)
    shapes = [(n.H,), (n.B, n.H), (1, n.H), (n.B, n.H, n.T), (1, 1, n.T), (n.B, n.H, n.T, n.V), (n.B, 1, 1, n.V)]
    with collected() as attempt:
        for shape in shapes:
            gate = torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(dtype)
            full = gate.view(1, n.H, 1, 1) if gate.ndim == 1 else gate[(...,) + (None,) * (4 - gate.ndim)]
            ours = attend(backend, *qkv, mask=headwise.causal(), gate=gate)
            attempt(shape, close_to_product, ours, plain, full.double())
        nothing = attend(backend, *qkv, gate=torch.zeros(n.H, dtype=dtype))
        attempt("zero", lambda: (nothing == 0).all() or pytest.fail("a gate of 0 leaves something"))


def exact_out(backend: str, qkv: Any) -> Tensor:
    out: Tensor = attend(backend, *qkv, mask=headwise.causal())
    return out.double()


def close_to_product(ours: Tensor, plain: Tensor, gate: Tensor) -> None:
    """Within two roundings of the product: ours may gate before it rounds or after."""
    eps = torch.finfo(ours.dtype).eps
    product = plain * gate
    worst = float(((ours.double() - product).abs() - 1.01 * eps * product.abs()).max())
    assert worst <= torch.finfo(ours.dtype).tiny, f"off by {worst:.2e} more than two roundings"


@natives
@forms
def test_equal_ways_to_say_it(backend: str, form: str) -> None:
    """The same bits whether a rule is a number, a tensor, or joined from two."""
    n = FORMS[form]
    qkv = make_qkv(*n)
    shift = n.S - n.T
    same: list[list[Mask | None]] = [
        [headwise.causal(), headwise.causal(offset=shift), headwise.causal(offset=torch.tensor([shift]))],
        [
            headwise.window(9),
            headwise.window(9, offset=torch.tensor([shift] * n.B)),
            headwise.window(9) & headwise.causal(),
        ],
        [
            None,
            headwise.window(None, None),
            headwise.lengths(torch.tensor([n.S])),
            headwise.window(n.S + n.T, n.S + n.T),
        ],
        [headwise.lengths(torch.tensor([60])), headwise.lengths(torch.tensor([60] * n.B), torch.tensor([-5]))],
        [headwise.causal(offset=-1 << 40), headwise.lengths(torch.tensor([-7])), headwise.window(1, offset=1 << 40)],
    ]
    with collected() as attempt:
        for number, masks in enumerate(same):
            first = attend(backend, *qkv, mask=masks[0], return_lse=True)
            for mask in masks[1:]:
                for x, y in zip(attend(backend, *qkv, mask=mask, return_lse=True), first, strict=True):
                    attempt(f"{number}: {mask}", assert_same_bits, x, y)


@natives
def test_as_many_rules_as_the_operator_takes(backend: str) -> None:
    """Eight dense masks, four pairs of segments, four ALiBi, any number of bands and lengths, all at once."""
    for n in (FORMS["many rows"], FORMS["decoding"]):
        source = torch.Generator().manual_seed(9)
        dense = [headwise.keep(torch.rand(n.B, 1, n.T, n.S, generator=source) > 0.05) for _ in range(4)]
        dense += [headwise.bias(torch.randn(1, n.H, 1, n.S, generator=source)) for _ in range(4)]
        ids = [(torch.randint(9, (x,), generator=source) == 0).long() for x in (n.T, n.S) * 4]
        parts = [headwise.segments(q, k) for q, k in zip(ids[::2], ids[1::2], strict=True)]
        parts += [headwise.alibi(0.01 * headwise.alibi_slopes(n.H), offset=i) for i in range(4)]
        parts += [headwise.window(100 + i, 80 - i) for i in range(5)]
        parts += [headwise.lengths(torch.tensor([n.S - i]), torch.tensor([i])) for i in range(5)]
        check_relative(backend, answer_of(make_qkv(*n), mask=reduce(and_, [*dense, *parts])))


def test_these_tests_can_fail() -> None:
    """A mask one key too wide, in each dtype, lies outside the budgets."""
    for dtype in DTYPES:
        right = wanted("many rows", "window 40", dtype)
        wrong = answer_of(right.qkv, mask=headwise.window(41, 5))
        with pytest.raises(AssertionError):
            check("reference", replace(right, options=wrong.options))


@natives
def test_parts_of_the_keys_of_which_few_are_reached(backend: str) -> None:
    """Few rows cut the keys into parts of 1,024, of which those that no row reaches are left out."""
    with collected() as attempt:
        for T in (3, 12):
            for what, mask, S in (
                ("the first keys alone, none of the window", headwise.window(40, first=1100), 3000),
                ("one key of the last row", headwise.causal(), 1025),
                ("one key of the first row", headwise.window(40), 1023 + 39 + T),
            ):
                q, k, v = make_qkv(1, 2, 1, T, S, 16, 16)
                ours, theirs = (attend(name, q, k, v, mask=mask) for name in (backend, "reference"))
                # a constant: one key of 1,025 moves a result by a thousandth
                attempt(f"{what}, T = {T}", torch.testing.assert_close, ours, theirs, rtol=0, atol=1e-5)
