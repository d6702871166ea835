"""LatentAttention with parts that are not plain: a hook on the expansion, norms of another class or dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from latent_cases import SIZES, B, H, M, T, make
from step_watch import taken_steps
from torch import Tensor, nn

import headwise
from headwise import LatentAttention
from headwise.cache import StaticCache

C, N, R, V = (SIZES[name] for name in ("kv_lora_rank", "nope_dim", "rope_dim", "value_dim"))


def tripled(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return 3 * out


@pytest.mark.parametrize("heads", [None, (0, H), (0, 2), (1, H), (1, 2)], ids=str)
def test_a_hook_of_the_expansion_is_in_every_span_of_heads(heads: tuple[int, int] | None) -> None:
    """A head at a time, from the rows of the weight that are its own; what the hook does is done by hand."""
    mla, key = make().double(), torch.randn(B, 1, T, C + R, dtype=torch.float64)
    mla.kv_b_proj.register_forward_hook(tripled)
    weight = mla.kv_b_proj.weight.detach()
    made_keys, made_values = mla.expand(key, heads)
    first, last = heads or (0, H)
    assert made_keys.shape == (B, last - first, T, N + R) and made_values.shape == (B, last - first, T, V)
    for place, head in enumerate(range(first, last)):
        rows = 3 * weight[head * (N + V) : (head + 1) * (N + V)]
        both = key[:, 0, :, :C] @ rows.T
        torch.testing.assert_close(made_keys[:, place], torch.cat((both[..., :N], key[:, 0, :, C:]), -1))
        torch.testing.assert_close(made_values[:, place], both[..., N:])


class Raised(nn.RMSNorm):
    """A norm with something of its own, which a decode step must call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.25


def stepped(mla: LatentAttention, x: Tensor, steps: int) -> Tensor:
    """A prompt, then tokens one by one in the absorbed form."""
    cache = StaticCache(B, num_kv_heads=1, head_dim=C + R, value_dim=C, shared=True, capacity=T, dtype=x.dtype)
    first, _ = mla(x[:, :-steps], cache=cache)
    return torch.cat([first, *(mla(one, cache=cache, form="absorbed")[0] for one in x[:, -steps:].split(1, 1))], 1)


@torch.no_grad()
@pytest.mark.parametrize("how", ["subclass", "hook"])
@pytest.mark.parametrize("part", ["kv_a_layernorm", "q_a_layernorm"])
def test_a_step_calls_a_norm_that_is_not_a_plain_one(part: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill calls the norm as a module, and a step must not do with it what it does with a plain RMSNorm."""
    taken = taken_steps(monkeypatch)
    mla, x = make(q_lora_rank=13), torch.randn(B, T, M)
    plain = mla(x, mask=headwise.causal())
    old = mla.get_submodule(part)
    if how == "hook":
        old.register_forward_hook(lambda module, inputs, out: out + 0.25)
    else:
        new = Raised(old.weight.numel(), eps=old.eps)
        new.load_state_dict(old.state_dict())
        setattr(mla, part, new)
    exact = copy.deepcopy(mla).double()(x.double(), mask=headwise.causal(), form="expanded")
    assert (plain - exact).abs().max() > 0.01
    out = stepped(mla, x, 3)
    assert taken and all(taken), "the steps are those of the kernel"
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
