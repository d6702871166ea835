"""The Triton kernels mean what every backend means: against the definition in float64, in Triton's interpreter.

On a machine with a card they run there, and bfloat16 with them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from draw import drawn, slow_except
from loops import inside
from mask_cases import FEW, MASKS, Sizes, as_tensor
from native_cases import collected
from triton_cases import DEVICE, HALVES, attend, needs_triton, quiet, there

import headwise
from headwise.ops.call import Call
from headwise.ops.triton import triton_backend
from headwise.testing import assert_close_like_torch, assert_same_bits, make_qkv, naive, oracle

pytestmark = [needs_triton, pytest.mark.unchecked, quiet]
SHORT, LONG = Sizes(2, 2, 1, 5, 17, 11, 13), Sizes(3, 2, 2, 19, 5, 13, 7)
WIDE, TILED = Sizes(1, 2, 1, 23, 67, 19, 17), Sizes(1, 1, 1, 67, 131, 16, 16)
NONE: dict[str, Any] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": -0.3},
    "softcap": {"softcap": 0.7},
    "large softcap": {"softcap": 300.0},
    "sinks": {"sinks": True},
    "everything": {"scale": 0.9, "softcap": 1.3, "sinks": True, "gate": True},
}
DTYPES = (torch.float32, *HALVES)


def options_of(name: str, n: Sizes) -> dict[str, Any]:
    options, make = dict(OPTIONS[name]), torch.Generator().manual_seed(5)
    for tensor, shape in (("sinks", (n.H,)), ("gate", (n.B, n.H, n.T))):
        if tensor in options:
            options[tensor] = torch.randn(shape, generator=make)
    return options


def check(n: Sizes, mask: str | None, option: str, dtype: torch.dtype, kind: str = "normal") -> None:
    qkv = make_qkv(*n, dtype=dtype, kind=kind)
    made = None if mask is None else MASKS[mask](n).mask
    if made is not None and triton_backend.trouble_with(made) is not None:
        return
    options = options_of(option, n)
    tensor = None if mask is None else as_tensor(mask, n)
    exact, exact_lse = oracle(*qkv, mask=tensor, **options)
    out, lse = attend(*qkv, mask=made, return_lse=True, **options)
    rough = naive(*qkv, mask=tensor, **options)
    largest = qkv[2] * max(1.0, float(options["gate"].abs().max()) if "gate" in options else 1.0)
    assert_close_like_torch(out, exact, rough, values=largest, what=f"{mask}, {option}, {dtype}")
    logits = torch.tensor([16.0 if kind == "normal" else 64.0])
    assert_close_like_torch(lse, exact_lse, exact_lse.float(), values=logits)


@pytest.mark.sweep
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_masks(mask: str | None) -> None:
    """60 masks, each in 4 of the forms: sizes, options and dtypes in turn."""
    with collected() as attempt:
        for n, option, dtype in drawn(forms(mask), f"{mask}", most=4):
            attempt((n, option, dtype), check, n, mask, option, dtype)


def forms(mask: str | None) -> list[tuple[Sizes, str, torch.dtype]]:
    first, names = [None, *MASKS].index(mask), list(OPTIONS)
    sizes = (SHORT, LONG, WIDE, SHORT)
    return [(n, names[(first + i) % 6], DTYPES[(first + i) % len(DTYPES)]) for i, n in enumerate(sizes)]


@pytest.mark.sweep
@pytest.mark.parametrize("mask", [None, *FEW, "causal_top_left", "window 2 first 1", "blocks & relative"])
def test_masks_across_tiles(mask: str | None) -> None:
    check(TILED, mask, "plain", torch.float32)


def test_bands_that_count_from_several_places() -> None:
    """The tightest of numbers and of different tensors is found before the kernel runs."""
    q, k, v = make_qkv(2, 1, 1, 5, 20, 16, 16)
    one, other = torch.tensor([9, 3]), torch.tensor([11, 2])
    mask = headwise.causal(offset=one) & headwise.window(6, 1, offset=other) & headwise.window(12, 3)
    out, lse = attend(q, k, v, mask=mask, return_lse=True)
    expected, expected_lse = headwise.attention(q, k, v, mask=mask, return_lse=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["outlier", "sink", "duplicates"])
def test_inputs_like_real_ones(kind: str) -> None:
    check(WIDE, "causal", "plain", torch.float32, kind)


@pytest.mark.slow
def test_any_strides_and_groups() -> None:
    n = Sizes(2, 4, 2, 9, 20, 20, 12)
    q, k, v = make_qkv(*n)
    exact = attend(q, k, v, mask=headwise.causal())
    laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    columns = v.mT.contiguous().mT  # the last axis is not contiguous
    assert_same_bits(attend(*laid, columns, mask=headwise.causal()), exact)
    alone = [attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], mask=headwise.causal()) for b in range(n.B)]
    assert_same_bits(torch.cat(alone), exact, what="whatever else is in the batch")


POISONED = {
    "window": lambda T, S: headwise.causal() & headwise.window(4),
    "keep": lambda T, S: headwise.keep(torch.rand(1, 1, T, S, generator=torch.Generator().manual_seed(1)) < 0.05),
}


@pytest.mark.parametrize("mask", slow_except(POISONED, ("window",)))
@inside("where", ["key", "value"])
@inside("what", [math.nan, math.inf, -math.inf])
def test_what_may_not_be_attended_changes_no_bit(mask: str, where: str, what: float) -> None:
    """Twelve poisons. Rows that may attend to a bad key are NaN, others have the bits of a clean call."""
    q, k, v = make_qkv(1, 1, 1, 20, 75, 16, 16)
    bad = torch.rand(1, 1, 75, generator=torch.Generator().manual_seed(2)) < 0.1
    made = POISONED[mask](20, 75)
    clean, lse = attend(q, k, v, mask=made, return_lse=True)
    (k if where == "key" else v)[bad] = what
    out, lse_too = attend(q, k, v, mask=made, return_lse=True)
    truth, lse_truth = headwise.attention(q, k, v, mask=made, return_lse=True, backend="reference")
    spoiled = truth.isnan().any(-1)
    assert spoiled.any() and not spoiled.all()
    assert torch.equal(out.isnan(), truth.isnan()) and torch.equal(lse_too.isnan(), lse_truth.isnan())
    assert_same_bits(out[~spoiled], clean[~spoiled])
    assert_same_bits(lse_too[~spoiled], lse[~spoiled])


def test_bad_queries() -> None:
    q, k, v = make_qkv(1, 1, 1, 20, 20, 16, 16)
    q[0, 0, 7], q[0, 0, 9, 3], q[0, 0, 11, 0] = math.inf, math.nan, math.nan
    keep = headwise.keep(torch.arange(20)[:, None].expand(20, 20) != 9)
    out = attend(q, k, v, mask=keep)[0, 0]
    assert out[7].isnan().all() and out[11].isnan().all() and (out[9] == 0).all()
    rest = [i for i in range(20) if i not in (7, 9, 11)]
    assert out[rest].isfinite().all()


def test_large_numbers_where_masked() -> None:
    q, k, v = make_qkv(1, 2, 1, 9, 30, 16, 16)
    clean = attend(q, k, v, mask=headwise.causal(offset=3))
    k[:, :, 15:], v[:, :, 15:] = 1e30, -1e30
    assert_same_bits(attend(q, k, v, mask=headwise.causal(offset=3)), clean)


# -- what is refused, and what is said ---------------------------------------------------------------------------------

REFUSED = {
    "float64": (lambda: (make_qkv(1, 1, 1, 3, 3, 4, 4, dtype=torch.float64), NONE), "no float64"),
    "gradient": (lambda: (make_qkv(1, 1, 1, 3, 3, 4, 4, requires_grad=True), NONE), "give no gradient"),
    "dropout": (lambda: (make_qkv(1, 1, 1, 3, 3, 4, 4), {"dropout": 0.5}), "no dropout"),
    "empty": (lambda: (make_qkv(1, 1, 1, 3, 0, 4, 4), NONE), "no empty tensors"),
    "wide prefill": (lambda: (make_qkv(1, 1, 1, 17, 3, 257, 4), NONE), "above 256 for at most 16 queries"),
    "wide": (lambda: (make_qkv(1, 1, 1, 3, 3, 4, 513), NONE), "up to 576, of values up to 512"),
    "two biases": (
        lambda: (
            make_qkv(1, 1, 1, 3, 3, 4, 4),
            {"mask": headwise.bias(torch.ones(3, 3)) & headwise.bias(torch.ones(3, 1))},
        ),
        "at most one bias tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_limits(name: str) -> None:
    make, why = REFUSED[name]
    qkv, options = make()
    with pytest.raises(ValueError, match=f"backend 'triton' does not support this call: .*{why}.*; use 'auto'"):
        headwise.attention(*there(qkv), **there(options), backend="triton")


def test_on_the_cpu_it_is_chosen_by_name_alone() -> None:
    q, k, v = make_qkv(1, 2, 1, 3, 3, 4, 4)
    said = headwise.explain(q, k, v, softcap=3.0)
    assert said.backend != "triton"
    assert headwise.explain(*there((q, k, v)), backend="triton").backend == "triton"


def test_without_triton_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.ops.triton import launch

    monkeypatch.setattr(launch, "trouble", lambda: "the package triton is not installed: pip install triton")
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    said = headwise.explain(*make_qkv(1, 2, 1, 3, 3, 4, 4)).others["triton"]
    assert said == "the package triton is not installed: pip install triton"


def test_a_graph_holds_the_kernels() -> None:
    q, k, v = there(make_qkv(1, 2, 1, 5, 9, 8, 8))

    def run(q: Any, k: Any, v: Any) -> Any:
        return headwise.attention(q, k, v, mask=headwise.window(3), softcap=2.0, return_lse=True, backend="triton")

    with torch.no_grad():
        out, lse = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v)
        for ours, expected in zip((out, lse), run(q, k, v), strict=True):
            assert_same_bits(ours, expected)
    torch._dynamo.reset()


def test_lists_of_tiles_are_kept_for_masks_of_numbers() -> None:
    from headwise.ops.triton import kernel_masks

    mask = headwise.dilated(2)
    first, again = (kernel_masks.lowered(mask, 70, 90, DEVICE).tiles for _ in range(2))
    assert all(x is y for x, y in zip(first, again, strict=True))
    ids = torch.zeros(90, dtype=torch.long)
    segments = headwise.segments(torch.zeros(70, dtype=torch.long), ids)
    before = kernel_masks.lowered(segments, 70, 90, torch.device("cpu")).tiles[1]
    ids.fill_(1)
    after = kernel_masks.lowered(segments, 70, 90, torch.device("cpu")).tiles[1]
    assert before.sum() == 4 and after.sum() == 0


def test_decoding_is_chosen_by_the_number_of_queries() -> None:
    q, k, v = make_qkv(1, 2, 1, 16, 40, 8, 8)
    options = headwise.ops.options.ScoreOptions.checked(q, k, headwise.causal(), None, None, None)
    assert triton_backend.decodes(Call(q, k, v, options))
    assert not triton_backend.decodes(Call(torch.cat([q, q], 2), k, v, options))
