"""Each mask against its definition written as a loop, in every form a kernel may ask for it."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from backends import attend, quick
from loops import inside
from mask_cases import LONG, MASKS, SHORT, SIZES, SQUARE, TILED, UNEQUAL, Sizes, dense
from native_cases import rules_of, training_of
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise
import headwise.testing
from headwise.shapes.arguments import FAR
from headwise.testing import make_qkv

every_mask = pytest.mark.parametrize("name", MASKS)
every_size = inside("n", (*SIZES, *UNEQUAL))


def full(x: Tensor | None, n: Sizes, otherwise: float) -> Tensor:
    """A (B|1, H|1, R, C) answer, or None, as (B, H, R, C)."""
    if x is None:
        return torch.full((n.B, n.H, n.T, n.S), otherwise)
    assert x.ndim == 4 and x.shape[0] in (1, n.B) and x.shape[1] in (1, n.H), x.shape
    return x.expand(n.B, n.H, *x.shape[2:])


def same(allowed: Tensor | None, added: Tensor | None, name: str, n: Sizes, rows: Tensor, cols: Tensor) -> None:
    sees, adds = (x[:, :, rows][..., cols] for x in dense(name, n))
    n = n._replace(T=len(rows), S=len(cols))
    ours = full(allowed, n, 1).bool()
    assert allowed is None or allowed.dtype == torch.bool
    assert torch.equal(ours, sees)
    if added is None:
        assert MASKS[name](n if n.T else SHORT).adds is None
        return
    assert added.is_floating_point()
    # a bias of -inf may come as such: what it forbids is said by `allowed`
    torch.testing.assert_close(full(added, n, 0).double().masked_fill(~sees, 0), adds, rtol=1e-6, atol=1e-6)


@every_mask
@every_size
def test_allowed_and_added(name: str, n: Sizes) -> None:
    mask = MASKS[name](n).mask
    same(mask.allowed(n.T, n.S), mask.added(n.T, n.S), name, n, torch.arange(n.T), torch.arange(n.S))


@pytest.mark.sweep
@every_mask
def test_allowed_and_added_across_tiles(name: str) -> None:
    n = TILED
    mask = MASKS[name](n).mask
    same(mask.allowed(n.T, n.S), mask.added(n.T, n.S), name, n, torch.arange(n.T), torch.arange(n.S))


@every_mask
@every_size
def test_rows_and_columns_are_those_of_the_whole(name: str, n: Sizes) -> None:
    mask = MASKS[name](n).mask
    every_row, every_col = torch.arange(n.T), torch.arange(n.S)
    picks = [(slice(1, 4), slice(2, 5)), (torch.tensor([3, 0, 3]), torch.tensor([4, 1])), (None, torch.tensor([2]))]
    for rows, cols in [*picks, (slice(2, 3), None), (slice(0, 0), None), (None, slice(5, 5))]:
        at: dict[str, Any] = {"rows": rows, "cols": cols}
        i = every_row if rows is None else every_row[rows]
        j = every_col if cols is None else every_col[cols]
        same(mask.allowed(n.T, n.S, **at), mask.added(n.T, n.S, **at), name, n, i, j)


@every_mask
@every_size
def test_at_gathered_places(name: str, n: Sizes) -> None:
    source = torch.Generator().manual_seed(3)
    i = torch.randint(0, n.T, (n.B, n.H, 4, 3), generator=source)
    j = torch.randint(0, n.S, (n.B, n.H, 4, 3), generator=source)
    allowed, added = MASKS[name](n).mask.at(i, j, n.T, n.S)
    b, h = torch.arange(n.B).view(-1, 1, 1, 1), torch.arange(n.H).view(1, -1, 1, 1)
    sees, adds = (x[b, h, i, j] for x in dense(name, n))
    assert torch.equal(sees if allowed is None else allowed.expand_as(sees), sees)
    assert (added is None) == (MASKS[name](n).adds is None)
    if added is not None:
        ours = added.double().expand(adds.shape).masked_fill(~sees, 0)
        torch.testing.assert_close(ours, adds, rtol=1e-6, atol=1e-6)


@every_mask
@every_size
def test_dense_is_what_sdpa_takes(name: str, n: Sizes) -> None:
    built = MASKS[name](n)
    matrix = built.mask.dense(n.T, n.S)
    assert matrix.dtype == (torch.float32 if built.adds else torch.bool)
    allowed, added = dense(name, n)
    expected = added.masked_fill(~allowed, -math.inf) if built.adds else allowed
    torch.testing.assert_close(full(matrix, n, 1).to(expected.dtype), expected, rtol=1e-6, atol=1e-6)


@every_mask
@every_size
def test_bounds_tell_all_or_nothing(name: str, n: Sizes) -> None:
    built = MASKS[name](n)
    bounds = built.mask.bounds(n.T, n.S)
    assert (bounds is not None) == built.interval
    if bounds is None:
        return
    lo, hi = (x.expand(n.B, n.T)[:, None, :, None] for x in bounds)
    j = torch.arange(n.S)
    assert torch.equal(((j >= lo) & (j < hi)).expand(n.B, n.H, n.T, n.S), dense(name, n)[0])
    assert int(lo.min()) >= 0 and int(hi.max()) <= n.S and bool((lo <= hi).all())


BANDS = list(itertools.product((None, 1, 2, 3, 4, 5), (None, 0, 1, 2, 3), (None, -4, -1, 0, 1, 3), (0, 2)))


@pytest.mark.sweep
@pytest.mark.parametrize(("T", "S"), [(1, 4), (4, 1), (3, 3), (2, 5), (5, 2)])
def test_every_small_band(T: int, S: int) -> None:
    """In each form that a backend may ask for it: 360 of them, and each joined with the one before."""
    i, j = torch.arange(T)[:, None], torch.arange(S)[None]
    qkv = make_qkv(1, 1, 1, T, S, 1, 1)
    before, seen_before = headwise.causal(offset=0), j <= i
    for left, right, offset, first in BANDS:
        mask, pos = headwise.window(left, right, offset=offset, first=first), i + (S - T if offset is None else offset)
        near = j > pos - (99 if left is None else left)
        sees = (near | (j < first)) & (j <= pos + (99 if right is None else right))
        for made, seen in ((mask, sees.expand(T, S)), (before & mask, (seen_before & sees).expand(T, S))):
            label = f"{made} at T = {T}, S = {S}"
            assert torch.equal(made.allowed(T, S)[0, 0], seen), label  # type: ignore[index]
            trimmed = made.trimmed(T, S).allowed(T, S)
            assert torch.equal(seen, torch.ones_like(seen) if trimmed is None else trimmed[0, 0]), label
            bounds = made.bounds(T, S)
            assert bounds is None or torch.equal((j >= bounds[0].mT) & (j < bounds[1].mT), seen), label
            assert (bounds is None) == any(part.kept for part in made.parts), label
            for rows in (slice(0, T), slice(T - 1, T), slice(0, 1)):
                k0, k1 = made.reach(rows.start, rows.stop, T, S)
                assert not seen[rows, :k0].any() and not seen[rows, k1:].any(), label
            band = made.simple_band
            if band is not None:
                low, high = ((end or 0) + (S - T if band[2] else 0) for end in band[:2])
                low, high = (-99 if band[0] is None else low), (99 if band[1] is None else high)
                assert torch.equal((j >= i + low) & (j < i + high), seen), label
            if len({part.first for part in made.parts if part.left is not None}) <= 1:
                back = training_of(made, *qkv).mask.allowed(T, S)
                assert torch.equal(seen, torch.ones_like(seen) if back is None else back[0, 0]), label
        before, seen_before = mask, sees


@pytest.mark.sweep
@every_mask
@every_size
@inside("tiles", [(1, 1), (2, 3), (64, 64)])
def test_tiles_of_small_shapes(name: str, n: Sizes, tiles: tuple[int, int]) -> None:
    check_tiles(name, n, *tiles)


@every_mask
@inside("tiles", [(16, 32), (64, 64), (67, 131)])
def test_tiles_of_long_shapes(name: str, tiles: tuple[int, int]) -> None:
    check_tiles(name, TILED, *tiles)


def check_tiles(name: str, n: Sizes, tile_q: int, tile_k: int) -> None:
    ours = MASKS[name](n).mask.tiles(n.T, n.S, tile_q=tile_q, tile_k=tile_k)
    allowed, _ = dense(name, n)
    rest = (0, -n.S % tile_k, 0, -n.T % tile_q)  # what the last tiles lack

    def tiles(beyond: bool) -> Tensor:
        whole = torch.nn.functional.pad(allowed, rest, value=beyond)
        return whole.unflatten(3, (-1, tile_k)).unflatten(2, (-1, tile_q)).movedim(3, -2).flatten(4)

    expected = tiles(False).any(-1).to(torch.int8) + tiles(True).all(-1).to(torch.int8)
    assert ours.dtype == torch.int8 and ours.shape[0] in (1, n.B) and ours.shape[1] in (1, n.H)
    assert torch.equal(ours.expand(expected.shape), expected)


def test_tiles_know_all_three_kinds() -> None:
    assert headwise.causal().tiles(6, 6, tile_q=2, tile_k=2)[0, 0].tolist() == [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    assert headwise.window(2).tiles(6, 6, tile_q=2, tile_k=2)[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert headwise.causal().tiles(1, 4, tile_q=2, tile_k=2)[0, 0].tolist() == [[2, 2]]


def test_tiles_take_a_row_of_tiles_at_a_time() -> None:
    with headwise.testing.largest_tensor() as seen:
        headwise.causal().tiles(1024, 2048, tile_q=16, tile_k=64)
    assert seen.numel <= 8 * 16 * 2048


@pytest.mark.parametrize("bad", [{"tile_q": 0}, {"tile_k": -1}])
def test_tiles_have_a_size(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tile_[qk] is at least 1; got"):
        headwise.causal().tiles(4, 4, **bad)


DRAWINGS = {
    "causal": (headwise.causal(), 3, 5, "■ ■ ■ · ·|■ ■ ■ ■ ·|■ ■ ■ ■ ■"),
    "causal, more queries": (headwise.causal(), 5, 3, "· · ·|· · ·|■ · ·|■ ■ ·|■ ■ ■"),
    "top-left": (headwise.causal_top_left(), 3, 5, "■ · · · ·|■ ■ · · ·|■ ■ ■ · ·"),
    "offset": (headwise.causal(offset=1), 3, 4, "■ ■ · ·|■ ■ ■ ·|■ ■ ■ ■"),
    "window": (headwise.window(2), 4, 4, "■ · · ·|■ ■ · ·|· ■ ■ ·|· · ■ ■"),
    "window of one": (headwise.window(1), 3, 3, "■ · ·|· ■ ·|· · ■"),
    "both sides": (headwise.window(2, 1), 4, 5, "■ ■ ■ · ·|· ■ ■ ■ ·|· · ■ ■ ■|· · · ■ ■"),
    "no future limit": (headwise.window(1, None), 3, 3, "■ ■ ■|· ■ ■|· · ■"),
    "lengths": (headwise.lengths(torch.tensor([2])), 2, 4, "■ ■ · ·|■ ■ · ·"),
    "left padding": (headwise.lengths(torch.tensor([4]), torch.tensor([1])), 2, 4, "· ■ ■ ■|· ■ ■ ■"),
    "segments": (headwise.segments(torch.tensor([0, 0, 1])), 3, 3, "■ ■ ·|■ ■ ·|· · ■"),
    "keep": (headwise.keep(torch.tensor([True, False, True])), 2, 3, "■ · ■|■ · ■"),
    "joined": (headwise.causal() & headwise.lengths(torch.tensor([2])), 3, 3, "■ · ·|■ ■ ·|■ ■ ·"),
    "nothing": (headwise.lengths(torch.tensor([0])), 1, 2, "· ·"),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings(name: str) -> None:
    mask, T, S, expected = DRAWINGS[name]
    assert mask.draw(T, S) == expected.replace("|", "\n")


def test_drawing_of_a_bias_shows_numbers() -> None:
    x = torch.tensor([[0.0, 0.5], [-1.25, -math.inf]])
    assert headwise.bias(x).draw(2, 2).split() == ["0", "0.5", "-1.25", "·"]
    assert len({len(line) for line in headwise.bias(x).draw(2, 2).split("\n")}) == 1  # columns line up


def test_drawing_of_a_batch_row_and_a_head() -> None:
    mask = headwise.lengths(torch.tensor([1, 3]))
    assert (mask.draw(1, 3), mask.draw(1, 3, batch=1)) == ("■ · ·", "■ ■ ■")
    heads = headwise.keep(torch.tensor([[[True, False]], [[False, True]]]))
    assert (heads.draw(1, 2), heads.draw(1, 2, head=1)) == ("■ ·", "· ■")


@pytest.mark.parametrize("others", [("causal", "lengths", "keep BHTS"), ("bias TS", "window 3", "alibi")])
def test_joining_is_associative_and_its_order_does_not_matter(others: tuple[str, str, str]) -> None:
    a, b, c = (MASKS[name](SHORT).mask for name in others)
    expected = ((a & b) & c).dense(SHORT.T, SHORT.S)
    for mask in (a & (b & c), c & b & a, b & a & c):
        torch.testing.assert_close(mask.dense(SHORT.T, SHORT.S), expected)
    assert others[0] == "bias TS" or torch.equal((a & a).dense(5, 7), a.dense(5, 7))


@pytest.mark.unchecked  # the checker would have its say first
def test_joining_with_something_else_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"`&` joins masks; got Tensor; wrap a bool tensor in keep\(\)"):
        headwise.causal() & torch.ones(3, 3, dtype=torch.bool)  # type: ignore[operator]


def test_masks_are_frozen() -> None:
    mask = headwise.window(3)
    with pytest.raises(AttributeError):
        mask.parts = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        mask.parts[0].left = 5  # type: ignore[attr-defined]


@every_mask
def test_masks_travel(name: str) -> None:
    """A pytree, a pickle, a deep copy and a move all keep the meaning."""
    n = SHORT
    mask = MASKS[name](n).mask
    leaves, spec = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    copies = [pytree.tree_unflatten([x.clone() for x in leaves], spec), pickle.loads(pickle.dumps(mask))]
    for other in [*copies, copy.deepcopy(mask), mask.to("cpu")]:
        assert torch.equal(other.dense(n.T, n.S), mask.dense(n.T, n.S))
    assert all(leaf.device.type == "meta" for leaf in pytree.tree_leaves(mask.to("meta")))


@every_mask
@inside("sizes", [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(name: str, sizes: tuple[int, int]) -> None:
    T, S = sizes
    n = SHORT._replace(T=T, S=S)
    if name in ("lengths", "lengths start", "all kinds", "causal & lengths", "window & window"):
        return  # the list's lengths are made for S >= 3
    mask = MASKS[name](n).mask
    same(mask.allowed(T, S), mask.added(T, S), name, n, torch.arange(T), torch.arange(S))
    assert mask.dense(T, S).shape[2:] == (T, S)
    assert mask.tiles(T, S).shape[2:] == (min(T, 1), min(S, 1))
    bounds = mask.bounds(T, S)
    assert bounds is None or bounds[0].shape[1] == T
    assert mask.draw(T, S).count("■") == 0


def test_structure_stays_small() -> None:
    """Nothing n x n is made before it is asked for, and rows cost rows."""
    far = 1 << 20
    with headwise.testing.largest_tensor() as seen:
        mask = headwise.causal() & headwise.window(4096) & headwise.lengths(torch.tensor([far - 5]))
        mask.allowed(far, far, rows=torch.tensor([0, far - 1]))
        mask.bounds(far, far)
        mask.at(torch.tensor([5]), torch.tensor([3]), far, far)
    assert seen.numel <= 4 * far


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_types_of_lengths_and_ids(dtype: torch.dtype) -> None:
    stop = torch.tensor([3, 1], dtype=dtype)
    assert headwise.lengths(stop).allowed(1, 4)[:, 0, 0].sum(-1).tolist() == [3, 1]  # type: ignore[index]
    ids = torch.tensor([5, 5, 9], dtype=dtype)
    assert headwise.segments(ids).draw(3, 3) == "■ ■ ·\n■ ■ ·\n· · ■"


def test_alibi_slopes_of_the_paper() -> None:
    assert headwise.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert headwise.alibi_slopes(1).tolist() == [2.0**-8]
    # the authors' rule for other counts: those of the power of two below, then every other one of twice that
    expected = [2.0 ** (-8 * n / 4) for n in range(1, 5)] + [2.0**-1, 2.0**-3]
    assert headwise.alibi_slopes(6).tolist() == pytest.approx(expected)
    with pytest.raises(ValueError, match="num_heads is at least 1; got 0"):
        headwise.alibi_slopes(0)


def test_offsets_far_out_are_cut_off() -> None:
    """What int64 holds at most, one more of which is negative, means what 2**40 does: all keys, or none."""
    n = SHORT
    makes = (headwise.causal, lambda offset: headwise.window(2, 1, offset=offset))
    i, j = torch.arange(n.T)[:, None], torch.arange(n.S)[None]
    for offset in (2**63 - 1, -(2**63), torch.iinfo(torch.int32).max):
        for make in makes:
            mask, far = make(offset=torch.tensor([offset])), make(offset=max(-FAR, min(offset, FAR)))
            assert bool((mask.allowed(n.T, n.S) == far.allowed(n.T, n.S)).all())
            assert bool((mask.at(i, j, n.T, n.S)[0] == far.at(i, j, n.T, n.S)[0]).all())  # type: ignore[union-attr]
            assert all(map(torch.equal, mask.bounds(n.T, n.S), far.bounds(n.T, n.S)))  # type: ignore[arg-type]
            bounds = rules_of(mask, n.T, n.S).bounds
            assert bounds is not None and int(bounds.abs().max()) <= 2 * FAR
        slopes = torch.ones(n.H)
        ours = headwise.alibi(slopes, offset=torch.tensor([offset])).added(n.T, n.S)
        assert bool((ours <= 0).all()) and float(ours.abs().max()) <= 1.1 * FAR  # type: ignore[union-attr]


@quick
@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63)])
def test_offsets_far_out_in_every_backend(backend: str, offset: int) -> None:
    qkv, one = make_qkv(*SHORT), torch.tensor([offset, 0])
    for mask in (headwise.causal(offset=one), headwise.window(2, offset=one.flip(0))):
        allowed = mask.allowed(SHORT.T, SHORT.S)
        assert allowed is not None and allowed.flatten(1).float().mean(1).tolist().count(float(offset > 0)) <= 1
        out = attend(backend, *qkv, mask=mask)
        torch.testing.assert_close(out, attend(backend, *qkv, mask=allowed), rtol=2e-6, atol=1e-6)


def test_square_segments_need_ids_once() -> None:
    ids = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    once, twice = headwise.segments(ids), headwise.segments(ids, ids)
    assert torch.equal(once.dense(SQUARE.T, SQUARE.S), twice.dense(SQUARE.T, SQUARE.S))


def test_the_list_can_fail() -> None:
    """The comparison sees one wrong cell, and a mask of the wrong alignment."""
    n = LONG
    mask = MASKS["keep BHTS"](n).mask
    wrong = mask.dense(n.T, n.S).clone()
    wrong[0, 0, 0, 0] ^= True
    with pytest.raises(AssertionError):
        same(wrong, None, "keep BHTS", n, torch.arange(n.T), torch.arange(n.S))
    with pytest.raises(AssertionError):
        same(headwise.causal().allowed(n.T, n.S), None, "causal_top_left", n, torch.arange(n.T), torch.arange(n.S))
