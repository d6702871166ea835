"""`headwise.weights`: the exact scores of chosen rows and heads at each stage, and nothing of the rest."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from loops import inside
from mask_cases import LONG, MASKS, SHORT, SIZES, Sizes, dense
from test_meaning import EMPTY_ROWS, options_of
from torch import Tensor

import headwise
from headwise.testing import POISONS, STRIDES, assert_same_bits, largest_tensor, make_qkv, poison, strided

OPTIONS = {"scale": 0.9, "softcap": 1.3}
STAGES = ("raw", "softcapped", "biased", "probabilities")


def stages(name: str, n: Sizes, sinks: Tensor | None = None) -> dict[str, Tensor]:
    """All four stages in float64, from the mask's definition as a loop."""
    q, k, _ = (x.double() for x in make_qkv(*n))
    allowed, added = dense(name, n)
    raw = OPTIONS["scale"] * (q @ k.repeat_interleave(n.H // n.K, 1).mT)
    capped = OPTIONS["softcap"] * torch.tanh(raw / OPTIONS["softcap"])
    biased = (capped + added).masked_fill(~allowed, -math.inf)
    sink = torch.full((n.H,), -math.inf) if sinks is None else sinks
    logits = torch.cat([biased, sink.double().view(1, -1, 1, 1).expand(n.B, n.H, n.T, 1)], -1)
    p = torch.softmax(logits, -1)[..., :-1].masked_fill(~allowed.any(-1, keepdim=True), 0)
    return {"raw": raw, "softcapped": capped, "biased": biased, "probabilities": p}


@pytest.mark.parametrize("mask", MASKS)
@inside("n", SIZES)
def test_every_stage(mask: str, n: Sizes) -> None:
    q, k, _ = make_qkv(*n)
    for stage, exact in stages(mask, n).items():
        options: dict[str, Any] = {"mask": MASKS[mask](n).mask, "stage": stage, **OPTIONS}
        ours = headwise.weights(q, k, **options)
        assert ours.shape == (n.B, n.H, n.T, n.S) and ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6)


def test_stages_without_their_option_are_the_stage_before() -> None:
    q, k, _ = make_qkv(*SHORT)
    raw = headwise.weights(q, k, stage="raw")
    assert_same_bits(headwise.weights(q, k, stage="softcapped"), raw)
    assert_same_bits(headwise.weights(q, k, stage="biased"), raw)
    torch.testing.assert_close(raw, q @ k.repeat_interleave(2, 1).mT * SHORT.D**-0.5, rtol=1e-5, atol=1e-5)


ROWS: list[tuple[Any, Any]] = [
    (None, None),
    (3, 2),
    (-1, -2),
    ([4, 0, 4], [5, 1]),
    (slice(1, 4), slice(None, None, 2)),
    (torch.tensor([2]), torch.tensor([0, 5])),
    (slice(0, 0), None),
    ([], None),
    (-SHORT.T, -SHORT.H),
]


@pytest.mark.parametrize(("rows", "heads"), ROWS)
@pytest.mark.parametrize("mask", ["causal", "all kinds", "alibi (B,)", "keep BHTS"])
def test_chosen_rows_and_heads_are_those_of_the_whole(mask: str, rows: Any, heads: Any) -> None:
    n = SHORT
    q, k, _ = make_qkv(*n)
    options: dict[str, Any] = {"mask": MASKS[mask](n).mask, "sinks": options_of("sinks", n)["sinks"], **OPTIONS}
    some = lambda pick: [pick] if isinstance(pick, int) else slice(None) if pick is None else pick  # noqa: E731
    for stage in STAGES:
        options["stage"] = stage
        whole = headwise.weights(q, k, **options)
        ours = headwise.weights(q, k, rows=rows, heads=heads, **options)
        expected = whole[:, some(heads)][:, :, some(rows)]
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", ["causal", "bias BHTS", "all kinds", "lengths start"])
def test_weights_are_what_attention_used(mask: str) -> None:
    """weights @ values is the output; a row sums to 1, to exp(lse)'s share with a sink, to 0 where it is empty."""
    n = LONG
    q, k, v = make_qkv(*n)
    for extra in ("plain", "sinks"):
        options = options_of(extra, n)
        made = MASKS[mask](n).mask
        out, lse = headwise.attention(q, k, v, mask=made, return_lse=True, **options)
        p = headwise.weights(q, k, mask=made, **options)
        torch.testing.assert_close(p @ v.repeat_interleave(n.H // n.K, 1), out, rtol=1e-5, atol=1e-6)
        alive = dense(mask, n)[0].any(-1)
        sink = options.get("sinks", torch.full((n.H,), -math.inf)).view(1, -1, 1)
        share = torch.where(alive, 1 - torch.exp(sink - lse), 0)
        torch.testing.assert_close(p.sum(-1), share, rtol=1e-5, atol=1e-6)
        assert bool((p >= 0).all())
        s = headwise.weights(q, k, mask=made, stage="biased", **options)
        again = torch.exp(s - lse.masked_fill(~alive, 0)[..., None])
        torch.testing.assert_close(again, p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_that_may_attend_nothing(name: str) -> None:
    n, mask = SHORT, EMPTY_ROWS[name]
    q, k, _ = make_qkv(*n, requires_grad=True)
    empty = ~mask.allowed(n.T, n.S).expand(n.B, n.H, n.T, n.S).any(-1)  # type: ignore[union-attr]
    for options in ({}, options_of("sinks", n)):
        p = headwise.weights(q, k, mask=mask, **options)
        assert bool((p[empty] == 0).all()) and bool(p.isfinite().all())
        assert bool((headwise.weights(q, k, mask=mask, stage="biased", **options)[empty] == -math.inf).all())
        grad_q, grad_k = torch.autograd.grad((p * p).sum(), (q, k))
        assert bool((grad_q[empty] == 0).all()) and bool(grad_k.isfinite().all())


@pytest.mark.parametrize("what", POISONS)
@pytest.mark.parametrize("mask", ["causal", "keep BHTS", "lengths", "all kinds"])
def test_poison_where_nothing_may_look(mask: str, what: float) -> None:
    n = SHORT
    q, k, _ = make_qkv(*n)
    made, (sees, _) = MASKS[mask](n).mask, dense(mask, n)
    keys = torch.rand(n.B, n.K, n.S, generator=torch.Generator().manual_seed(1)) < 0.4
    bad = poison(k, keys[..., None], what)
    met = (sees & keys.repeat_interleave(n.H // n.K, 1)[:, :, None]).any(-1)
    for stage in STAGES[2:]:
        options: dict[str, Any] = {"mask": made, "stage": stage}
        clean, ours = headwise.weights(q, k, **options), headwise.weights(q, bad, **options)
        assert_same_bits(ours[~met], clean[~met], what=stage)
        if math.isnan(what):
            assert bool(ours[met].isnan().any(-1).all()), "what may be attended does not show"


@pytest.mark.parametrize("what", POISONS)
@pytest.mark.parametrize("mask", ["causal", "keep BHTS", "lengths", "all kinds"])
def test_poison_in_gradients(mask: str, what: float) -> None:
    """Rows that do not meet it keep every bit of their gradient, and where the loss leaves out the others, all do."""
    n = SHORT
    q, k, _ = make_qkv(*n)
    made, (sees, _) = MASKS[mask](n).mask, dense(mask, n)
    source = torch.Generator().manual_seed(1)
    keys, rows = torch.rand(n.B, n.K, n.S, generator=source) < 0.4, torch.rand(n.B, n.H, n.T, generator=source) < 0.2
    met = (sees & keys.repeat_interleave(n.H // n.K, 1)[:, :, None]).any(-1)
    up = torch.randn(n.B, n.H, n.T, n.S, generator=source)
    cases = [(q, poison(k, keys[..., None], what), met), (poison(q, rows[..., None], what), k, rows & sees.any(-1))]
    for options in ({}, {"softcap": 2.0}):

        def gradients(query: Tensor, key: Tensor, up: Tensor, options: Any = options) -> Any:
            leaves = [query.detach().requires_grad_(), key.detach().requires_grad_()]
            return torch.autograd.grad(headwise.weights(*leaves, mask=made, **options), leaves, up)

        for query, key, spoiled in cases:
            ours, clean = (gradients(*x, up) for x in ((query, key), (q, k)))
            assert_same_bits(ours[0][~spoiled], clean[0][~spoiled])
            assert math.isfinite(what) or bool(ours[0][spoiled].isnan().all()), "what may be attended does not show"
            without = up.masked_fill(spoiled[..., None], 0)
            for x, y in zip(gradients(query, key, without), gradients(q, k, without), strict=True):
                assert_same_bits(x, y, what=f"{spoiled.sum()} rows left out")


def test_only_what_is_asked_for_is_computed() -> None:
    n = Sizes(2, 8, 2, 1500, 2000, 8, 8)
    q, k, _ = make_qkv(*n)
    mask = headwise.causal() & headwise.window(700) & headwise.lengths(torch.tensor([1990, 2000]))
    with largest_tensor() as seen:
        headwise.weights(q, k, rows=[5, 1499], heads=[0, 7], mask=mask)
    assert seen.numel <= 4 * n.B * n.S * n.D  # a few rows of scores, and the keys of two heads; T * S is 3 million


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Half inputs give float32 weights: computed from the halves, not rounded to them."""
    q, k, _ = make_qkv(*SHORT, dtype=dtype)
    ours = headwise.weights(q, k, mask=headwise.causal())
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = headwise.weights(q.double(), k.double(), mask=headwise.causal())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pattern", STRIDES)
def test_layouts(pattern: str) -> None:
    q, k, _ = make_qkv(*SHORT)
    for a, b in ((strided(q, pattern), k), (q, strided(k, pattern))):
        same = headwise.weights(a.contiguous(), b.contiguous(), mask=headwise.causal())
        torch.testing.assert_close(headwise.weights(a, b, mask=headwise.causal()), same, rtol=1e-5, atol=1e-6)


def test_gradients() -> None:
    q, k, _ = make_qkv(1, 2, 1, 3, 4, 3, 1, dtype=torch.float64, requires_grad=True)
    for stage in STAGES[1:]:
        mask = headwise.causal() if stage == "probabilities" else None  # -inf minus -inf is no difference to check
        run = lambda q, k, s=stage, m=mask: headwise.weights(q, k, mask=m, softcap=2.0, stage=s)  # noqa: E731
        torch.autograd.gradcheck(run, (q, k))
        torch.autograd.gradgradcheck(run, (q, k))


@pytest.mark.parametrize("sizes", [(0, 4, 2, 3, 5), (2, 4, 2, 0, 5), (2, 4, 2, 3, 0)])
def test_nothing(sizes: tuple[int, ...]) -> None:
    n = Sizes(*sizes, 7, 2)
    q, k, _ = make_qkv(*n)
    for stage in STAGES:
        ours = headwise.weights(q, k, mask=headwise.causal(), stage=stage)  # type: ignore[arg-type]
        assert ours.shape == (n.B, n.H, n.T, n.S)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"stage": "logits"}, ValueError, "stage is one of raw, softcapped, biased, probabilities; got 'logits'"),
        ({"rows": [0, 3]}, ValueError, "rows lie in -3 <= index < 3 here; got [0, 3]"),
        ({"rows": -4}, ValueError, "rows lie in -3 <= index < 3 here; got [-4]"),
        ({"heads": 2}, ValueError, "heads lie in -2 <= index < 2 here; got [2]"),
        ({"rows": [1.0]}, TypeError, "rows are integer positions: an int, several, a slice, or an integer tensor; got"),
        ({"heads": [True, False]}, TypeError, "a bool mask gives them by .nonzero()"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        headwise.weights(torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 5, 4), **options)


@pytest.mark.parametrize("what", POISONS)
def test_scores_before_the_mask_show_poison_with_a_gradient_as_without(what: float) -> None:
    """Nothing is masked at those stages: numbers that are not finite stand where the product puts them."""
    n = SHORT
    q, k, _ = make_qkv(*n)
    bad = k.clone()
    bad[0, 1, 2], bad[1, 0, 4, 1] = what, what
    for stage in STAGES[:2]:
        for options in ({}, {"softcap": 1.3}, {"mask": headwise.causal()}):
            plain = headwise.weights(q, bad, stage=stage, **options)
            for leaf in (q, bad):
                grad = leaf.clone().requires_grad_()
                ours = headwise.weights(*((grad, bad) if leaf is q else (q, grad)), stage=stage, **options)
                torch.testing.assert_close(ours, plain, equal_nan=True)
                assert ours.requires_grad
            wide = (q @ bad.repeat_interleave(n.H // n.K, 1).mT) * n.D**-0.5
            wide = wide if stage == "raw" or "softcap" not in options else 1.3 * torch.tanh(wide / 1.3)
            torch.testing.assert_close(plain, wide, rtol=1e-5, atol=1e-5, equal_nan=True)
