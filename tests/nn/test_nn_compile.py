"""What a module must survive: torch.compile, torch.export, autocast, copies, pickles, the meta device, vmap."""

import copy
import io
import pickle
from typing import Any

import fresh
import pytest
import torch
from torch import nn

import headwise
from headwise.nn import InnerAttention, MultiHeadAttention, Rotary
from headwise.testing import assert_same_bits

pytestmark = pytest.mark.slow

B, T, S, H, K, D, V, M = 2, 17, 19, 6, 3, 7, 11, 13


def make(**arguments: Any) -> MultiHeadAttention:
    sizes = {"num_kv_heads": K, "head_dim": D, "value_dim": V, "bias": True}
    return MultiHeadAttention(M, H, **sizes | arguments)


def full(**arguments: Any) -> MultiHeadAttention:
    """With every part in place."""
    return make(rotary=Rotary(D, rotary_dim=4), qk_norm=nn.RMSNorm, **arguments)


def test_the_module_compiles_and_exports() -> None:
    """The tests of compiled_module.py, in a process without the shape checker."""
    ran = fresh.run_unchecked("compiled_module.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]


# torch's RMSNorm says that float32 weights and bfloat16 input, which is what autocast makes, run unfused.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_runs_in_the_lower_precision_and_gives_close_numbers() -> None:
    mha, x = full(), torch.randn(B, T, M)
    exact = mha(x, mask=headwise.causal())
    with torch.autocast("cpu", torch.bfloat16):
        out = mha(x, mask=headwise.causal())
    assert out.dtype == torch.bfloat16
    assert float((out.float() - exact).detach().abs().max()) < 0.05 * float(exact.detach().abs().max())
    out.float().sum().backward()
    assert mha.q_proj.weight.grad is not None and mha.q_proj.weight.grad.dtype == torch.float32


def test_a_copy_and_a_pickle_are_the_same_module() -> None:
    mha, x = full(inner=InnerAttention(softcap=3.0, sinks=torch.randn(H))), torch.randn(B, T, M)
    stored = io.BytesIO()
    torch.save(mha.state_dict(), stored)
    stored.seek(0)
    loaded = full(inner=InnerAttention(softcap=3.0, sinks=torch.zeros(H)))
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    for again in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha)), loaded):
        assert_same_bits(again(x, mask=headwise.causal()), mha(x, mask=headwise.causal()))
        assert again.q_proj.weight.data_ptr() != mha.q_proj.weight.data_ptr()


def test_a_module_can_be_made_on_the_meta_device_and_filled_later() -> None:
    source, x = full(), torch.randn(B, T, M)
    with torch.device("meta"):
        empty = full()
        assert empty(torch.randn(B, T, M), mask=headwise.causal()).shape == (B, T, M)
    assert all(p.is_meta for p in empty.parameters()) and not list(empty.buffers())
    empty.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert_same_bits(empty(x), source(x))
    with torch.device("meta"):
        empty = full()
    empty.load_state_dict(source.state_dict(), assign=True)
    assert_same_bits(empty(x), source(x))


def test_a_module_moves_to_float64() -> None:
    mha, x = full(), torch.randn(B, T, M)
    exact = mha.double()(x.double())
    assert exact.dtype == torch.float64
    assert torch.allclose(mha.float()(x).double(), exact, atol=1e-5)


def test_gradients_of_the_module_to_second_order() -> None:
    mha = MultiHeadAttention(6, 2, rotary=Rotary(3, rotary_dim=2), bias=True).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mha(x, mask=headwise.causal()), x)
    assert torch.autograd.gradgradcheck(lambda x: mha(x, mask=headwise.causal()), x)


@pytest.mark.unchecked
def test_an_ensemble_of_modules_runs_under_vmap() -> None:
    modules = [make() for _ in range(3)]
    x = torch.randn(B, T, M)
    parameters, _ = torch.func.stack_module_state(modules)  # type: ignore[arg-type]
    out = torch.func.vmap(lambda p: torch.func.functional_call(modules[0], p, (x,), {"mask": headwise.causal()}))(
        parameters
    )
    for one, module in zip(out, modules, strict=True):
        assert torch.allclose(one, module(x, mask=headwise.causal()), atol=1e-6)
