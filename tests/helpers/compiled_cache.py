"""torch.compile of modules with a cache. Not collected by name: test_cache_compile.py runs this in a process of its
own, without the shape checker, whose wrappers the compiler cannot trace."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import headwise
from headwise.cache import KVCache, PagedCache, PagePool, RollingCache, StaticCache
from headwise.nn import LatentAttention, MultiHeadAttention, Rotary
from headwise.testing import assert_same_bits

B, H, K, D, V, M = 3, 6, 2, 7, 11, 13
PROMPT, STEPS, WINDOW = 5, 200, 37

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # asked by the tracer
]
KINDS = ("static", "rolling", "paged")


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test compiles afresh."""
    torch.compiler.reset()


def make(kind: str, dtype: torch.dtype, sizes: tuple[int, ...] = (K, D, V), **more: Any) -> KVCache:
    if kind == "static":
        return StaticCache(B, *sizes, capacity=PROMPT + STEPS, dtype=dtype, **more)
    if kind == "rolling":
        return RollingCache(B, *sizes, window=WINDOW, first=3, dtype=dtype, **more)
    return PagedCache(PagePool(2 * B, *sizes, dtype=dtype, **more), B)


class Model(nn.Module):
    """Two layers, each with a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_kv_heads": K, "head_dim": D, "value_dim": V}
        self.layers = nn.ModuleList(MultiHeadAttention(M, H, rotary=Rotary(D, rotary_dim=4), **sizes) for _ in range(2))

    def forward(self, x: Tensor, caches: list[Any], **options: Any) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, cache=cache, **options)[0]
        return x


def decode(run: Callable[..., Tensor], caches: list[Any], x: Tensor) -> Tensor:
    outs = [run(x[:, :PROMPT], caches)]
    outs += [run(x[:, i : i + 1], caches) for i in range(PROMPT, x.shape[1])]
    return torch.cat(outs, 1)


@torch.no_grad()
@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_200_steps_are_two_graphs(kind: str, dtype: torch.dtype) -> None:
    model, x = Model().eval(), torch.randn(B, PROMPT + STEPS, M)
    graphs = CompileCounterWithBackend("aot_eager")
    ours, theirs = ([make(kind, dtype) for _ in model.layers] for _ in range(2))
    out = decode(torch.compile(model, backend=graphs, fullgraph=True), ours, x)
    assert_same_bits(out, decode(model, theirs, x))
    assert graphs.frame_count == 2
    assert all(one.lengths == other.lengths == [PROMPT + STEPS] * B for one, other in zip(ours, theirs, strict=True))
    # and other caches run on the same graphs
    again = [make(kind, dtype) for _ in model.layers]
    assert_same_bits(decode(torch.compile(model, backend=graphs, fullgraph=True), again, x[:, :9]), out[:, :9])
    assert graphs.frame_count == 2


@torch.no_grad()
@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_dynamic(kind: str, dynamic: bool) -> None:
    model, x, graphs = Model().eval(), torch.randn(B, PROMPT + 12, M), CompileCounterWithBackend("eager")
    ours, theirs = ([make(kind, torch.float32) for _ in model.layers] for _ in range(2))
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=dynamic)
    assert_same_bits(decode(compiled, ours, x), decode(model, theirs, x))
    assert graphs.frame_count == 2


@torch.no_grad()
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_generated_code_keeps_the_order() -> None:
    model, x = Model().eval(), torch.randn(B, PROMPT + 7, M)
    ours, theirs = ([make("paged", torch.float32) for _ in model.layers] for _ in range(2))
    out = decode(torch.compile(model, fullgraph=True), ours, x)
    torch.testing.assert_close(out, decode(model, theirs, x), rtol=1e-5, atol=1e-6)


MASKS: dict[str, Callable[[], Any]] = {
    "window": lambda: headwise.window(4),
    "two rules": lambda: headwise.window(9) & headwise.dilated(2),
    "bool": lambda: torch.rand(1, H, 1, 1) > 0.2,
    "slopes": lambda: headwise.alibi(headwise.alibi_slopes(H)),
    "union": lambda: headwise.window(2) | headwise.dilated(3),
    "function": lambda: headwise.rule(lambda b, h, i, j: (i + j) % 3 != 1),
}


@torch.no_grad()
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_a_step(kind: str, name: str) -> None:
    """Those that the operator takes keep one graph; others end it. The numbers are the same."""
    torch.manual_seed(3)
    mask, held = MASKS[name](), {"union", "function"}
    ours, theirs = (make(kind, torch.float32) for _ in range(2))
    graphs = CompileCounterWithBackend("eager")

    def run(q: Tensor, k: Tensor, v: Tensor, cache: Any) -> Tensor:
        return headwise.attention(q * 2, cache.append(k, v), mask=mask, softcap=3.0, gate=gate) + 1

    compiled, gate = torch.compile(run, backend=graphs, fullgraph=name not in held), torch.rand(H)
    for T in (PROMPT, 1, 1, 1, 1):
        q, k, v = torch.randn(B, H, T, D), torch.randn(B, K, T, D), torch.randn(B, K, T, V)
        assert_same_bits(compiled(q, k, v, ours), run(q, k, v, theirs))
    assert graphs.frame_count <= (6 if name in held else 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": torch.linspace(-1, 2, H)},
    "gate": {"gate": torch.linspace(-1, 2, H)},
    "lse": {"return_lse": True},
    "backend": {"backend": "reference"},
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_attention_reach_the_operator(name: str) -> None:
    ours, theirs = (make("static", torch.float32) for _ in range(2))

    def run(q: Tensor, k: Tensor, v: Tensor, cache: Any, **options: Any) -> Any:
        return headwise.attention(q, cache.append(k, v), **options)

    compiled, options = torch.compile(run, backend="eager", fullgraph=True), OPTIONS[name]
    for T in (PROMPT, 1):
        q, k, v = torch.randn(B, H, T, D), torch.randn(B, K, T, D), torch.randn(B, K, T, V)
        got, want, without = compiled(q, k, v, ours, **options), run(q, k, v, theirs, **options), theirs.attend(q)
        pairs = zip(got, want, strict=True) if name == "lse" else ((got, want),)
        for one, other in pairs:
            assert_same_bits(one, other)
        assert name in ("lse", "backend") or not torch.allclose(got, without, rtol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_the_padding_and_autocast(side: Any) -> None:
    """Under autocast a call is made outside of the graph, as without a compiler."""
    counts = torch.tensor([5, 2, 4])
    for half in (False, True):
        torch.compiler.reset()
        ours, theirs = (make("static", torch.bfloat16 if half else torch.float32) for _ in range(2))

        def run(q: Tensor, k: Tensor, v: Tensor, cache: Any) -> Tensor:
            return headwise.attention(q, cache.append(k, v, lengths=counts, side=side))

        q, k, v = torch.randn(B, H, PROMPT, D), torch.randn(B, K, PROMPT, D), torch.randn(B, K, PROMPT, V)
        k, v = (k.bfloat16(), v.bfloat16()) if half else (k, v)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            assert_same_bits(torch.compile(run, backend="aot_eager")(q, k, v, ours), run(q, k, v, theirs))
        assert ours.lengths == theirs.lengths == [5, 2, 4]


@torch.no_grad()
@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows(kind: str) -> None:
    model, graphs = Model().eval(), CompileCounterWithBackend("aot_eager")
    ours, theirs = ([make(kind, torch.float32) for _ in model.layers] for _ in range(2))
    compiled = torch.compile(model, backend=graphs)
    for T, counts in ((PROMPT, torch.tensor([5, 2, 4])), (1, None), (3, torch.tensor([0, 3, 1])), (1, None), (1, None)):
        x = torch.randn(B, T, M)
        one, other = (run(x, caches, lengths=counts) for run, caches in ((compiled, ours), (model, theirs)))
        assert_same_bits(one, other)
    assert ours[1].lengths == theirs[1].lengths == [8, 8, 8]


@torch.no_grad()
@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_graph_reads_of_a_cache_is_as_it_is_now(kind: str) -> None:
    """Lengths, columns, free pages and rows between two appends of one compiled function are those after the first."""
    ours, theirs = (make(kind, torch.float32) for _ in range(2))

    def run(k: Tensor, v: Tensor, cache: Any) -> tuple[Tensor, Any]:
        before = list(cache.lengths)
        cache.append(k, v)
        seen = [before, list(cache.lengths), list(cache.columns), cache.length, str(cache)]
        if kind == "paged":
            seen += [cache.pool.free, [list(table) for table in cache.tables]]
        cache.truncate(cache.length - 1).append(k, v).reorder([1, 1, 0])
        key, _ = cache.view()
        dense = key if isinstance(key, Tensor) else key.dense()
        return dense[:, :, : cache.columns[0]] * 2, seen

    compiled = torch.compile(run, backend="eager")
    for T in (2, 1, 1, 3, 90):
        k, v = torch.randn(B, K, T, D), torch.randn(B, K, T, V)
        (one, saw), (other, seen) = compiled(k, v, ours), run(k, v, theirs)
        assert saw == seen
        assert_same_bits(one, other)


@torch.no_grad()
def test_latent_and_cross_attention() -> None:
    mla = LatentAttention(M, 3, kv_lora_rank=6, nope_dim=5, rope_dim=2, value_dim=7).eval()
    x, graphs = torch.randn(B, PROMPT + 15, M), CompileCounterWithBackend("eager")
    ours, theirs = (StaticCache(B, 1, 8, 6, capacity=30, shared=True) for _ in range(2))

    def one(run: Any) -> Callable[..., Tensor]:
        return lambda x, cache: run(x, cache=cache)[0]

    compiled = torch.compile(mla, backend=graphs)
    assert_same_bits(decode(one(compiled), ours, x), decode(one(mla), theirs, x))
    assert graphs.frame_count <= 8

    cross, memory = MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, memory_dim=5).eval(), torch.randn(B, 9, 5)
    a, b = (StaticCache(B, K, D, capacity=9, causal=False) for _ in range(2))
    compiled = torch.compile(cross, backend="eager")
    for given in (memory, None, None):
        assert_same_bits(compiled(x, given, cache=a)[0], cross(x, given, cache=b)[0])
    assert a.lengths == [9] * B


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_absorbed_latent_attention_is_two_graphs(kind: str) -> None:
    mla = LatentAttention(M, 3, kv_lora_rank=6, nope_dim=5, rope_dim=2, value_dim=7).eval()
    x, graphs = torch.randn(B, PROMPT + 15, M), CompileCounterWithBackend("eager")
    ours, theirs = (make(kind, torch.float32, (1, 8, 6), shared=True) for _ in range(2))
    compiled = torch.compile(mla, backend=graphs, fullgraph=True)

    def one(run: Any) -> Callable[..., Tensor]:
        return lambda x, cache: run(x, cache=cache, form="absorbed")[0]

    assert_same_bits(decode(one(compiled), ours, x), decode(one(mla), theirs, x))
    assert graphs.frame_count == 2


def test_gradients_through_a_compiled_call() -> None:
    """A gradient ends the graph; it is that of the same call without a compiler."""
    model, x = Model(), torch.randn(B, PROMPT, M)
    found = []
    for run in (torch.compile(model, backend="aot_eager"), model):
        model.zero_grad()
        run(x, [make("static", torch.float32) for _ in model.layers]).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(model.parameters()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_refusal_is_that_of_the_cache() -> None:
    cache = StaticCache(B, K, D, V, capacity=3)
    compiled = torch.compile(lambda k, v: cache.append(k, v) and None, backend="eager")
    with pytest.raises(ValueError, match="capacity 3 has no room for 4 tokens"):
        compiled(torch.randn(B, K, 4, D), torch.randn(B, K, 4, V))
    assert cache.lengths == [0] * B


@torch.no_grad()
def test_a_cache_made_in_the_graph_and_copies() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headwise.attention(q, StaticCache(B, K, D, V, capacity=9).append(k, v))

    q, k, v = torch.randn(B, H, 2, D), torch.randn(B, K, 2, D), torch.randn(B, K, 2, V)
    assert_same_bits(torch.compile(run, backend="eager")(q, k, v), run(q, k, v))
    # a fork is reached by a handle of its own
    one = StaticCache(B, K, D, V, capacity=9).append(k, v)
    other = one.fork()
    add = torch.compile(lambda k, v, cache: cache.append(k, v), backend="eager")
    add(k, v, other)
    assert (one.lengths, other.lengths) == ([2] * B, [4] * B)
