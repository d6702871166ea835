"""What may not be attended changes no bit of any gradient, and what may be attended shows in those that read it.

Poison is NaN, the infinities, 1e4 and 1e30: in keys, values, queries, biases and in what comes from behind. The masks
are those of `test_native_poison`: each leaves keys that nobody sees, and some leave rows that see nobody.
"""

from __future__ import annotations

import math

import pytest
import torch
from backends import instructions
from draw import drawn
from gradient_cases import Case, Leaves
from mask_cases import Sizes
from native_cases import collected, native_dtypes
from test_interference import split_rows
from test_native_poison import MASKS, POISONS, made, source
from torch import Tensor

import headwise
from headwise import Mask
from headwise.testing import assert_same_bits, poison, strided

pytestmark = pytest.mark.unchecked

FORMS = {
    "a query": Sizes(2, 4, 2, 1, 131, 24, 17),
    "a few rows": Sizes(2, 2, 2, 3, 131, 13, 11),
    "many rows": Sizes(2, 4, 2, 67, 131, 24, 17),
    "many blocks": Sizes(2, 2, 1, 150, 260, 16, 16),
}
forms = pytest.mark.parametrize("n", FORMS.values(), ids=FORMS)


def call(backend: str, arguments: dict[str, Tensor], mask: Mask) -> Leaves:
    """The gradient of each tensor of `arguments`, but for the one from behind."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items() if name != "gradient"}
    rules = (*mask.parts, *headwise.bias(leaves["bias"]).parts) if "bias" in leaves else mask.parts
    with instructions(backend) as name:
        qkv = (leaves[x] for x in ("query", "key", "value"))
        out = headwise.attention(*qkv, mask=Mask(rules), sinks=leaves["sinks"], backend=name)
        grads = torch.autograd.grad(out, list(leaves.values()), arguments["gradient"])
    return dict(zip(leaves, grads, strict=True))


def inputs(n: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    case = Case(n, dtype, sinks=True)
    return {**case.leaves(), "gradient": case.upstream()[0]}


def of_group(rows: Tensor, K: int) -> Tensor:
    """Whether any query head of the group has it: (B, H, ...) to (B, K, ...)."""
    return rows.unflatten(1, (K, -1)).any(2)


def check(
    backend: str, n: Sizes, name: str, arguments: dict[str, Tensor], clean: Leaves, bad: Tensor, what: str
) -> None:
    """Rows `bad` (B, H, T) meet the poison: they and the keys they attend may show it, nothing else changes a bit."""
    mask, sees = made(name, n)
    keys = of_group(sees & bad[..., None], n.K).any(2)
    ours = call(backend, arguments, mask)
    heads = bad.any(0).any(-1)
    for leaf, touched in (("query", bad), ("key", keys), ("value", keys), ("sinks", heads)):
        assert_same_bits(ours[leaf][~touched], clean[leaf][~touched], what=f"gradient of {leaf}")
    if "bias" in ours:
        pairs = sees & bad[..., None]
        assert_same_bits(ours["bias"][~pairs], clean["bias"][~pairs], what="gradient of bias")
    if what in ("nan", "inf", "-inf"):
        for leaf, touched in (("query", bad), ("key", keys), ("sinks", heads)):
            shown = ours[leaf][touched]
            assert not bool(shown.isfinite().any()), f"it does not show in the gradient of {leaf}"


@native_dtypes
@forms
def test_keys_and_values_that_no_row_attends(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Beyond all lengths, in everyone's future: the bits of the run with zeros there, and a gradient of exactly 0."""
    arguments = inputs(n, dtype)
    nobody = torch.zeros(n.B, n.H, n.T, dtype=torch.bool)
    zero = torch.zeros((), dtype=dtype)
    with collected() as attempt:
        for name in drawn([*MASKS]):
            mask, sees = made(name, n)
            unseen = ~of_group(sees, n.K).any(2)[..., None]
            if not unseen.any():
                continue
            quiet = {x: y.where(~unseen, zero) if x in ("key", "value") else y for x, y in arguments.items()}
            clean = call(backend, quiet, mask)
            for leaf in ("key", "value"):
                attempt(f"{name}, 0", _is_zero, clean[leaf].masked_select(unseen))
            for what in POISONS:
                bad = {x: poison(y, unseen, what) if x in ("key", "value") else y for x, y in arguments.items()}
                attempt(f"{name}, {what}", check, backend, n, name, bad, clean, nobody, "unseen")


def _is_zero(x: Tensor) -> None:
    assert bool((x == 0).all()), f"{int((x != 0).sum())} of {x.numel()} entries are not 0"


@pytest.mark.sweep
@native_dtypes
@forms
@pytest.mark.parametrize("leaf", ["key", "value", "query", "gradient"])
def test_what_some_rows_attend(backend: str, dtype: torch.dtype, n: Sizes, leaf: str) -> None:
    """Rows that do not meet it, and the keys that no such row attends, keep every bit."""
    arguments = inputs(n, dtype)
    keys = torch.rand(n.B, n.K, n.S, generator=source(n)) < 0.02
    keys[0, :, 70] = True
    keys[0, 0, 40] = True
    rows = torch.rand(n.B, n.H, n.T, generator=source(n)) < (0.1 if n.T > 9 else 0.4)
    with collected() as attempt:
        for name in drawn([*MASKS]):
            mask, sees = made(name, n)
            clean = call(backend, arguments, mask)
            bad = split_rows(sees, keys)[0] if leaf in ("key", "value") else rows & sees.any(-1)
            where = keys if leaf in ("key", "value") else rows
            for what in POISONS[:3]:
                spoiled = {**arguments, leaf: poison(arguments[leaf], where[..., None], what)}
                attempt(f"{name}, {what}", check, backend, n, name, spoiled, clean, bad, str(what))


@native_dtypes
@pytest.mark.parametrize("leaf", ["key", "value", "query", "gradient"])
def test_one_entry_is_enough(backend: str, dtype: torch.dtype, leaf: str) -> None:
    """NaN in the first or the last entry of one row of a tensor."""
    n = FORMS["many rows"]
    arguments, name = inputs(n, dtype), "causal"
    mask, sees = made(name, n)
    clean = call(backend, arguments, mask)
    place = 70 if leaf in ("key", "value") else n.T - 1
    with collected() as attempt:
        for entry in (0, arguments[leaf].shape[3] - 1):
            x = arguments[leaf].clone()
            x[0, 0, place, entry] = math.nan
            bad = torch.zeros(n.B, n.H, n.T, dtype=torch.bool)
            if leaf in ("key", "value"):
                bad[0, : n.H // n.K] = sees[0, : n.H // n.K, :, place]
            else:
                bad[0, 0, place] = True
            attempt(f"entry {entry}", check, backend, n, name, {**arguments, leaf: x}, clean, bad, "nan")


@pytest.mark.sweep
@native_dtypes
@forms
def test_biases_where_another_rule_forbids(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """A bias there is never met, and gets a gradient of 0; where nothing forbids, a NaN shows."""
    added = torch.randn(n.B, n.H, n.T, n.S, generator=source(n))
    arguments = {**inputs(n, dtype), "bias": added}
    nobody = torch.zeros(n.B, n.H, n.T, dtype=torch.bool)
    with collected() as attempt:
        for name in drawn([*MASKS]):
            mask, sees = made(name, n)
            clean = call(backend, arguments, mask)
            attempt(f"{name}, 0", _is_zero, clean["bias"][~sees])
            for what in POISONS:
                bad = {**arguments, "bias": poison(added, ~sees, what)}
                attempt(f"{name}, {what}", check, backend, n, name, bad, clean, nobody, "unseen")
            spots = torch.rand(sees.shape, generator=source(n)) < 0.005
            bad = {**arguments, "bias": poison(added, spots)}
            attempt(f"{name}, seen", check, backend, n, name, bad, clean, (spots & sees).any(-1), "nan")


@pytest.mark.sweep
@native_dtypes
@forms
def test_around_and_between(backend: str, dtype: torch.dtype, n: Sizes) -> None:
    """Before, after and in the gaps of every buffer: the bits of the run with zeros there."""
    bias = torch.randn(n.B, n.H, n.T, n.S, generator=source(n))
    arguments = {**inputs(n, dtype), "bias": bias}
    mask = made("causal", n)[0]

    def spread(pattern: str, slack: float) -> Leaves:
        odd = {name: strided(x, pattern, slack=slack) if x.ndim == 4 else x for name, x in arguments.items()}
        return call(backend, odd, mask)

    with collected() as attempt:
        for pattern in ("order 0132", "order 0213", "step 3 in 3", "step 2 in 2", "rows padded by 3", "odd offset"):
            zeros = spread(pattern, 0.0)
            for slack in (math.nan, math.inf, 1e4):
                for leaf, x in spread(pattern, slack).items():
                    attempt(f"{pattern}, {slack}, {leaf}", assert_same_bits, x, zeros[leaf])


def test_these_tests_can_fail() -> None:
    """The definition written in plain torch lets a masked NaN through: 0 * NaN."""
    n = FORMS["many rows"]
    _, sees = made("keep", n)
    arguments = inputs(n, torch.float32)
    unseen = ~of_group(sees, n.K).any(2)[..., None]
    nowhere = ~unseen[..., :0].any(-1, keepdim=True) & False
    leaves = {name: poison(arguments[name], unseen if name == "value" else nowhere) for name in ("key", "value")}
    q, k, v = (x.detach().requires_grad_() for x in (arguments["query"], leaves["key"], leaves["value"]))
    k2, v2 = (x.repeat_interleave(2, 1) for x in (k, v))
    out = torch.softmax((q @ k2.mT).masked_fill(~sees, -math.inf), -1) @ v2
    grad = torch.autograd.grad(out, q, arguments["gradient"])[0]
    with pytest.raises(AssertionError, match="differ in their bits"):
        assert_same_bits(grad, torch.zeros_like(grad))
    with pytest.raises(AssertionError, match="are not 0"):
        _is_zero(grad.nan_to_num(1.0))
