"""GatedMultiHeadAttention: the gate as the papers write it, in every way in which a module is called."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import textbook
import torch
from backends import ISAS
from step_watch import taken_steps
from torch import Tensor, nn

import headwise
from headwise.cache import PagedCache, PagePool, RollingCache, StaticCache
from headwise.nn import GatedMultiHeadAttention, OutputGate, Rotary, headwise_gate, probe, to_torch, trace
from headwise.nn.decode import fused_step
from headwise.reshape import prune_module
from headwise.testing import assert_same_bits

B, T, S, H, K, D, V, M = 3, 11, 5, 6, 2, 8, 7, 13
GATES: dict[str, Any] = {
    "elementwise": OutputGate,
    "headwise": headwise_gate,
    "with a bias": functools.partial(OutputGate, bias=True),
}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


def make(gate: Any = OutputGate, **options: Any) -> GatedMultiHeadAttention:
    module = GatedMultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, value_dim=V, gate=gate, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def gated_heads(module: GatedMultiHeadAttention, x: Tensor, *rest: Any) -> list[Tensor]:
    """sigmoid(x W_G) times head_i, head by head; W_G is read from the parameters, one block of rows per head."""
    weight = module.gate.proj.weight.unflatten(0, (H, -1))
    bias = module.gate.proj.bias
    gates = [x @ block.T for block in weight]
    if bias is not None:
        gates = [one + part for one, part in zip(gates, bias.unflatten(0, (H, -1)), strict=True)]
    return [torch.sigmoid(g) * head for g, head in zip(gates, textbook.head_outputs(module, x, *rest), strict=True)]


@every_gate
@pytest.mark.parametrize("memory", [None, (B, S, M)], ids=["self", "cross"])
def test_a_gate_multiplies_each_head_before_the_output_projection(gate: Any, memory: Any) -> None:
    module = textbook.in_float64(make(gate, bias=True))
    x = torch.randn(B, T, M, dtype=torch.float64)
    source = None if memory is None else torch.randn(memory, dtype=torch.float64)
    expected = textbook.summed(module, gated_heads(module, x, source))
    torch.testing.assert_close(module(x, source), expected, rtol=0, atol=1e-12)
    other = None if source is None else source[:1]
    assert torch.autograd.gradcheck(lambda t: module(t, other), x[:1, :3].clone().requires_grad_())


@every_gate
def test_a_gate_of_the_call_multiplies_the_modules_own(gate: Any) -> None:
    module, x = textbook.in_float64(make(gate)), torch.randn(B, T, M, dtype=torch.float64)
    for shape in ((H,), (B, H), (B, H, T), (B, H, T, V)):
        factor = torch.rand(shape, dtype=torch.float64)
        aligned = factor.view((1, H, 1, 1) if shape == (H,) else (*shape, *[1] * (4 - len(shape))))
        heads = [aligned[:, i] * head for i, head in enumerate(gated_heads(module, x))]
        torch.testing.assert_close(module(x, gate=factor), textbook.summed(module, heads), rtol=0, atol=1e-12)


@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["static", "rolling", "paged"])
def test_decoding_gives_the_whole_pass_and_the_step_the_bits_of_the_general_path(
    gate: Any, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make(gate, rotary=Rotary(D)).to(dtype).requires_grad_(False)
    x = torch.randn(B, T, M).to(dtype)
    monkeypatch.setattr(fused_step, "few_rows", lambda *inputs: None)  # its sums have another order

    @torch.no_grad()  # with gradients, no step is taken
    def decoded() -> Tensor:
        made: dict[str, Any] = {
            "static": lambda: StaticCache(B, K, D, V, capacity=T, dtype=dtype),
            "rolling": lambda: RollingCache(B, K, D, V, window=T, dtype=dtype),
            "paged": lambda: PagedCache(PagePool(B, K, D, V, dtype=dtype), B),
        }
        cache = made[kind]()
        return torch.cat([module(x[:, t : t + 1], cache=cache)[0] for t in range(T)], 1)

    with monkeypatch.context() as patch:
        taken = taken_steps(patch, headwise.nn.multihead, "multihead_step")
        steps = decoded()
    assert taken == [bool(ISAS)] * T
    with monkeypatch.context() as patch:
        patch.setattr("headwise.nn.multihead.multihead_step", lambda *rest: None)
        assert_same_bits(steps, decoded())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(steps, module(x, mask=headwise.causal()), rtol=tolerance, atol=tolerance)


@every_gate
def test_a_pruned_module_is_the_one_with_these_heads_switched_off(gate: Any) -> None:
    module, x = make(gate), torch.randn(B, T, M)
    off = torch.tensor([0.0, 1, 1, 0, 1, 1])
    expected = module(x, gate=off)
    pruned = prune_module(module, [0, 3])
    assert pruned.num_heads == 4 and pruned.gate.proj.weight.shape[0] == 4 * (pruned.gate.value_dim or 1)
    torch.testing.assert_close(pruned(x), expected, rtol=1e-5, atol=1e-5)


@every_gate
def test_a_trace_ends_in_the_modules_output_and_shows_the_gate(gate: Any) -> None:
    module, x = make(gate), torch.randn(B, T, M)
    result = trace(module, x, mask=headwise.causal())
    stages = {stage.name: stage.tensor for stage in result.stages}
    torch.testing.assert_close(stages["output"], module(x, mask=headwise.causal()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stages["gate"], module.gate(x))
    assert result.parameters["gate"] == sum(p.numel() for p in module.gate.parameters())


def test_a_probe_sees_the_gate_of_the_call_it_answers_for() -> None:
    module, x = make(), torch.randn(B, T, M)
    with probe(module) as seen:
        out = module(x)
    (call,) = seen.calls
    rebuilt = call.attend().transpose(1, 2).flatten(2)
    torch.testing.assert_close(module.o_proj(rebuilt), out)


class Own(nn.Module):
    """A gate of a user, with weights."""

    def __init__(self, d_model: int, num_heads: int, value_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_model, num_heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight).transpose(1, 2)


def test_a_users_gate_plugs_in_and_what_cannot_know_its_heads_says_so() -> None:
    module, x = make(Own), torch.randn(B, T, M)
    heads = textbook.head_outputs(module, x)
    own = [torch.tanh(x @ module.gate.weight)[..., i, None] * head for i, head in enumerate(heads)]
    torch.testing.assert_close(module(x), textbook.summed(module, own), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"gate part Own .*headwise\.nn\.OutputGate"):
        prune_module(module, [0, 3])
    with pytest.raises(ValueError, match="an output gate"):
        to_torch(GatedMultiHeadAttention(12, 3))


@pytest.mark.parametrize("gate", [OutputGate(M, H), lambda *sizes: torch.sigmoid], ids=["module", "function"])
def test_what_makes_no_gate_is_refused(gate: Any) -> None:
    with pytest.raises(TypeError, match="gate is a factory"):
        make(gate)


def test_a_gate_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gate is a float tensor \(H,\)"):
        make(lambda d_model, num_heads, value_dim: OutputGate(d_model, num_heads + 1))(torch.randn(B, T, M))
