"""The op means one thing, whatever computes it: each line of the definition, by every backend, against float64."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from backends import attend, every_backend, quick
from draw import drawn, slow_except
from loops import inside
from mask_cases import FEW, LONG, MASKS, SHORT, SIZES, SQUARE, TILED, UNEQUAL, Sizes, as_tensor, dense
from native_cases import collected
from torch import Tensor

import headwise
from headwise.testing import KINDS, assert_close_like_torch, assert_same_bits, make_qkv, naive, oracle

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "gate": {"gate": True},
    "everything": {"scale": 0.9, "softcap": 1.3, "sinks": True, "gate": True},
}


def options_of(extra: str, n: Sizes, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The named options, with tensors made for this shape."""
    options = dict(EXTRAS[extra])
    source = torch.Generator().manual_seed(5)
    for name, shape in (("sinks", (n.H,)), ("gate", (n.B, n.H, n.T))):
        if name in options:
            options[name] = torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
    return options


@cache
def answer(
    mask: str | None, n: Sizes, extra: str = "plain", dtype: torch.dtype = torch.float32, kind: str = "normal"
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(exact out, exact lse, naive out) from the mask's definition as a loop: nothing of headwise is asked."""
    qkv = make_qkv(*n, dtype=dtype, kind=kind)
    tensor = None if mask is None else as_tensor(mask, n)
    options = options_of(extra, n, dtype)
    return *oracle(*qkv, mask=tensor, **options), naive(*qkv, mask=tensor, **options)


def check(
    backend: str,
    mask: str | None,
    n: Sizes,
    extra: str = "plain",
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
) -> None:
    qkv = make_qkv(*n, dtype=dtype, kind=kind)
    made = None if mask is None else MASKS[mask](n).mask
    exact, _, rough = answer(mask, n, extra, dtype, kind)
    options = options_of(extra, n, dtype)
    out = attend(backend, *qkv, mask=made, **options)
    if out is not None:
        assert out.dtype == dtype
        largest = qkv[2] * max(1.0, float(options["gate"].abs().max()) if "gate" in options else 1.0)
        assert_close_like_torch(out, exact, rough, values=largest, what=f"{backend}, {mask}")


# -- every mask, shape, dtype, option ----------------------------------------------------------------------------


@pytest.mark.sweep
@quick
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_masks(backend: str, mask: str | None) -> None:
    with collected() as attempt:
        for n in drawn((*SIZES, *UNEQUAL), f"{mask}"):
            attempt(n, check, backend, mask, n)


@quick
@pytest.mark.parametrize("mask", [None, *FEW, "causal_top_left"])
def test_masks_across_tiles(backend: str, mask: str | None) -> None:
    check(backend, mask, TILED)


@pytest.mark.unchecked
@pytest.mark.parametrize("mask", slow_except((None, *FEW), ("causal", "all kinds")))
def test_masks_by_flex(mask: str | None) -> None:
    check("flex", mask, SHORT)


@pytest.mark.unchecked
@pytest.mark.parametrize("mask", ["causal", "all kinds"])
def test_options_by_flex(mask: str) -> None:
    check("flex", mask, LONG, "everything")


@quick
@pytest.mark.parametrize("mask", [None, *FEW, "causal_top_left"])
@inside("extra", EXTRAS)
def test_options(backend: str, mask: str | None, extra: str) -> None:
    check(backend, mask, LONG if mask == "causal" else SHORT, extra)


@quick
@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-30, 5.0])
def test_any_scale_with_a_square_causal_mask(backend: str, scale: float) -> None:
    """pytorch#105190: where the kernel masks before it scales, 0 times -inf is NaN and -1 times -inf attends."""
    qkv = make_qkv(*SQUARE)
    out = attend(backend, *qkv, mask=headwise.causal(), scale=scale)
    exact, _ = oracle(*qkv, mask=as_tensor("causal", SQUARE), scale=scale)
    assert_close_like_torch(out, exact, naive(*qkv, mask=as_tensor("causal", SQUARE), scale=scale), values=qkv[2])


@quick
@pytest.mark.parametrize("mask", [None, *FEW])
@inside("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(backend: str, mask: str | None, dtype: torch.dtype) -> None:
    check(backend, mask, SHORT, dtype=dtype)


@quick
@pytest.mark.parametrize("kind", KINDS[1:])
def test_inputs_like_real_ones(backend: str, kind: str) -> None:
    check(backend, "causal", TILED, kind=kind)


@quick
@pytest.mark.parametrize("mask", FEW)
@inside("extra", ["plain", "everything"])
def test_lse(backend: str, mask: str, extra: str) -> None:
    """The log of the softmax's denominator, the sink included; -inf where nothing may be attended; float32."""
    n = LONG
    qkv = make_qkv(*n)
    both = attend(backend, *qkv, mask=MASKS[mask](n).mask, return_lse=True, **options_of(extra, n))
    if both is None:
        return
    out, lse = both
    exact_out, exact, rough = answer(mask, n, extra)
    assert_close_like_torch(out, exact_out, rough, values=qkv[2])
    assert lse.dtype == torch.float32 and lse.shape == (n.B, n.H, n.T)
    assert_close_like_torch(lse, exact, exact.float(), values=torch.tensor([16.0]))  # logits up to 16: 1 ulp there


@quick
def test_lse_of_halves_is_float32_and_of_doubles_is_float64(backend: str) -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        both = attend(backend, *make_qkv(*SHORT, dtype=dtype), return_lse=True)
        assert both is None or (both[0].dtype == dtype and both[1].dtype == expected)


# -- layout and groups -------------------------------------------------------------------------------------------


@every_backend
def test_head_h_reads_key_value_head_h_over_G(backend: str) -> None:
    """Every value of key-value head n is n: out of head h is h // G, and h % K is refuted."""
    n = SHORT
    q, k, _ = make_qkv(*n)
    v = torch.arange(n.K, dtype=torch.float32).view(1, -1, 1, 1).expand(n.B, n.K, n.S, n.V)
    out = attend(backend, q, k, v)
    expected = torch.arange(n.H) // (n.H // n.K)
    assert not torch.equal(expected, torch.arange(n.H) % n.K)
    torch.testing.assert_close(out, expected.float().view(1, -1, 1, 1).expand_as(out))


@every_backend
def test_keys_are_grouped_too(backend: str) -> None:
    """Key 0 of key-value head n stands out only for n = 1: heads 2 and 3 of 6 look there, no other."""
    q = torch.ones(1, 6, 2, 4)
    k = torch.zeros(1, 3, 5, 4)
    k[:, 1, 0] = 100
    v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 3, 5, 1)
    out = attend(backend, q, k, v)[0, :, 0, 0]
    torch.testing.assert_close(out, torch.tensor([2.0, 2.0, 0.0, 0.0, 2.0, 2.0]))


@quick
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 9, 3, 2), (2, 8, 1, 4, 3, 2, 5), (1, 5, 5, 3, 1, 7, 1)]
)
def test_small_and_uneven_sizes(backend: str, sizes: tuple[int, ...]) -> None:
    check(backend, None, Sizes(*sizes))


@quick
def test_all_sizes_alike(backend: str) -> None:
    """Where B = H = T = S = D = V a swapped axis raises no error: only the numbers tell."""
    check(backend, "causal", Sizes(*[4] * 7))


# -- order: scale, softcap, bias, mask, sinks, softmax, values, gate ----------------------------------------------


def swapped(fault: str, n: Sizes) -> Tensor:
    """The definition with two steps swapped, in float64."""
    q, k, v = (x.double() for x in make_qkv(*n))
    o = options_of("everything", n, torch.float64)
    allowed, added = dense("all kinds", n)
    k, v = (x.repeat_interleave(n.H // n.K, 1) for x in (k, v))
    cap = lambda x: o["softcap"] * torch.tanh(x / o["softcap"])  # noqa: E731
    sinks = o["sinks"].view(1, -1, 1, 1).expand(n.B, n.H, n.T, 1)
    s = q @ k.mT
    s = o["scale"] * cap(s) if fault == "softcap before scale" else s * o["scale"]
    if fault == "bias before softcap":
        s = cap(s + added)
    elif fault == "bias scaled":
        s = cap(s) + o["scale"] * added
    elif fault != "softcap before scale":
        s = cap(s) + added
    else:
        s = s + added
    s = s.masked_fill(~allowed, -math.inf)
    if fault == "mask before softcap":
        s = cap(s)
    if fault in ("sinks scaled", "sinks softcapped"):
        sinks = sinks * o["scale"] if fault == "sinks scaled" else cap(sinks)
    s = s.masked_fill(~allowed.any(-1, keepdim=True), 0)
    p = (
        torch.softmax(torch.cat([s, sinks], -1), -1)[..., :-1]
        if fault != "sinks after softmax"
        else torch.softmax(s, -1)
    )
    p = p.masked_fill(~allowed.any(-1, keepdim=True), 0)
    if fault == "gate before softmax's sum":
        p = p * o["gate"][..., None] / (p * o["gate"][..., None]).sum(-1, keepdim=True).clamp_min(1e-9)
        return p @ v
    return (p @ v) * o["gate"][..., None]


def test_the_order_case_is_the_definition() -> None:
    exact, _, _ = answer("all kinds", SHORT, "everything")
    torch.testing.assert_close(swapped("none", SHORT), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fault",
    [
        "softcap before scale",
        "bias before softcap",
        "bias scaled",
        "mask before softcap",
        "sinks scaled",
        "sinks softcapped",
        "sinks after softmax",
        "gate before softmax's sum",
    ],
)
def test_every_swap_of_the_order_would_be_seen(fault: str) -> None:
    """`test_options` compares with `answer`; here each wrong order lies far outside its budget."""
    exact, _, rough = answer("all kinds", SHORT, "everything")
    with pytest.raises(AssertionError):
        assert_close_like_torch(swapped(fault, SHORT).float(), exact, rough, values=10 * make_qkv(*SHORT)[2])


@quick
def test_softcap_does_not_lift_a_masked_score(backend: str) -> None:
    """Softcap after the mask would turn -inf into -softcap and let the masked value of 1000 through."""
    q, k, v = make_qkv(1, 1, 1, 4, 6, 8, 8)
    v[:, :, 4:] = 1000
    seen = torch.arange(6) < 4
    for mask in (headwise.keep(seen), headwise.bias(torch.zeros(6).masked_fill(~seen, -math.inf))):
        out = attend(backend, q, k, v, mask=mask, softcap=0.5)
        assert out is None or float(out.abs().max()) < 10


# -- alignment ---------------------------------------------------------------------------------------------------


@every_backend
def test_causal_is_bottom_right(backend: str) -> None:
    """Values are their own positions and scores are equal: out is the mean position of what is seen."""
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    v = torch.arange(5.0).view(1, 1, 5, 1)
    see = lambda mask: attend(backend, q, k, v, mask=mask).flatten()  # noqa: E731
    torch.testing.assert_close(see(headwise.causal()), torch.tensor([1.0, 1.5, 2.0]))
    torch.testing.assert_close(see(headwise.causal_top_left()), torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(see(headwise.window(2)), torch.tensor([1.5, 2.5, 3.5]))


@quick
@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 7), (1, 4)])
def test_a_window_of_one_is_the_value_itself(backend: str, T: int, S: int) -> None:
    q, k, v = make_qkv(2, 4, 2, T, S, 5, 3)
    out = attend(backend, q, k, v, mask=headwise.window(1))
    if out is not None:
        assert_same_bits(out, v.repeat_interleave(2, 1)[:, :, S - T :])


@quick
def test_decoding_is_the_last_row_of_the_whole(backend: str) -> None:
    q, k, v = make_qkv(2, 6, 3, 7, 7, 11, 13)
    whole = attend(backend, q, k, v, mask=headwise.causal())
    step = attend(backend, q[:, :, -1:], k, v, mask=headwise.causal())
    if whole is not None:
        torch.testing.assert_close(step, whole[:, :, -1:], rtol=1e-6, atol=1e-6)


# -- rows that may attend nothing --------------------------------------------------------------------------------

never = torch.tensor([True, False, True, False, True])[:, None].expand(5, 7)
EMPTY_ROWS: dict[str, headwise.Mask] = {
    "keep": headwise.keep(~never),
    "bias": headwise.bias(torch.zeros(5, 7).masked_fill(never, -math.inf)),
    "lengths": headwise.lengths(torch.tensor([7, 0])),
    "lengths start": headwise.lengths(torch.tensor([5, 3]), torch.tensor([2, 3])),
    "causal": headwise.causal(offset=-2),
    "causal (B,)": headwise.causal(offset=torch.tensor([-4, 0])),
    "window": headwise.window(2, offset=5),
    "segments": headwise.segments(torch.tensor([0, 9, 0, 9, 1]), torch.tensor([0, 0, 0, 1, 1, 1, 1])),
    "joined": headwise.window(2, offset=0) & headwise.lengths(torch.tensor([2, 7])),
    "all": headwise.lengths(torch.tensor([0, 0])),
}


@quick
@pytest.mark.parametrize("name", EMPTY_ROWS)
@inside("extra", ["plain", "everything"])
@inside("mode", ["train", "no_grad", "inference"])
def test_a_row_that_may_attend_nothing(backend: str, name: str, extra: str, mode: str) -> None:
    n, mask = SHORT, EMPTY_ROWS[name]
    empty = ~mask.allowed(n.T, n.S).expand(n.B, n.H, n.T, n.S).any(-1)  # type: ignore[union-attr]
    assert empty.any()
    manager = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with manager():
        qkv = make_qkv(*n, requires_grad=mode == "train")
        for lse_too in (False, True):
            result = attend(backend, *qkv, mask=mask, return_lse=lse_too, **options_of(extra, n))
            if result is None:
                continue
            out, lse = result if lse_too else (result, None)
            assert bool((out[empty] == 0).all()) and bool(out.isfinite().all())
            assert bool((out[~empty] != 0).all())
            if lse is not None:
                assert bool((lse[empty] == -math.inf).all()) and bool(lse[~empty].isfinite().all())


@pytest.mark.unchecked
def test_a_row_that_may_attend_nothing_by_flex() -> None:
    for name in ("keep", "bias", "lengths", "joined"):
        out, lse = headwise.attention(
            *make_qkv(*SHORT), mask=EMPTY_ROWS[name], return_lse=True, **options_of("sinks", SHORT), backend="flex"
        )
        empty = ~EMPTY_ROWS[name].allowed(5, 7).expand(2, 6, 5, 7).any(-1)  # type: ignore[union-attr]
        assert bool((out[empty] == 0).all()) and bool((lse[empty] == -math.inf).all())
        assert bool(out.isfinite().all()) and bool(lse[~empty].isfinite().all())


# -- any size ----------------------------------------------------------------------------------------------------

ZERO = [(B, 4, 2, T, S, 7, 2) for B, T, S in ((0, 3, 5), (2, 0, 5), (2, 3, 0), (2, 0, 0), (0, 0, 0))]


@pytest.mark.parametrize("sizes", ZERO)
@every_backend
def test_no_batch_no_queries_no_keys(backend: str, sizes: tuple[int, ...]) -> None:
    n = Sizes(*sizes)
    for mask in (None, headwise.causal(), headwise.window(2, 1), headwise.keep(torch.ones(n.T, n.S, dtype=torch.bool))):
        for lse_too in (False, True):
            result = attend(backend, *make_qkv(*n), mask=mask, return_lse=lse_too)
            if result is None:
                continue
            out, lse = result if lse_too else (result, torch.full((n.B, n.H, n.T), -math.inf))
            assert_same_bits(out, torch.zeros(n.B, n.H, n.T, n.V))
            assert_same_bits(lse, torch.full((n.B, n.H, n.T), -math.inf))


def far_apart(x: Tensor) -> Tensor:
    """The same (1, 1, n, d) rows, more than 2^31 elements apart; only the pages that are touched exist."""
    n, d = x.shape[2:]
    step = (1 << 31) // (n - 1) + 17
    base = torch.empty((n - 1) * step + d, dtype=x.dtype)
    return base.as_strided((1, 1, n, d), (0, 0, step, 1)).copy_(x)


@quick
@pytest.mark.parametrize("which", ["query", "key", "value", "keep", "bias"])
def test_offsets_beyond_2_to_the_31(backend: str, which: str) -> None:
    arguments = dict(zip(("query", "key", "value"), make_qkv(1, 1, 1, 5, 6, 8, 8), strict=True))
    tensors = {"keep": torch.rand(1, 1, 5, 6) > 0.4, "bias": torch.randn(1, 1, 5, 6)}
    near = attend(backend, **arguments, mask=tensors.get(which))
    if which in arguments:
        arguments[which] = far_apart(arguments[which])
    far = attend(backend, **arguments, mask=far_apart(tensors[which]) if which in tensors else None)
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-6)  # torch may leave its fused kernel: other last bits


@quick
def test_seventy_thousand_heads(backend: str) -> None:
    q, k, v = make_qkv(35_000, 2, 1, 1, 3, 2, 2)
    out = attend(backend, q, k, v, mask=headwise.causal())
    for b in (0, 17_000, 32_767, 34_999):
        exact, _ = oracle(q[b : b + 1], k[b : b + 1], v[b : b + 1])
        torch.testing.assert_close(out[b : b + 1].double(), exact, rtol=1e-5, atol=1e-6)
