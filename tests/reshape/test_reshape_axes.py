"""How a tensor's axes divide into heads: what is kept and zeroed, against the same by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.reshape.layout.head_axes import KeptHeads, Sizes, form

SIZES = Sizes(H=6, K=3, D=5, V=7, rope_dim=2)
KEPT = KeptHeads((0, 1, 4, 5), (0, 2))
WIDTH = {"q": 5, "k": 5, "v": 7, "o": 7, "n": 3, "": 1}

# The text; then the stretches of its axis by hand: (heads of a kind, the parts of each).
FORMS = {
    "(H q) M": (0, [("H", "q")]),
    "(K k) M": (0, [("K", "k")]),
    "(K v)": (0, [("K", "v")]),
    "M (H o)": (1, [("H", "o")]),
    "(H q | K k | K v) M": (0, [("H", "q"), ("K", "k"), ("K", "v")]),
    "M (H q | K k | K v)": (1, [("H", "q"), ("K", "k"), ("K", "v")]),
    "(H (q | k | v)) M": (0, [("H", "qkv")]),
    "(H (n | v)) R": (0, [("H", "nv")]),
    "H": (0, [("H", [""])]),
    "R H": (1, [("H", [""])]),
}


def labels(stretches: list[tuple[str, str]]) -> list[tuple[int, str, int, int, int]]:
    """What each place of the axis is: (stretch, kind, head, which part of it, place in the part)."""
    return [
        (n, kind, head, p, place)
        for n, (kind, parts) in enumerate(stretches)
        for head in range(SIZES.H if kind == "H" else SIZES.K)
        for p, part in enumerate(parts)
        for place in range(WIDTH[part])
    ]


def case(text: str) -> tuple[int, Tensor, list[bool]]:
    """The axis, a tensor of distinct numbers, and which places of the axis belong to kept heads."""
    axis, stretches = FORMS[text]
    names = labels(stretches)
    shape = [11] * (2 if text.split()[-1] in ("M", "R") or axis else 1)
    shape[axis] = len(names)
    tensor = 1 + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    return axis, tensor, [head in KEPT.of(kind) for _, kind, head, _, _ in names]


@pytest.mark.parametrize("text", FORMS)
def test_what_is_kept_is_the_places_of_those_heads(text: str) -> None:
    axis, tensor, stays = case(text)
    places = [n for n, stay in enumerate(stays) if stay]
    expected = torch.stack([tensor.select(axis, n) for n in places], axis)
    actual = form(text).keep(tensor, SIZES, KEPT)
    assert torch.equal(actual, expected)
    assert form(text).shape(tensor.shape, SIZES, KEPT) == tuple(expected.shape)
    assert form(text).fits(tensor.shape, SIZES) and not form(text).fits(expected.shape, SIZES)
    assert form(text).fits(expected.shape, KEPT.sizes(SIZES))


@pytest.mark.parametrize("text", FORMS)
def test_zeros_stand_where_o_proj_reads_what_goes_and_nowhere_else(text: str) -> None:
    axis, tensor, stays = case(text)
    expected = tensor.clone()
    if "o" in text:
        for n, stay in enumerate(stays):
            if not stay:
                expected.select(axis, n).zero_()
    assert torch.equal(form(text).zero(tensor, SIZES, KEPT), expected)


def test_two_axes_of_heads_are_cut_both() -> None:
    tensor = torch.arange(6 * 3.0).reshape(6, 3)
    assert torch.equal(form("H K").keep(tensor, SIZES, KEPT), tensor[[0, 1, 4, 5]][:, [0, 2]])


def test_a_whole_tensor_stays() -> None:
    tensor = torch.arange(13.0)
    whole = form("*")
    assert whole.keep(tensor, SIZES, KEPT) is tensor and whole.fits((13, 17), SIZES)
    assert whole.shape((13, 17), SIZES, KEPT) == (13, 17) and whole.parts() == set()


@pytest.mark.parametrize("text", ["", "(H q", "(X q) M", "(H z) M", "(H (q | z)) M", "H) M", "(H q || K k) M"])
def test_a_text_that_is_no_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as"):
        form(text)
