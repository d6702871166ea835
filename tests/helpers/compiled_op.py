"""torch.compile and torch.export of the op. test_compile.py runs this in a process of its own, without the shape
checker, whose wrappers the compiler cannot trace."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from mask_cases import MASKS, SHORT
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import headwise
from headwise.cache import Quantized, quantize
from headwise.ops.native.append import AppendSpan, append_codes
from headwise.ops.native.library import isas
from headwise.testing import assert_same_bits, make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own, of several kinds


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled as one graph, or an error."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


BUILT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "plain": lambda q, k, v: headwise.attention(q, k, v),
    "causal": lambda q, k, v: headwise.attention(q, k, v, mask=headwise.causal()),
    "top-left": lambda q, k, v: headwise.attention(q, k, v, mask=headwise.causal_top_left()),
    "window": lambda q, k, v: headwise.attention(q, k, v, mask=headwise.window(3)),
    "softcap and lse": lambda q, k, v: headwise.attention(q, k, v, softcap=2.0, return_lse=True),
    "window and lengths": lambda q, k, v: headwise.attention(
        q, k, v, mask=headwise.window(3) & headwise.lengths(torch.tensor([5, 7]))
    ),
    "everything": lambda q, k, v: headwise.attention(
        q, k, v, mask=headwise.causal() & headwise.alibi(headwise.alibi_slopes(q.shape[1]).to(q.device)),
        softcap=2.0, sinks=q.new_zeros(q.shape[1]), gate=q.new_ones(q.shape[1]), return_lse=True,
    ),
}  # fmt: skip


def results(function: Callable[..., Any], qkv: tuple[Tensor, ...], *more: Any) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = function(*leaves, *more)
    outs = list(out) if isinstance(out, tuple) else [out]
    return [*outs, *torch.autograd.grad(outs[0].square().sum(), leaves)]


def same(ours: list[Tensor], plain: list[Tensor]) -> None:
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["plain", "top-left", "window and lengths", "everything"])
def test_masks_built_inside(name: str) -> None:
    qkv = make_qkv(*SHORT)
    same(results(whole(BUILT[name]), qkv), results(BUILT[name], qkv))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", ["causal (B,)", "lengths start", "segments (B,)", "keep BHTS", "bias BHTS", "all kinds"]
)
def test_masks_passed_in(name: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: headwise.Mask) -> Tensor:
        return headwise.attention(q, k, v, mask=mask)

    qkv, mask = make_qkv(*SHORT), MASKS[name](SHORT).mask
    same(results(whole(run), qkv, mask), results(run, qkv, mask))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["reference", "blocks", "sdpa", *(["native"] if isas() else [])])
def test_backends_by_name(name: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, k, v, mask=headwise.causal(), backend=name)

    qkv = make_qkv(*SHORT)
    same(results(whole(run), qkv), results(run, qkv))


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["reference", "blocks", "sdpa", *(["native"] if isas() else [])])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_backends_with_dynamic_shapes(backend: str, dropout: float) -> None:
    """There a number is a symbol to the compiler, defaults included, and whether it is above 0 is no bool."""
    if dropout and backend == "sdpa":
        pytest.skip("has no dropout on the CPU")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, k, v, mask=headwise.causal(), dropout=dropout, backend=backend)

    qkv = make_qkv(*SHORT)
    # With dropout the graph alone: its gradient by the compiler takes ten seconds for symbols.
    run_compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager" if dropout else "aot_eager")
    compiled, plain = results(run_compiled, qkv), results(run, qkv)
    if dropout:  # drawn anew
        assert all(x.isfinite().all() for x in compiled) and not torch.equal(compiled[0], plain[0])
    else:
        same(compiled, plain)


CONSTANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "a bool tensor": lambda: {"mask": torch.ones(2, 1, 5, 7, dtype=torch.bool)},
    "lengths": lambda: {"mask": headwise.lengths(torch.tensor([3, 7]))},
    "segments": lambda: {"mask": headwise.segments(torch.arange(5) // 2, torch.arange(7) // 2)},
    "offsets": lambda: {"mask": headwise.causal(offset=torch.tensor([1, 2]))},
    "slopes": lambda: {"mask": headwise.alibi(headwise.alibi_slopes(6))},
    "gate": lambda: {"gate": torch.ones(2, 6, 5)},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CONSTANTS)
def test_tensors_of_known_size_with_dynamic_shapes(name: str) -> None:
    """There a size is a symbol, and a tensor that is made inside has numbers for sizes: they fit nonetheless."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, k, v, **CONSTANTS[name]())

    qkv = make_qkv(*SHORT)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(*qkv), run(*qkv), rtol=2e-5, atol=2e-6)


def test_weights() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.weights(q, k, rows=[0, -1], mask=headwise.causal()) @ v.repeat_interleave(2, 1)

    qkv = make_qkv(*SHORT)
    same(results(whole(run), qkv), results(run, qkv))


def _tangent(attend: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    return torch.func.jvp(attend, (q,), (torch.ones_like(q),))[1]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda attend, q: torch.func.grad(lambda x: attend(x).square().sum())(q),
    "vjp": lambda attend, q: torch.func.vjp(attend, q)[1](q.new_ones(2, 6, 5, 13))[0],
    "jvp": _tangent,
    "vmap": lambda attend, q: torch.func.vmap(attend)(torch.stack([q, 2 * q])),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_within_a_graph(name: str) -> None:
    """The kernel has no rule for them: what it gave there was a constant, whose gradient is 0."""
    q, k, v = make_qkv(*SHORT)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return TRANSFORMS[name](lambda x: headwise.attention(x, k, v, mask=headwise.causal()), q)

    torch.testing.assert_close(whole(run)(q, k, v), run(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["causal", "window"])
def test_one_graph_for_every_length(name: str) -> None:
    """With dynamic shapes a new length compiles nothing new."""
    graphs = 0

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    run = torch.compile(BUILT[name], fullgraph=True, dynamic=True, backend=count)
    for B, T, S in ((2, 5, 7), (2, 6, 9), (3, 11, 23), (2, 31, 17), (2, 600, 700)):
        qkv = make_qkv(*SHORT._replace(B=B, T=T, S=S))
        torch.testing.assert_close(run(*qkv), BUILT[name](*qkv), rtol=2e-5, atol=2e-6)
    assert graphs == 1


def operators(graph: torch.fx.GraphModule) -> list[str]:
    """The operators of a graph that read a whole query, key or value."""
    names = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    return [
        name for name in names if "headwise" in name or "sdpa" in name or "isfinite" in name or "scaled_dot" in name
    ]


@pytest.mark.skipif(not isas(), reason="the native library is not built: make native")
@pytest.mark.sweep
@pytest.mark.parametrize("name", [*BUILT])
def test_the_native_kernel_is_one_operator(name: str) -> None:
    """No fence around it, no second operator for a mask; with a gradient two operators, whatever is between."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(BUILT[name], fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with torch.no_grad():
        compiled(*make_qkv(*SHORT))
    assert [operators(graph) for graph in graphs] == [["headwise.attend_full.default"]]
    graphs.clear()
    results(compiled, make_qkv(*SHORT))
    names = [name for graph in graphs for name in operators(graph) if "headwise" in name]
    assert names == ["headwise.attend_kept.default", "headwise.attend_backward.default"]


def test_int8() -> None:
    """One graph with the container passed in or made inside; one operator, where the native kernel is there."""
    q, k, v = make_qkv(*SHORT)
    k8, v8 = quantize(k), quantize(v)

    def attend_int8(q: Tensor, k: Quantized, v: Quantized) -> Tensor:
        return headwise.attention(q, k, v, mask=headwise.causal())

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, quantize(k), quantize(v), mask=headwise.causal())

    plain = attend_int8(q, k8, v8)
    assert_same_bits(whole(attend_int8)(q, k8, v8), plain)
    assert_same_bits(whole(inside)(q, k, v), plain)
    graphs: list[torch.fx.GraphModule] = []
    compiled = torch.compile(
        attend_int8, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    compiled(q, k8, v8)
    if isas():
        assert operators(graphs[0]) == ["headwise.attend_held.default"], operators(graphs[0])


@pytest.mark.skipif(not isas(), reason="the native library is not built: make native")
def test_appending_int8() -> None:
    """One graph writes a token to a cache and reads it; with dynamic shapes another place compiles nothing new."""
    q, k, v = make_qkv(1, 4, 2, 1, 1, 16, 8)

    def step(q: Tensor, k: Tensor, v: Tensor, stores: list[Tensor], place: int) -> Tensor:
        assert append_codes(k, v, tuple(stores), [AppendSpan(0, 0, 0, place, 1)])
        return headwise.attention(q, Quantized(*stores[:2]), Quantized(*stores[2:]))

    def empty() -> list[Tensor]:
        data = (torch.zeros(1, 2, 9, n, dtype=torch.int8) for n in (16, 8))
        return [x for part in data for x in (part, torch.zeros(part.shape[:3]))]

    count = CompileCounterWithBackend("aot_eager")
    compiled, ours, plain = torch.compile(step, fullgraph=True, dynamic=True, backend=count), empty(), empty()
    for place in (2, 3, 5, 8):
        assert_same_bits(compiled(q, k, v, ours, place), step(q, k, v, plain, place))
    for x, y in zip(ours, plain, strict=True):
        assert_same_bits(x, y)
    assert count.frame_count <= 2  # the first place is a number to the compiler, the others a symbol


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_honesty_survives_compilation(backend: str) -> None:
    """What is masked changes nothing, a NaN that is attended shows, an empty row is 0: in generated code too."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler")

    def run(q: Tensor, k: Tensor, v: Tensor, stop: Tensor) -> Tensor:
        return headwise.attention(q, k, v, mask=headwise.lengths(stop))

    q, k, v = make_qkv(*SHORT)
    compiled, stop = torch.compile(run, fullgraph=True, backend=backend), torch.tensor([0, 4])
    clean = compiled(q, k, v, stop)
    torch.testing.assert_close(clean, run(q, k, v, stop), rtol=2e-5, atol=2e-6)
    assert bool((clean[0] == 0).all())
    k[:, :, 5:] = torch.nan
    v[:, :, 4:] = torch.inf
    assert_same_bits(compiled(q, k, v, stop), clean)
    k[:, :, 2] = torch.nan
    out = compiled(q, k, v, stop)
    assert bool(out[1].isnan().all()) and bool((out[0] == 0).all())


class Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return BUILT[self.name](q, k, v)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["window and lengths", "everything"])
def test_export(name: str) -> None:
    qkv = make_qkv(*SHORT)
    exported = torch.export.export(Layer(name), qkv)
    ours, plain = exported.module()(*qkv), BUILT[name](*qkv)
    torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-6)


class Masked(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: headwise.Mask) -> Tensor:
        return headwise.attention(q, k, v, mask=mask)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["causal & lengths", "all kinds", "causal | prefix"])
def test_a_saved_export_takes_the_masks_that_the_export_takes(name: str) -> None:
    """JSON, as which torch saves what is no tensor, has lists for tuples."""
    qkv, mask, saved = make_qkv(*SHORT), MASKS[name](SHORT).mask, io.BytesIO()
    torch.export.save(torch.export.export(Masked(), (*qkv, mask)), saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    torch.testing.assert_close(loaded(*qkv, mask), Masked()(*qkv, mask), rtol=2e-5, atol=2e-6)


def test_strict_export_with_sizes_left_open() -> None:
    """Where dynamo traces, a size is an int to Python: a check of its upper end would be a guard."""
    B, T = torch.export.Dim("B"), torch.export.Dim("T")
    mha = headwise.MultiHeadAttention(12, 3, rotary=headwise.nn.Rotary(4))
    exported = torch.export.export(mha, (torch.randn(2, 5, 12),), dynamic_shapes={"x": {0: B, 1: T}}, strict=True)
    other = torch.randn(3, 11, 12)
    torch.testing.assert_close(exported.module()(other), mha(other), rtol=2e-5, atol=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["plain", "causal", "window", "softcap and lse"])
def test_export_with_sizes_left_open(name: str) -> None:
    B, T, S = (torch.export.Dim(letter) for letter in "BTS")  # of any size
    shapes = ({0: B, 2: T}, {0: B, 2: S}, {0: B, 2: S})
    exported = torch.export.export(Layer(name), make_qkv(*SHORT), dynamic_shapes=shapes).module()
    for B, T, S in ((2, 5, 7), (3, 9, 31), (2, 512, 512), (1, 1, 1)):
        other = make_qkv(*SHORT._replace(B=B, T=T, S=S))
        torch.testing.assert_close(exported(*other), BUILT[name](*other), rtol=2e-5, atol=2e-6)
