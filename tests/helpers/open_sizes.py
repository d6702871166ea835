"""One graph for every size: each option of the op under torch.compile and torch.export with sizes left open.

test_open_sizes.py runs this in a process of its own, without the shape checker, whose wrappers the compiler cannot
trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import headwise
from headwise.cache import quantize
from headwise.ops.storage.paged import Paged
from headwise.testing import make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own, of several kinds


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Sizes(NamedTuple):
    """The sizes of a call that are left open; `D` and `V` are the model's."""

    B: int
    K: int
    G: int
    T: int
    S: int

    @property
    def H(self) -> int:
        return self.K * self.G


SIZES = [
    Sizes(2, 3, 7, 11, 17),
    Sizes(3, 5, 2, 7, 13),
    Sizes(5, 2, 2, 13, 31),
    Sizes(7, 5, 3, 19, 23),
    Sizes(3, 2, 7, 37, 41),
]
D, V = 8, 20
Case = Callable[[Sizes], dict[str, Any]]
"""The options of a call; a tensor or container among them is an input of the graph, anything else a constant."""


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, Case] = {
    "plain": lambda n: {},
    "causal": lambda n: {"mask": headwise.causal()},
    "causal top-left": lambda n: {"mask": headwise.causal_top_left()},
    "window": lambda n: {"mask": headwise.window(3)},
    "prefix or window": lambda n: {"mask": headwise.prefix(2) | headwise.window(3)},
    "dilated": lambda n: {"mask": headwise.dilated(2) & headwise.causal()},
    "blocks": lambda n: {"mask": headwise.blocks(4)},
    "lengths": lambda n: {"mask": headwise.lengths(torch.arange(n.B) + 1)},
    "causal and lengths": lambda n: {"mask": headwise.causal() & headwise.lengths(torch.arange(n.B) + 1)},
    "offsets": lambda n: {"mask": headwise.causal(offset=torch.arange(n.B))},
    "segments": lambda n: {"mask": headwise.segments(torch.arange(n.T) // 2, torch.arange(n.S) // 2)},
    "keep": lambda n: {"mask": headwise.keep(_drawn(n.B, 1, n.T, n.S) > 0)},
    "bool tensor": lambda n: {"mask": _drawn(n.T, n.S) > 0},
    "bias": lambda n: {"mask": headwise.bias(_drawn(n.B, n.H, n.T, n.S))},
    "alibi": lambda n: {"mask": headwise.alibi(_drawn(n.H).abs())},
    "relative": lambda n: {"mask": headwise.relative(_drawn(n.H, 5))},
    "rule": lambda n: {"mask": headwise.rule(lambda b, h, i, j: (i + j) % 3 != 1)},
    "softcap and scale": lambda n: {"softcap": 5.0, "scale": 0.25},
    "sinks": lambda n: {"sinks": _drawn(n.H)},
    "gate (H,)": lambda n: {"gate": _drawn(n.H)},
    "gate (B, H)": lambda n: {"gate": _drawn(n.B, n.H)},
    "gate (B, H, T)": lambda n: {"gate": _drawn(n.B, n.H, n.T), "mask": headwise.causal()},
    "gate (B, H, T, V)": lambda n: {"gate": _drawn(n.B, n.H, n.T, V)},
    "lse": lambda n: {"return_lse": True, "mask": headwise.causal()},
    "everything": lambda n: {
        "mask": headwise.causal() & headwise.lengths(torch.arange(n.B) + 1) & headwise.alibi(_drawn(n.H).abs()),
        "softcap": 5.0, "sinks": _drawn(n.H), "gate": _drawn(n.H), "return_lse": True,
    },
}  # fmt: skip


def inputs(n: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(n.B, n.H, n.K, n.T, n.S, D, V)


def outputs(result: Any) -> list[Tensor]:
    """The tensors of a result."""
    return [result] if isinstance(result, Tensor) else [x for part in result or () for x in outputs(part)]


def graphs_of(function: Callable[..., Any], arguments: Callable[[Sizes], tuple[Any, ...]]) -> int:
    """The graphs that all sizes take together; what each gives is compared with the eager call."""
    count = CompileCounter()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=count)
    for n in SIZES:
        given = arguments(n)
        for ours, plain in zip(outputs(compiled(*given)), outputs(function(*given)), strict=True):
            torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-6)
    return count.frame_count


def attend(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Any:
    return headwise.attention(q, k, v, **options)


BY_NAME = ("plain", "causal and lengths", "keep", "bias", "rule", "gate (B, H, T)")
PAIRS = [*((name, "auto") for name in CASES), *((name, backend) for name in BY_NAME for backend in ("blocks", "sdpa"))]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_each_option_takes_one_graph(name: str, backend: str) -> None:
    assert graphs_of(attend, lambda n: (*inputs(n), {**CASES[name](n), "backend": backend})) == 1


@pytest.mark.parametrize("name", ["gate (B, H, T)", "everything"])
def test_options_that_were_compiled_anew_for_every_size(name: str) -> None:
    test_each_option_takes_one_graph(name, "auto")


def test_int8_takes_one_graph() -> None:
    def quantised(n: Sizes) -> tuple[Any, ...]:
        q, k, v = inputs(n)
        return q, quantize(k), quantize(v), {"mask": headwise.causal()}

    assert graphs_of(attend, quantised) == 1


def test_pages_take_one_graph() -> None:
    def run(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, length: int) -> Tensor:
        return headwise.attention(q, Paged(keys, table, length), Paged(values, table, length))

    def paged(n: Sizes) -> tuple[Any, ...]:
        q, k, v = inputs(n)
        table = torch.arange(n.B).flip(0)[:, None]
        rest = (0, 0, 0, 128 - n.S)
        return q, *(torch.nn.functional.pad(x.flip(0), rest) for x in (k, v)), table, n.S

    assert graphs_of(run, paged) == 1


def test_weights_take_one_graph() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.weights(q, k, mask=headwise.causal())

    assert graphs_of(run, inputs) == 1


class Attend(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> Any:
        return headwise.attention(q, k, v, **self.options, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_export_pins_no_size(name: str) -> None:
    n, AUTO = SIZES[0], torch.export.Dim.AUTO
    net, given, shapes = Attend(), (*inputs(n), CASES[name](n)), torch.export.ShapesCollection()
    for leaf in torch.utils._pytree.tree_leaves(given):
        if isinstance(leaf, Tensor):
            shapes[leaf] = {axis: AUTO for axis in range(leaf.ndim) if leaf.shape[axis] not in (1, D, V)}
    exported = torch.export.export(net, given, dynamic_shapes=shapes)
    query, key = (node.meta["val"].shape for node in exported.graph.nodes if node.name in ("q", "k"))
    pinned = [str(size) for size in (*query[:3], *key[1:3]) if isinstance(size, int)]
    assert not pinned, f"{name} pins {', '.join(pinned)} of {n}"


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", ["auto", "blocks", "sdpa", "reference"])
@pytest.mark.parametrize("most", [13, 512])
def test_export_of_grouped_heads_with_bounds(name: str, most: int) -> None:
    """A bound is a promise: a guard that cannot be shown to hold for all sizes within it is an error."""
    T, n = torch.export.Dim("T", min=2, max=most), SIZES[0]._replace(T=11, S=11)
    for mask in (None, headwise.causal(), headwise.lengths(torch.tensor([3]))):
        net = Attend(mask=mask, backend=name)
        exported = torch.export.export(net, (*inputs(n), {}), dynamic_shapes=({2: T}, {2: T}, {2: T}, {}))
        for size in (2, 7, 13):
            other = inputs(n._replace(T=size, S=size))
            torch.testing.assert_close(exported.module()(*other, {}), net(*other, {}), rtol=2e-5, atol=2e-6)
