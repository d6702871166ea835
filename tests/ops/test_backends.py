"""Which backend runs a call: chosen openly, refused clearly, nothing dropped."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from backends import BACKENDS, BEST, ISAS, MUST, OPTIONAL, attend, check_refusal
from mask_cases import MASKS, SHORT, SIZES, UNEQUAL, Sizes, dense
from test_meaning import EXTRAS, options_of
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import headwise
from headwise.cache import Quantized
from headwise.ops.backends import flex
from headwise.ops.storage.layout import in_one_piece
from headwise.ops.storage.paged import Paged
from headwise.testing import assert_same_bits, make_qkv, poison


@pytest.mark.parametrize("extra", EXTRAS)
def test_explain_tells_of_every_backend(extra: str) -> None:
    qkv = make_qkv(*SHORT)
    options = options_of(extra, SHORT)
    choice = headwise.explain(*qkv, mask=headwise.causal(), **options)
    assert {choice.backend, *choice.others} == {*BACKENDS, "triton"} - {"auto"}
    assert choice.why and all(choice.others.values())
    lines = str(choice).splitlines()
    assert lines[0] == f"{choice.backend}: {choice.why}"
    assert lines[1:] == [f"  not {name}: {why}" for name, why in choice.others.items()]
    assert_same_bits(
        headwise.attention(*qkv, mask=headwise.causal(), **options),
        headwise.attention(*qkv, mask=headwise.causal(), **options, backend=choice.backend),
    )


def test_explain_computes_nothing() -> None:
    with headwise.testing.largest_tensor() as seen:
        headwise.explain(*make_qkv(1, 1, 1, 1, 1, 1, 1), mask=headwise.causal())
    assert seen.numel <= 16


def test_doubles_run_on_the_definition() -> None:
    assert headwise.explain(*make_qkv(*SHORT, dtype=torch.float64)).backend == "reference"


def test_an_unknown_backend() -> None:
    with pytest.raises(
        ValueError, match=r"backend is auto, native, triton, sdpa, flex, blocks, reference; got 'tritton'"
    ):
        headwise.attention(*make_qkv(*SHORT), backend="tritton")


# What torch's kernels cannot honour: by name they must refuse, and never run without it.
CANNOT: dict[str, dict[str, dict[str, Any]]] = {
    "sdpa": {
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.zeros(SHORT.H)},
        "lse": {"return_lse": True},
        "dropout": {"dropout": 0.1},
        "bias that learns": {"mask": headwise.bias(torch.zeros(SHORT.T, SHORT.S, requires_grad=True))},
    },
    "flex": {
        "dropout": {"dropout": 0.1},
        "bias that learns": {"mask": headwise.bias(torch.zeros(SHORT.T, SHORT.S, requires_grad=True))},
    },
}


@pytest.mark.parametrize(("backend", "what"), [(b, what) for b, cases in CANNOT.items() for what in cases])
def test_what_a_backend_cannot_honour_it_refuses(backend: str, what: str) -> None:
    qkv, options = make_qkv(*SHORT), CANNOT[backend][what]
    with pytest.raises(ValueError, match="does not support this call") as refusal:
        headwise.attention(*qkv, **options, backend=backend)
    check_refusal(backend, str(refusal.value), headwise.explain(*qkv, **options))
    with pytest.raises(ValueError, match="does not support this call"):
        headwise.explain(*qkv, **options, backend=backend)


# -- keys and values that are more than two tensors --------------------------------------------------------------------

PAGES, TABLE = torch.randn(5, 3, 128, 11), torch.tensor([[2, 0], [4, 1]])
BYTES = Quantized(torch.zeros(2, 3, 200, 11, dtype=torch.int8), torch.ones(2, 3, 200))
IN_PAGES = Paged(PAGES, TABLE, 200)
APART: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "two tables": (IN_PAGES, Paged(PAGES, TABLE.clone(), 200), ValueError, "share their table and length; give both"),
    "two lengths": (IN_PAGES, Paged(PAGES, TABLE, 199), ValueError, "share their table and length; give both"),
    "pages and a tensor": (
        IN_PAGES,
        torch.zeros(2, 3, 200, 11),
        TypeError,
        "are both in pages or neither; call .dense()",
    ),
    "a tensor and pages": (
        torch.zeros(2, 3, 200, 11),
        IN_PAGES,
        TypeError,
        "are both in pages or neither; call .dense()",
    ),
    "int8 and a tensor": (BYTES, torch.zeros(2, 3, 200, 11), TypeError, "key is Quantized, value is not: use"),
    "a tensor and int8": (torch.zeros(2, 3, 200, 11), BYTES, TypeError, "value is Quantized, key is not: use"),
    "int8 and pages": (BYTES, IN_PAGES, TypeError, "key is Quantized, value is not: use"),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("name", APART)
def test_keys_and_values_lie_alike(name: str) -> None:
    key, value, error, text = APART[name]
    for function in (headwise.attention, headwise.explain):
        with pytest.raises(error, match=re.escape(text)):
            function(torch.zeros(2, 6, 1, 11), key, value)  # type: ignore[operator]


def test_pages_tell_what_they_hold() -> None:
    """Token j of row b lies in page table[b, j // 128], at place j % 128; the rest of a page is nobody's."""
    assert IN_PAGES.shape == (2, 3, 200, 11)
    dense = IN_PAGES.dense()
    assert isinstance(dense, Tensor) and dense.shape == IN_PAGES.shape
    for b, j in ((0, 0), (0, 127), (0, 128), (1, 199)):
        assert_same_bits(dense[b, :, j], PAGES[TABLE[b, j // 128], :, j % 128])
    scales = torch.rand(5, 3, 128)
    quantised = Paged(Quantized(torch.randint(-9, 9, PAGES.shape).to(torch.int8), scales), TABLE, 130)
    apart = quantised.dense()
    assert isinstance(apart, Quantized) and quantised.shape == apart.shape == (2, 3, 130, 11)
    whole = in_one_piece(quantised, torch.float32)
    assert_same_bits(whole, quantised.pages.dequantize()[TABLE].transpose(1, 2).flatten(2, 3)[:, :, :130])
    assert in_one_piece(PAGES, torch.float64) is PAGES


# -- flex --------------------------------------------------------------------------------------------------------------


WITH_PICKED = [name for name in MASKS if "picked" in name]
"""The only rule of ours that FlexAttention has no form for, alone and joined with others."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in MASKS if name not in WITH_PICKED])
def test_flex_reads_every_rule_as_it_is_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions of one place, over all places, and its lists of tiles, of 16 x 16 here."""
    monkeypatch.setattr(flex, "TILE", 16)
    for n in (*SIZES, *UNEQUAL):
        mask, (sees, adds) = MASKS[name](n).mask, dense(name, n)
        where = torch.meshgrid(*(torch.arange(size) for size in (n.B, n.H, n.T, n.S)), indexing="ij")
        blocks = flex._block_mask(mask, n.T, n.S, torch.device("cpu"))
        score = flex._score_mod(mask, None, n.T, n.S)
        assert blocks is not None or bool(sees.all())
        if blocks is not None:
            assert torch.equal(blocks.mask_mod(*where).expand(sees.shape), sees)
            assert torch.equal(_places(blocks, n), sees)
        if score is not None:
            added = score(torch.zeros(()), *where).expand(sees.shape)
            torch.testing.assert_close(added.double().masked_fill(~sees, 0), adds, rtol=1e-6, atol=1e-6)
        assert (score is not None) == (MASKS[name](n).adds is not None)


def test_flex_refuses_picked_keys() -> None:
    assert len(WITH_PICKED) > 6
    for name in WITH_PICKED:
        with pytest.raises(ValueError, match="FlexAttention has no form here for Picked"):
            headwise.attention(*make_qkv(*SHORT), mask=MASKS[name](SHORT).mask, backend="flex")


def _places(blocks: BlockMask, n: Sizes) -> Tensor:
    """What a block mask lets in, from its lists: full tiles as a whole, mixed ones by its function."""
    visible = torch.zeros(n.B, n.H, n.T, n.S, dtype=torch.bool)
    for counts, order, full in (
        (blocks.kv_num_blocks, blocks.kv_indices, False),
        (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
    ):
        for b, h, t in itertools.product(range(n.B), range(n.H), range(counts.shape[2])):
            at = (b % counts.shape[0], h % counts.shape[1], t)
            for s in order[at][: counts[at]].tolist():
                i, j = torch.arange(t * 16, min(t * 16 + 16, n.T))[:, None], torch.arange(s * 16, min(s * 16 + 16, n.S))
                visible[b, h, i, j] = True if full else blocks.mask_mod(torch.tensor(b), torch.tensor(h), i, j)
    return visible


@pytest.mark.unchecked
def test_flex_keeps_the_first_keys_and_puts_a_sink_into_the_lse() -> None:
    n = SHORT
    qkv, sinks = make_qkv(*n), torch.randn(n.H)
    mask = headwise.window(2, first=1) & headwise.lengths(torch.tensor([7, 0]))
    ours, exact = (
        headwise.attention(*qkv, mask=mask, sinks=sinks, return_lse=True, backend=backend)
        for backend in ("flex", "reference")
    )
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.unchecked
def test_flex_behind_the_fence() -> None:
    """Poison where nothing may look changes no bit, as in `test_interference`; a sink that is no number shows."""
    n = SHORT
    q, k, v = make_qkv(*n)
    seen = torch.rand(n.T, n.S) > 0.2
    seen[1], seen[:, 4] = False, False
    row, key = torch.arange(n.T)[:, None] == 1, torch.arange(n.S)[:, None] == 4
    sinks = torch.tensor([0.0, 1.0, math.nan, math.inf, -math.inf, 2.0])
    clean = headwise.attention(q, k, v, mask=seen, sinks=sinks, return_lse=True, backend="flex")
    for what in (math.nan, 1e30):
        bad = (poison(q, row, what), poison(k, key, what), poison(v, key, what))
        for x, y in zip(
            headwise.attention(*bad, mask=seen, sinks=sinks, return_lse=True, backend="flex"), clean, strict=True
        ):
            assert_same_bits(x, y)
    out, lse = clean
    assert bool((out[:, :, 1] == 0).all() and (lse[:, :, 1] == -math.inf).all())
    shown = torch.tensor([False, False, True, True, False, False])
    alive = torch.arange(n.T) != 1
    assert torch.equal(out[:, :, alive].isnan().all(-1).all(-1).all(0), shown)
    assert torch.equal(lse[:, :, alive].isnan().any(-1).any(0), shown)


def test_flex_refuses_a_backward_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="no backward on CPU"):
        headwise.attention(*make_qkv(*SHORT, requires_grad=True), backend="flex")


@pytest.mark.parametrize("backend", MUST)
@pytest.mark.parametrize("what", CANNOT["sdpa"])
def test_what_torch_cannot_do_runs_elsewhere(backend: str, what: str) -> None:
    headwise.attention(*make_qkv(*SHORT), **CANNOT["sdpa"][what], backend=backend)


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", [*MUST, "sdpa", *BEST])
def test_any_real_number_will_do_for_an_option(backend: str) -> None:
    """numpy's and fractions, and an integer: the bits of the float."""
    q, k, v = make_qkv(*SHORT)
    for value, same in (
        ({"scale": np.float32(0.25)}, {"scale": 0.25}),
        ({"scale": Fraction(1, 3), "softcap": np.float64(30)}, {"scale": 1 / 3, "softcap": 30.0}),
        ({"scale": 1, "softcap": 2, "dropout": np.float32(0)}, {"scale": 1.0, "softcap": 2.0}),
    ):
        ours, theirs = (attend(backend, q, k, v, **x) for x in (value, same))
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs)
        assert_same_bits(*(headwise.weights(q, k, **{"scale": x["scale"]}) for x in (value, same)))


def test_a_backend_asked_for_by_name_is_the_one_explained() -> None:
    qkv = make_qkv(*SHORT)
    for backend in (*MUST[1:], *(name for name in OPTIONAL if name != "native" or ISAS)):
        choice = headwise.explain(*qkv, backend=backend)
        assert (choice.backend, choice.why) == (backend, "requested by name")
        assert {backend, *choice.others} == {*BACKENDS, "triton"} - {"auto"}
