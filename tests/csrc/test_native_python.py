"""The native kernel from Python: when it is chosen, how masks reach it, its short way, its absence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from backends import needs_native
from draw import drawn
from mask_cases import GATHERED, MASKS, SHORT, SIZES, TILED, UNEQUAL, Sizes
from native_cases import rules_of, training_of
from test_meaning import EMPTY_ROWS, EXTRAS, options_of
from torch import Tensor

import headwise
from headwise.ops.masks.rules import Lengths
from headwise.ops.native import backend as native
from headwise.ops.native import library as native_library
from headwise.testing import assert_same_bits, largest_tensor, make_qkv


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been compiled."""
    monkeypatch.setattr(native_library, "_trouble", "the native library is not there: reinstall")
    monkeypatch.setattr(native_library, "attend", None)
    yield


# -- chosen or not ---------------------------------------------------------------------------------------------------

LOWERED = {name: build for name, build in MASKS.items() if name not in GATHERED}


@needs_native
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_it_serves_every_mask(mask: str | None) -> None:
    made = None if mask is None else MASKS[mask](SHORT).mask
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        choice = headwise.explain(*make_qkv(*SHORT, dtype=dtype), mask=made)
        assert (choice.backend, choice.why) == ("native", "headwise's own kernel")


@needs_native
@pytest.mark.parametrize("extra", EXTRAS)
def test_it_serves_every_option(extra: str) -> None:
    options = options_of(extra, SHORT)
    for more in ({}, {"return_lse": True}, {"dropout": 0.5}):
        assert headwise.explain(*make_qkv(*SHORT), **options, **more).backend == "native"


WITHOUT: dict[str, tuple[Callable[[], tuple[Tensor, ...]], str]] = {
    "doubles": (lambda: make_qkv(*SHORT, dtype=torch.float64), "headwise's own kernel has no float64"),
    "no keys": (lambda: make_qkv(2, 4, 2, 3, 0, 7, 2), "headwise's own kernel takes no empty tensors"),
    "meta": (lambda: make_qkv(*SHORT, device="meta"), "headwise's own kernel runs on the CPU"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_it_leaves_to_others(name: str) -> None:
    made, why = WITHOUT[name]
    choice = headwise.explain(*made())
    assert choice.others["native"] == why
    with pytest.raises(ValueError, match=f"backend 'native' does not support this call: {why}"):
        headwise.attention(*made(), backend="native")


TOO_MANY = {
    "at most 8 mask tensors": [
        mask for _ in range(5) for mask in (headwise.keep(torch.ones(7) > 0), headwise.bias(torch.zeros(7)))
    ],
    "at most 4 pairs of segments": [headwise.segments(torch.zeros(5).long(), torch.zeros(7).long()) for _ in range(5)],
    "at most 4 rules of ALiBi": [headwise.alibi(torch.zeros(6))] * 5,
}


@needs_native
@pytest.mark.parametrize("why", TOO_MANY)
def test_more_rules_than_it_takes_run_elsewhere(why: str) -> None:
    masks = TOO_MANY[why]
    joined = masks[0]
    for mask in masks[1:]:
        joined = joined & mask
    qkv = make_qkv(*SHORT)
    choice = headwise.explain(*qkv, mask=joined)
    assert choice.backend != "native" and why in choice.others["native"]
    torch.testing.assert_close(headwise.attention(*qkv, mask=joined), headwise.attention(*qkv), rtol=2e-6, atol=1e-6)


@needs_native
def test_inside_torch_func_the_definition_runs() -> None:
    seen = []

    def look(q: Tensor) -> Tensor:
        choice = headwise.explain(q, q, q)
        seen.append((choice.backend, choice.others["native"]))
        return headwise.attention(q, q, q)

    torch.func.vmap(look)(torch.randn(2, 1, 2, 3, 4))
    assert seen == [("reference", "headwise's own kernel has no torch.func rules (vmap, jvp)")]


class Wrapped(Tensor):
    """A tensor around another, as DTensor is one."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], *_: Any) -> Any:
        return Wrapped(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapped, function(*unwrapped[0], **unwrapped[1]))


@needs_native
@pytest.mark.unchecked
def test_tensors_around_tensors_run_elsewhere() -> None:
    qkv = tuple(Wrapped(x) for x in make_qkv(*SHORT))
    choice = headwise.explain(*qkv)
    assert choice.backend != "native" and "no subclass that wraps others" in choice.others["native"]


# -- there or not ------------------------------------------------------------------------------------------------------


DECODING = (2, 3, 3, 1, 7, 11, 13)  # one query, no groups
OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any], torch.dtype, str]] = {
    "plain": (SHORT, {}, torch.float32, "sdpa"),
    "causal": (SHORT, {"mask": headwise.causal()}, torch.float32, "sdpa"),
    "softcap": (SHORT, {"softcap": 2.0}, torch.float32, "blocks"),
    "decoding": (DECODING, {}, torch.float32, "blocks"),
    "decoding in bfloat16": (DECODING, {}, torch.bfloat16, "sdpa"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_without_the_library_all_runs_and_explain_says_so(name: str, no_library: None) -> None:
    sizes, options, dtype, backend = OTHERS[name]
    qkv = make_qkv(*sizes, dtype=dtype)
    choice = headwise.explain(*qkv, **options)
    assert choice.backend == backend
    assert choice.others["native"] == "the native library is not there: reinstall"
    assert_same_bits(headwise.attention(*qkv, **options), headwise.attention(*qkv, **options, backend=backend))
    bits = "on some CPUs the number of threads changes its gradient's bits"
    assert bits not in choice.why
    for x in qkv:
        x.requires_grad_()
    learning = headwise.explain(*qkv, **options)
    assert learning.backend == backend and (bits in learning.why) == (backend == "sdpa")


def test_without_the_library_it_is_not_to_be_had_by_name(no_library: None) -> None:
    qkv = make_qkv(*SHORT)
    with pytest.raises(ValueError, match="does not support this call: the native library is not there"):
        headwise.attention(*qkv, backend="native")


def in_a_process(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    ran = fresh.run(code, path=[Path(headwise.__file__).parents[1]], **environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.strip()


ASK = "import torch, headwise; q = torch.zeros(1, 1, 2, 8); print(headwise.explain(q, q, q).others.get('native'))"


def test_it_can_be_switched_off() -> None:
    assert in_a_process(ASK, HEADWISE_NATIVE="0") == "the native library is switched off by HEADWISE_NATIVE=0"


def test_a_library_that_is_not_there_or_does_not_load(tmp_path: Path) -> None:
    broken = tmp_path / "_native.so"
    folder = Path(headwise.__file__).parent / "ops" / "native"
    # What headwise/__init__.py does, with another path: the modules are found before the package is imported.
    set_path = f"""
import importlib.util, pathlib, sys, torch
for name in ("after_import", "operators"):
    spec = importlib.util.spec_from_file_location("headwise.ops.native." + name, {str(folder)!r} + "/" + name + ".py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
module.LIBRARY = pathlib.Path({str(broken)!r})
"""
    output = in_a_process(set_path + ASK, HEADWISE_NATIVE="1")
    assert output == "the native library is not there: reinstall headwise where there is a C++ compiler"
    broken.write_bytes(b"no library")
    output = in_a_process(set_path + ASK, HEADWISE_NATIVE="1")
    assert output.startswith("the native library does not load: ") and "\n" not in output


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    "trace", ["torch.compile(f, fullgraph=True, backend='eager')(q)", "torch.export.export(M(), (q,))"]
)
def test_it_can_be_traced_first(trace: str) -> None:
    """Where nothing has been called before: what is imported then breaks no graph and is no part of it."""
    said = in_a_process(
        "import torch, headwise; from headwise.ops.native import library as native_library\n"
        "q = torch.randn(1, 1, 2, 8)\n"
        "f = lambda q: headwise.attention(q, q, q, mask=headwise.causal())\n"
        "class M(torch.nn.Module):\n  def forward(self, q): return f(q)\n"
        f"{trace}; print(native_library.attend)"
    )
    assert said == "headwise.attend.default"


# -- masks on the way in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LOWERED, *(f"empty rows: {name}" for name in EMPTY_ROWS)])
def test_a_mask_survives_the_way_in_and_back(name: str) -> None:
    """Lowered to the operator's arguments and read back, it says the same of every pair."""
    for n in (*SIZES, TILED) if name in MASKS else (SHORT,):
        mask = MASKS[name](n).mask if name in MASKS else EMPTY_ROWS[name.removeprefix("empty rows: ")]
        back = training_of(mask, *make_qkv(*n)).mask
        for ours, expected in (
            (back.allowed(n.T, n.S), mask.allowed(n.T, n.S)),
            (back.added(n.T, n.S), mask.added(n.T, n.S)),
        ):
            expanded = [None if x is None else x.expand(n.B, n.H, n.T, n.S) for x in (ours, expected)]
            if expanded[0] is None or expanded[1] is None:
                rest = [x for x in expanded if x is not None]
                assert all(x.all() for x in rest if x.dtype == torch.bool) and len(rest) < 2
            elif expanded[0].dtype == torch.bool:
                assert torch.equal(*expanded)
            else:
                torch.testing.assert_close(*expanded)


def test_bands_become_two_numbers() -> None:
    rules = rules_of(headwise.causal() & headwise.window(4) & headwise.window(9, 2, offset=5), 3, 10)
    assert rules == (1.0, 0.0, None, 4, 8, None, None, None, None, None, None)


def test_lengths_and_offsets_become_four_numbers_a_row() -> None:
    mask = headwise.causal(offset=torch.tensor([2, 5])) & headwise.lengths(torch.tensor([4]), torch.tensor([0, 1]))
    bounds = rules_of(mask & headwise.window(3, 9), 3, 10).bounds
    assert bounds is not None and bounds.tolist() == [[5, 3, 0, 4], [5, 6, 1, 4]]
    mask = headwise.window(3, 9, offset=torch.tensor([9, 5])) & headwise.window(4, None, offset=torch.tensor([8]))
    mask = (
        mask
        & headwise.lengths(torch.tensor([4, 9]), torch.tensor([2]))
        & headwise.lengths(torch.tensor([6]), torch.tensor([3]))
    )
    bounds = rules_of(mask & headwise.window(2, 1), 3, 10).bounds
    assert bounds is not None and bounds.tolist() == [[7, 9, 3, 4], [6, 9, 3, 6]]


@pytest.mark.parametrize("index", [torch.tensor([1.0, 2.0]), torch.tensor([True, False])])
def test_no_conversion_hides_a_wrong_index(index: Tensor) -> None:
    with pytest.raises(TypeError, match="an index is an integer tensor"):
        rules_of(headwise.Mask((Lengths(index),)), 3, 4)


@needs_native
def test_a_bias_of_a_small_float_type_is_converted() -> None:
    qkv, small = make_qkv(*SHORT), torch.randn(5, 7).to(torch.float8_e5m2)
    assert_same_bits(headwise.attention(*qkv, mask=small), headwise.attention(*qkv, mask=small.float()))


@needs_native
def test_no_mask_becomes_a_matrix() -> None:
    """Nor does a bias that broadcasts; forward and backward."""
    n = Sizes(2, 2, 1, 1500, 1600, 8, 8)
    mask = headwise.window(70) & headwise.lengths(torch.tensor([1400, 1600])) & headwise.bias(torch.randn(1, 1600))
    mask = mask & headwise.alibi(torch.rand(2)) & headwise.segments(torch.zeros(1500).long(), torch.zeros(1600).long())
    qkv = make_qkv(*n, requires_grad=True)
    with largest_tensor() as seen:
        torch.autograd.grad(headwise.attention(*qkv, mask=mask).sum(), qkv)
    assert 0 < seen.numel <= n.B * n.H * n.S * n.D


@needs_native
def test_the_default_device_is_no_matter() -> None:
    qkv, mask = make_qkv(*SHORT), headwise.causal() & headwise.lengths(torch.tensor([5, 7])) & headwise.window(3)
    mask = mask & headwise.alibi(torch.ones(6))
    plain = headwise.attention(*qkv, mask=mask)
    with torch.device("meta"):
        assert_same_bits(headwise.attention(*qkv, mask=mask), plain)


# -- the short way -----------------------------------------------------------------------------------------------------

SHORT_WAY: dict[str, dict[str, Any]] = {
    **{f"mask {name}": {"mask": build(SHORT).mask} for name, build in LOWERED.items()},
    **{f"option {name}": options_of(name, SHORT) for name in EXTRAS},
    "a bool tensor": {"mask": torch.rand(5, 7) > 0.2},
    "a float tensor": {"mask": torch.randn(6, 5, 7)},
    "lse": {"return_lse": True},
    "everything": {"mask": MASKS["all kinds"](SHORT).mask, "return_lse": True, **options_of("everything", SHORT)},
    "by name": {"backend": "native"},
}


@needs_native
@pytest.mark.parametrize("name", SHORT_WAY)
def test_the_short_way_is_taken_and_is_the_long_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and without a single question of the full path."""
    qkv, options = make_qkv(*SHORT), SHORT_WAY[name]
    assert native_library.error_for() is None
    with monkeypatch.context() as change:
        change.setattr(native_library, "attend", None)
        long = headwise.attention(*qkv, **options)
    monkeypatch.setattr("headwise.ops.attention._checked", None)
    short = headwise.attention(*qkv, **options)
    for x, y in zip(
        short if isinstance(short, tuple) else (short,), long if isinstance(long, tuple) else (long,), strict=True
    ):
        assert_same_bits(x, y)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_short_way_serves_what_the_kernel_can(dtype: torch.dtype) -> None:
    """It falls back for no mask, size or option of the suite that the full path would give to the kernel as well."""
    fallen, calls = [], 0
    cases = drawn([*itertools.product(LOWERED.items(), (*SIZES, *UNEQUAL, TILED))])
    for (name, build), n in cases:
        if name.endswith("(B,)") and n.B == 1:
            continue
        for extra in (None, *EXTRAS):
            options = {} if extra is None else options_of(extra, n)
            arguments = {"mask": build(n).mask, "scale": None, "softcap": None, "sinks": None, "dropout": 0.0}
            arguments |= {"gate": None, "return_lse": False} | options
            if arguments["dropout"]:  # needs a seed
                continue
            calls += 1
            if native.fast_path(*make_qkv(*n, dtype=dtype), **arguments) is None:
                fallen.append((name, n, extra))
    assert not fallen and calls > len(cases)


@needs_native
@pytest.mark.parametrize("option", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), MemoryError("no room"), IndexError("list index out of range")]
)
def test_a_defect_is_no_slow_way(option: dict[str, float], error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails(*args: Any) -> None:
        calls.append(args)
        raise error

    monkeypatch.setattr(native_library, "attend", fails)
    monkeypatch.setattr(native_library, "attend_full", fails)
    with pytest.raises(type(error), match=str(error)):
        headwise.attention(*make_qkv(*SHORT), **option)
    assert len(calls) == 1


LONG_WAY: dict[str, Callable[[], Any]] = {
    "a gradient": lambda: headwise.attention(*make_qkv(*SHORT, requires_grad=True)),
    "of a bias": lambda: headwise.attention(*make_qkv(*SHORT), mask=torch.zeros(5, 7, requires_grad=True)),
    "of slopes": lambda: headwise.attention(*make_qkv(*SHORT), mask=headwise.alibi(torch.ones(6, requires_grad=True))),
    "of sinks": lambda: headwise.attention(*make_qkv(*SHORT), sinks=torch.zeros(6, requires_grad=True)),
    "of a gate": lambda: headwise.attention(*make_qkv(*SHORT), gate=torch.ones(6, requires_grad=True)),
}


@needs_native
@pytest.mark.parametrize("name", LONG_WAY)
def test_what_needs_a_gradient_gets_one(name: str) -> None:
    assert LONG_WAY[name]().requires_grad
    with torch.no_grad():
        assert not LONG_WAY[name]().requires_grad


@needs_native
def test_one_mask_serves_calls_of_different_lengths() -> None:
    """What a mask has worked out for itself holds for every T and S."""
    for mask in (headwise.causal(), headwise.window(3) & headwise.causal(), headwise.window(2, offset=1)):
        for T, S in ((5, 7), (3, 3), (1, 9), (6, 2)):
            qkv = make_qkv(2, 4, 2, T, S, 8, 8)
            torch.testing.assert_close(
                headwise.attention(*qkv, mask=mask),
                headwise.attention(*qkv, mask=mask, backend="reference"),
                rtol=2e-6,
                atol=1e-6,
            )
