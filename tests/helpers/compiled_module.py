"""torch.compile and torch.export of the module. Not collected by name: test_nn_compile.py runs this in a process of its
own, without the shape checker, whose wrappers the compiler cannot trace."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.cache import StaticCache
from headwise.nn import (
    GatedMultiHeadAttention,
    InnerAttention,
    LatentAttention,
    MultiHeadAttention,
    Rotary,
    yarn_frequencies,
)

pytestmark = [
    # torch's own tracer makes an instance of the fence's autograd function, against torch's own advice
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # inductor's own use of it
]


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test compiles afresh: the compiler counts how often one piece of code was compiled, for whatever module."""
    torch.compiler.reset()


B, T, S, H, K, D, V, M = 2, 17, 19, 6, 3, 7, 11, 13


def make(**arguments: Any) -> MultiHeadAttention:
    sizes = {"num_kv_heads": K, "head_dim": D, "value_dim": V, "bias": True}
    return MultiHeadAttention(M, H, **sizes | arguments)


def full(**arguments: Any) -> MultiHeadAttention:
    """With every part in place."""
    return make(rotary=Rotary(D, rotary_dim=4), qk_norm=nn.RMSNorm, **arguments)


def like(out: Tensor, expected: Tensor) -> bool:
    """Another order of the same float32 sums."""
    return bool((out - expected).detach().abs().max() <= 32 * torch.finfo(out.dtype).eps)


@pytest.mark.sweep
@pytest.mark.parametrize("mask", [None, headwise.causal(), headwise.window(5) & headwise.causal()], ids=str)
def test_the_module_compiles_without_a_graph_break(mask: headwise.Mask | None) -> None:
    mha, x = full(inner=InnerAttention(dropout=0.5)).eval(), torch.randn(B, T, M)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    assert like(compiled(x, mask=mask), mha(x, mask=mask))
    gate = torch.rand(H)
    assert like(
        compiled(x, mask=mask, positions=torch.arange(T) * 2, gate=gate),
        mha(x, mask=mask, positions=torch.arange(T) * 2, gate=gate),
    )


def test_a_gated_module_compiles_without_a_graph_break() -> None:
    gated, x = GatedMultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, value_dim=V), torch.randn(B, T, M)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    assert like(compiled(x, mask=headwise.causal()), gated(x, mask=headwise.causal()))


@torch.no_grad()
@pytest.mark.sweep
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_module_decodes_with_a_cache(fullgraph: bool) -> None:
    """It was an internal error of the compiler; a length is compiled anew, as a cache is a Python object."""
    mha = full().eval()
    ours, theirs = (StaticCache(B, K, D, V, capacity=9) for _ in range(2))
    compiled = torch.compile(mha, fullgraph=fullgraph, backend="aot_eager")
    for T in (3, 1, 1):
        x = torch.randn(B, T, M)
        assert like(compiled(x, cache=ours)[0], mha(x, cache=theirs)[0])
    assert ours.lengths == theirs.lengths == [5] * B


def test_a_compiled_module_trains() -> None:
    mha, x = full(), torch.randn(B, T, M)
    compiled = torch.compile(copy.deepcopy(mha), fullgraph=True, backend="aot_eager")
    for module in (mha, compiled):
        module(x, mask=headwise.causal()).square().sum().backward()
    for one, other in zip(mha.parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert bool((one.grad - other.grad).abs().max() <= 32 * torch.finfo(one.dtype).eps * one.grad.abs().max())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_module_compiles_with_inductor() -> None:
    mha, x = full(), torch.randn(B, T, M)
    assert like(torch.compile(mha, fullgraph=True)(x, mask=headwise.causal()), mha(x, mask=headwise.causal()))


def test_cross_attention_compiles() -> None:
    mha, x, memory = make(memory_dim=23), torch.randn(B, T, M), torch.randn(B, S, 23)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    assert like(compiled(x, memory), mha(x, memory))
    pair = (memory, memory + 1)
    assert like(compiled(x, pair), mha(x, pair))


class Causal(nn.Module):
    """A module with its mask inside, as one exports it."""

    def __init__(self, mha: nn.Module) -> None:
        super().__init__()
        self.mha = mha

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, mask=headwise.causal())


def test_the_module_exports_with_a_length_that_varies() -> None:
    model, x = Causal(full()).eval(), torch.randn(B, T, M)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("length")}})
    for other in (T, 5, 31, 1):
        x = torch.randn(B, other, M)
        assert like(program.module()(x), model(x))


def test_a_probe_sees_a_module_that_was_compiled_before_and_leaves_it_compiled() -> None:
    mha, x = make(), torch.randn(B, T, M)
    compiled = torch.compile(mha, fullgraph=True, backend="aot_eager")
    before = compiled(x, mask=headwise.causal())
    with headwise.nn.probe(compiled) as seen:
        compiled(x, mask=headwise.causal())
    assert [call.module for call in seen.calls] == ["_orig_mod"]
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x, mask=headwise.causal()), before)
    assert len(seen.calls) == 1


@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
def test_latent_attention_compiles_trains_and_exports(form: Any) -> None:
    rotary = Rotary(6, interleaved=True, frequencies=yarn_frequencies(6, factor=4.0, original_length=64))
    mla = LatentAttention(M, H, q_lora_rank=5, kv_lora_rank=16, nope_dim=7, rope_dim=6, value_dim=V, rotary=rotary)
    x = torch.randn(B, T, M)
    compiled = torch.compile(copy.deepcopy(mla), fullgraph=True, backend="aot_eager")
    for module in (mla, compiled):
        module(x, mask=headwise.causal(), form=form).square().sum().backward()
    for one, other in zip(mla.parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert bool((one.grad - other.grad).abs().max() <= 32 * torch.finfo(one.dtype).eps * one.grad.abs().max())

    class Formed(Causal):
        def forward(self, x: Tensor) -> Tensor:
            return self.mha(x, mask=headwise.causal(), form=form)

    model = Formed(mla).eval()
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: torch.export.Dim("length")}})
    for other in (T, 5, 31, 1):
        x = torch.randn(B, other, M)
        assert like(program.module()(x), model(x))
