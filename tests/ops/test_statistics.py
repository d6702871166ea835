"""`headwise.ops.statistics`: every number against the float64 matrix, and the memory that it must not take."""

from __future__ import annotations

import importlib.util
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import inside
from mask_cases import FEW, MASKS, SIZES, SQUARE, TILED, Sizes, dense
from statistics_cases import OFFSETS, TOLERANCE, check, everything, expected, extras, inputs, worst

import headwise
from headwise.ops import row_blocks as scores
from headwise.ops.reference import reference_weights
from headwise.ops.statistics import HeadStatistics, attention_statistics, row_statistics, statistics
from headwise.ops.statistics import native as statistics_native
from headwise.testing import assert_same_bits, poison


@pytest.fixture(autouse=True, params=["native", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways that `statistics` has: the native kernel, and plain torch ops."""
    if request.param == "blocks":
        monkeypatch.setattr(statistics_native, "serves", lambda call, value: False)
    return str(request.param)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MASKS)
@inside("n", SIZES)
def test_every_mask(name: str, n: Sizes) -> None:
    query, key = inputs(n)
    check(n, query, key, dense(name, n)[0], mask=MASKS[name](n).mask)


@pytest.mark.parametrize("name", FEW)
def test_all_options_at_once_across_tiles(name: str) -> None:
    n = TILED
    query, key = inputs(n)
    check(n, 2 * query, key, dense(name, n)[0], mask=MASKS[name](n).mask, scale=0.7, softcap=3.0,
          sinks=torch.tensor([0.5, 4.0]))  # fmt: skip


@pytest.mark.parametrize("kind", ["outlier", "sink", "duplicates"])
def test_inputs_as_trained_models_have_them(kind: str) -> None:
    n = TILED
    query, key = inputs(n, kind=kind)
    # Logits reach hundreds here; float32 scores of that size carry 1e-5 of their own, whoever computes them.
    logits = (query.double() @ key.double().repeat_interleave(n.H // n.K, 1).mT / n.D**0.5).abs().max()
    check(n, query, key, everything(n), tolerance=max(TOLERANCE, float(logits) * 2**-22))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    n = SQUARE
    query, key = inputs(n, dtype)
    allowed = dense("causal", n)[0]
    check(n, query, key, allowed, tolerance=1e-13 if dtype == torch.float64 else TOLERANCE, mask=headwise.causal())


@pytest.mark.parametrize("T", [15, 16, 17, 31, 32, 33, 47])
@pytest.mark.parametrize("mask", ["causal", "window 3", "keep BHTS"])
def test_edges_of_row_blocks(T: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK_ELEMENTS", 1)
    assert next(scores.row_blocks(T, 41)).stop == min(T, 16)  # blocks of 16 rows, so these T lie at their edges
    n = Sizes(2, 2, 1, T, 41, 5, 3)
    query, key = inputs(n)
    check(n, query, key, dense(mask, n)[0], mask=MASKS[mask](n).mask)


@pytest.mark.parametrize("T", [255, 256, 257])
def test_edges_of_row_blocks_of_the_usual_size(T: int) -> None:
    n = Sizes(1, 1, 1, T, 1021, 3, 3)
    assert next(scores.row_blocks(T, n.S)).stop == min(T, 256)
    query, key = inputs(n)
    allowed = headwise.causal().allowed(T, n.S)
    assert allowed is not None
    check(n, query, key, allowed.expand(1, 1, T, n.S), mask=headwise.causal())


def test_bool_and_float_tensors_are_masks() -> None:
    n = SQUARE
    query, key = inputs(n)
    allowed = dense("keep BHTS", n)[0]
    from_mask = statistics(query, key, mask=headwise.keep(allowed))
    from_bool = statistics(query, key, mask=allowed)
    from_float = statistics(query, key, mask=torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf))
    for other in (from_bool, from_float):
        # The native kernel scales scores before a bias is added, else while the exponential is taken.
        assert torch.allclose(from_mask.entropy, other.entropy, atol=1e-6)
        assert torch.allclose(from_mask.pooled, other.pooled, atol=1e-6)
        assert torch.equal(from_mask.keys, other.keys)
    assert torch.equal(from_mask.entropy, from_bool.entropy) and torch.equal(from_mask.pooled, from_bool.pooled)


def test_masses_with_sinks_leave_what_the_sink_took() -> None:
    query = key = torch.zeros(1, 2, 3, 5)
    result = statistics(query, key, sinks=torch.tensor([0.0, math.log(3.0)]))
    assert torch.allclose(result.sink, torch.tensor([[[1 / 4], [1 / 2]]]).expand(1, 2, 3))  # 3 keys and the column
    assert torch.allclose(result.received, 1 - result.sink.mean(-1, keepdim=True).expand(1, 2, 3) - result.received * 2)
    assert torch.allclose(result.pooled.sum(-1), torch.ones(()))
    assert result.entropy[0, 0, 0].item() == pytest.approx(math.log(4))
    assert result.distance[0, 1].tolist() == pytest.approx([1.0, 2 / 3, 1.0])


def test_a_sink_that_takes_all() -> None:
    result = statistics(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), sinks=torch.tensor([1e4]))
    assert result.sink.eq(1).all() and result.largest.eq(0).all() and result.entropy.eq(0).all()
    assert result.pooled.eq(0).all() and result.distance.eq(0).all() and result.rows.eq(2).all()
    assert result.pooled_rows.eq(0).all()


@pytest.mark.parametrize("sink", [80.0, 90.0, 95.0, 103.0])
def test_a_sink_that_takes_nearly_all(sink: float) -> None:
    """What it leaves is a normal number of float32, or one below those, whose inverse is infinite: then it is none."""
    result = statistics(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), sinks=torch.tensor([sink]))
    some = sink < 87
    assert result.pooled.tolist() == [[[[0.5, 0.5]] * 2]] if some else result.pooled.eq(0).all()
    assert result.pooled_rows.eq(some).all() and result.distance.eq(0.5 if some else 0).all()


def test_a_sink_that_takes_nothing() -> None:
    query, key = inputs(SQUARE)
    without, result = statistics(query, key), statistics(query, key, sinks=torch.full((SQUARE.H,), -math.inf))
    assert torch.equal(result.entropy, without.entropy) and torch.equal(result.pooled, without.pooled)


def test_huge_logits_stay_finite_and_exact() -> None:
    query = torch.tensor([1e3, -1e3]).view(1, 1, 2, 1)
    result = statistics(query, torch.tensor([1.0, 1.0, 0.0]).view(1, 1, 3, 1))
    assert result.entropy[0, 0].tolist() == pytest.approx([math.log(2), 0.0])
    assert result.largest[0, 0].tolist() == pytest.approx([0.5, 1.0])


def test_what_may_not_be_attended_cannot_influence() -> None:
    n = Sizes(2, 3, 3, 37, 37, 5, 5)
    query, key = inputs(n)
    mask = headwise.causal() & headwise.lengths(torch.tensor([31, 37]))
    want = statistics(query, key, mask=mask)
    hidden = (torch.arange(n.S) >= 31)[:, None] & torch.tensor([True, False]).view(2, 1, 1, 1)
    for what in (math.nan, math.inf, 1e30):
        result = statistics(query, poison(key, hidden, what), mask=mask)
        for name in ("entropy", "largest", "distance", "received", "pooled", "offsets"):
            assert_same_bits(getattr(result, name), getattr(want, name), what=name)
    hidden_feature = torch.where(torch.arange(n.S) >= 31, math.nan, 1.0).expand(2, n.S)
    ones = statistics(query, key, mask=mask, features={"f": hidden_feature}).features["f"][0]
    assert ones.tolist() == pytest.approx([1.0] * 3)


def test_a_nan_shows_where_it_may_be_attended_and_nowhere_else() -> None:
    n = Sizes(1, 1, 1, 13, 13, 5, 5)
    query, key = inputs(n)
    key[0, 0, 7] = math.nan
    result = statistics(query, key, mask=headwise.causal(), pool=13)
    rows = torch.arange(13) >= 7
    for name in ("entropy", "largest", "distance"):
        assert torch.equal(getattr(result, name)[0, 0].isnan(), rows), name
    assert torch.equal(result.pooled[0, 0].isnan().any(-1), rows)
    query[0, 0, 3] = math.nan
    received = statistics(query, key.nan_to_num(), mask=headwise.window(2)).received[0, 0]
    assert torch.equal(received.isnan(), (torch.arange(13) == 2) | (torch.arange(13) == 3))


def test_same_bits_whatever_shares_the_batch() -> None:
    n = Sizes(3, 2, 1, 67, 67, 5, 5)
    query, key = inputs(n)
    together = statistics(query, key, mask=headwise.causal())
    alone = statistics(query[1:2], key[1:2], mask=headwise.causal())
    for name in ("entropy", "distance", "received", "pooled"):
        assert_same_bits(getattr(together, name)[1:2], getattr(alone, name), what=name)


@pytest.mark.parametrize("mask", [None, headwise.causal()], ids=["all", "causal"])
def test_offsets_run_both_ways(mask: headwise.Mask | None) -> None:
    query, key = inputs(Sizes(2, 4, 2, 13, 17, 5, 3))
    before = statistics(query, key, mask=mask, offsets=3).offsets
    assert_same_bits(before, statistics(query, key, mask=mask, offsets=(0, -1, -2, -3)).offsets)
    p, _ = reference_weights(query.double(), key.double(), mask=mask)
    far = (-(2**40), -17, -16, 2, 1, 13, 2**40)  # query 0 stands at key 4; the last at key 16
    result = statistics(query, key, mask=mask, offsets=far).offsets
    want = [0.0, 0.0, p[..., 12, 0], p[..., :11, 6:].diagonal(dim1=-2, dim2=-1).mean(-1)]
    want += [p[..., :12, 5:].diagonal(dim1=-2, dim2=-1).mean(-1), 0.0, 0.0]
    for o, exact in enumerate(want):
        assert float((result[..., o] - exact).abs().max()) <= TOLERANCE, far[o]
    assert mask is None or not result[..., 3:5].any()
    assert statistics(query, key, mask=mask, offsets=()).offsets.shape == (2, 4, 0)


@pytest.mark.parametrize("sizes", [(0, 2, 1, 3, 5), (2, 2, 1, 0, 5), (2, 2, 1, 3, 0)], ids=["B", "T", "S"])
def test_zero_sizes(sizes: tuple[int, ...]) -> None:
    B, H, K, T, S = sizes
    result = statistics(torch.zeros(B, H, T, 4), torch.zeros(B, K, S, 4), mask=headwise.causal(), pool=2)
    assert result.entropy.shape == (B, H, T) and result.pooled.shape == (B, H, min(T, 2), min(S, 2))
    assert result.rows.sum() == 0 and result.received.sum() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mask", FEW)
def test_on_a_gpu(mask: str) -> None:
    n = TILED
    query, key = inputs(n)
    features, targets = extras(n)
    rule = MASKS[mask](n).mask
    exact, _ = reference_weights(query.double(), key.double(), mask=rule)
    result = statistics(
        query.cuda(), key.cuda(), mask=rule.to("cuda"), offsets=OFFSETS, features=features, targets=targets, pool=5
    )
    assert result.entropy.is_cuda
    cpu = HeadStatistics(**{
        name: {k: x.cpu() for k, x in value.items()} if isinstance(value, dict) else value.cpu()
        for name, value in vars(result).items()
    })  # fmt: skip
    errors = worst(cpu, expected(exact, dense(mask, n)[0], torch.zeros_like(exact[..., 0]), OFFSETS, 5, n))
    assert max(errors.values()) <= TOLERANCE, errors


def test_no_gradient_is_kept() -> None:
    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    result = statistics(query, torch.randn(1, 1, 3, 4))
    assert not result.entropy.requires_grad and not result.pooled.requires_grad


Q, KEY = torch.zeros(2, 2, 3, 4), torch.zeros(2, 1, 5, 4)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"offsets": -1}, ValueError, "key minus query (negative = before), such as range(-3, 4); got -1"),
        ({"offsets": 1.5}, TypeError, "offsets are a whole number k >= 0, for the keys 0 to k places before the query"),
        ({"offsets": True}, TypeError, "such as range(-3, 4); got True"),
        ({"offsets": (1, 0.5)}, TypeError, "such as range(-3, 4); got (1, 0.5)"),
        ({"offsets": "ab"}, TypeError, "such as range(-3, 4); got 'ab'"),
        ({"pool": 0}, ValueError, "pool is at least 1; got 0"),
        ({"features": {"dot": torch.zeros(3)}}, ValueError, "feature 'dot' is a number a key: (S,) or (B, S)"),
        ({"features": {"dot": [1]}}, TypeError, "feature 'dot' is a tensor (S,) or (B, S), a number a key; got list"),
        ({"targets": {"dup": torch.zeros(3, 1)}}, TypeError, "targets 'dup' are key positions, an integer tensor"),
        ({"targets": {"dup": [0]}}, TypeError, "an integer tensor (T, n) or (B, T, n); got list"),
        ({"targets": {"dup": torch.zeros(4, 1).long()}}, ValueError, "n keys a row: (T, n) or (B, T, n) with B = 2"),
        ({"targets": {"dup": torch.full((3, 1), 5)}}, ValueError, "0 <= j < S = 5, or -1 for none; got 5 to 5"),
        ({"targets": {"dup": torch.full((3, 1), -2)}}, ValueError, "or -1 for none; got -2 to -2"),
        ({"mask": headwise.keep(torch.ones(3, 4) > 0)}, ValueError, "(2, 2, 3, 5) from the right; got (3, 4)"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks are float logits, one a query head"),
        ({"softcap": 0.0}, ValueError, "softcap > 0, and from 2**-100 to 2**100"),
    ],
)  # fmt: skip
def test_errors(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        statistics(Q, KEY, **options)  # type: ignore[arg-type]


@pytest.mark.unchecked
def test_an_option_that_there_is_not() -> None:
    for function, tensors in ((attention_statistics, (Q, KEY, KEY)), (row_statistics, (Q, KEY))):
        text = rf"^{function.__name__} has no option 'dropout'; it has mask, scale, .* targets and pool$"
        with pytest.raises(TypeError, match=text):
            function(*tensors, dropout=0.1)  # type: ignore[operator]


# --- memory ---------------------------------------------------------------------------------------------------------


def benchmark() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "statistics_memory.py"
    spec = importlib.util.spec_from_file_location("statistics_memory", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LENGTHS = (1024, 2048, 4096)


@pytest.mark.parametrize("mask", [headwise.causal(), headwise.window(512)], ids=["causal", "window"])
def test_memory_grows_linearly(mask: headwise.Mask) -> None:
    bench = benchmark()
    runs = {n: bench.peak_bytes(partial(statistics, mask=mask), n) for n in LENGTHS}
    peaks = [runs[n][0] for n in LENGTHS]
    assert bench.slope(LENGTHS, peaks) <= 1.1, peaks
    assert peaks[-1] <= 2.2 * peaks[-2], peaks  # the last doubling, where constants weigh least
    for n in LENGTHS[1:]:
        assert runs[n][1] < n * n * 4 / 2, f"a tensor of {runs[n][1]} bytes at n = {n}: is it T x S?"


def test_a_window_is_not_scored_outside() -> None:
    n = 4096
    rows = next(scores.row_blocks(n, n)).stop
    _, largest = benchmark().peak_bytes(partial(statistics, mask=headwise.window(512), pool=1), n)
    assert largest <= 8 * rows * (512 + rows)  # distances are counted in int64 before they are float


def test_the_memory_test_sees_a_matrix() -> None:
    bench = benchmark()
    lengths = (256, 512, 1024)
    runs = [bench.peak_bytes(lambda q, k: torch.softmax(q @ k.mT, -1), n) for n in lengths]
    assert bench.slope(lengths, [peak for peak, _ in runs]) > 1.9
    assert all(largest >= n * n * 4 for n, (_, largest) in zip(lengths, runs, strict=True))


@inside("learning", ["query", "key", "value", "sinks", "bias", "all"])
def test_the_output_has_the_gradient_of_attention(learning: str) -> None:
    """The statistics have none, and are those that are measured without one."""
    n = SQUARE
    query, key = inputs(n)
    tensors = {
        "query": query,
        "key": key,
        "value": torch.randn(n.B, n.K, n.S, n.V),
        "sinks": torch.randn(n.H),
        "bias": torch.randn(n.H, n.T, n.S),
    }
    leaves = {name: x.clone().requires_grad_(learning in (name, "all")) for name, x in tensors.items()}
    q, k, v = leaves["query"], leaves["key"], leaves["value"]
    scoring = {"mask": headwise.causal() & headwise.bias(leaves["bias"]), "sinks": leaves["sinks"], "softcap": 3.0}
    out, rows = attention_statistics(q, k, v, offsets=OFFSETS, **scoring)  # type: ignore[arg-type]
    wanted = headwise.attention(q, k, v, **scoring)  # type: ignore[arg-type]
    assert_same_bits(out, wanted)
    learned = [x for x in leaves.values() if x.requires_grad]
    weight = torch.randn(out.shape)
    for ours, theirs in zip(*(torch.autograd.grad(x, learned, weight) for x in (out, wanted)), strict=True):
        assert_same_bits(ours, theirs)
    with torch.no_grad():
        expected = attention_statistics(q, k, v, offsets=OFFSETS, **scoring)  # type: ignore[arg-type]
    assert not expected[0].requires_grad
    torch.testing.assert_close(out.detach(), expected[0], rtol=0, atol=2e-6)
    for name, x in vars(rows).items():
        if isinstance(x, torch.Tensor):
            assert not x.requires_grad
            torch.testing.assert_close(x, vars(expected[1])[name], rtol=0, atol=2e-6, equal_nan=True)
