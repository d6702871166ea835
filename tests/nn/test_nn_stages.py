"""Modules recomputed head by head in float64: every stage of a trace, and decode steps with every part and dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import headwise
from headwise.cache import StaticCache
from headwise.nn import (
    GatedMultiHeadAttention,
    InnerAttention,
    LatentAttention,
    MultiHeadAttention,
    OutputGate,
    Rotary,
    trace,
)

B, T, M, H, K, D, V, PAIRS = 2, 7, 13, 6, 3, 10, 5, 4


def rotated(x: Tensor, dim: int) -> Tensor:
    """The first `dim` numbers of (B, heads, T, D) turned in halves by the place of their token, base 10000."""
    out = x.clone()
    for t in range(x.shape[2]):
        for i in range(dim // 2):
            angle = t / 10000 ** (2 * i / dim)
            a, b = x[:, :, t, i], x[:, :, t, i + dim // 2]
            out[:, :, t, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, :, t, i + dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def stages_of(mha: Any, x: Tensor, *, causal: bool) -> dict[str, Tensor]:
    """What each stage holds, from the weights, in float64."""
    weights = {name: part.detach().double() for name, part in mha.state_dict().items()}
    stages: dict[str, Tensor] = {"x": x.double()}
    made: dict[str, Tensor] = {}
    for letter, heads, size in (("q", H, D), ("k", K, D), ("v", K, V)):
        fused = x.double() @ weights[f"{letter}_proj.weight"].T + weights.get(f"{letter}_proj.bias", torch.zeros(1))
        split = torch.stack([fused[:, :, h * size : (h + 1) * size] for h in range(heads)], 1)
        stages |= {f"{letter}_proj": fused, f"{letter}_split": split.transpose(1, 2), f"{letter}_heads": split}
        made[letter] = split
    if mha.q_norm is not None:
        for letter in "qk":
            size = made[letter].square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps
            made[letter] = made[letter] / size.sqrt() * weights[f"{letter}_norm.weight"]
            stages[f"{letter}_norm"] = made[letter]
    if mha.rotary is not None:
        for letter in "qk":
            made[letter] = stages[f"{letter}_rotary"] = rotated(made[letter], PAIRS)
    options = mha.inner.options()
    scale = D**-0.5 if options["scale"] is None else options["scale"]
    scores = torch.stack([scale * made["q"][:, h] @ made["k"][:, h // (H // K)].mT for h in range(H)], 1)
    stages["scores"] = scores
    if options["softcap"] is not None:
        scores = stages["softcapped"] = options["softcap"] * torch.tanh(scores / options["softcap"])
    if causal:
        hidden = torch.ones(T, T).triu(1).bool()
        scores = stages["masked"] = scores.masked_fill(hidden, -math.inf)
    sums = scores.exp().sum(-1, keepdim=True)
    if options["sinks"] is not None:
        sums = sums + options["sinks"].detach().double().exp()[:, None, None]
    stages["weights"] = scores.exp() / sums
    heads = torch.stack([stages["weights"][:, h] @ made["v"][:, h // (H // K)] for h in range(H)], 1)
    stages["heads"] = heads
    if isinstance(mha, GatedMultiHeadAttention):
        gate = torch.sigmoid(x.double() @ weights["gate.proj.weight"].T)
        stages["gate"] = torch.stack([gate[:, :, h * V : (h + 1) * V] for h in range(H)], 1)
        heads = stages["gated_heads"] = heads * stages["gate"]
    joined = stages["concatenation"] = torch.cat([heads[:, h] for h in range(H)], -1)
    stages["output"] = joined @ weights["o_proj.weight"].T + weights.get("o_proj.bias", torch.zeros(1))
    return stages


PARTS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "norms": {"qk_norm": nn.RMSNorm},
    "rotary": {"rotary": Rotary(D, rotary_dim=PAIRS)},
    "softcap, scale": {"inner": InnerAttention(softcap=0.7, scale=0.6)},
    "sinks": {"inner": InnerAttention(sinks=torch.randn(H, generator=torch.Generator().manual_seed(2)))},
    "all": {
        "bias": "qkv", "qk_norm": nn.RMSNorm, "rotary": Rotary(D, rotary_dim=PAIRS),
        "inner": InnerAttention(softcap=1.7, sinks=torch.randn(H, generator=torch.Generator().manual_seed(3))),
    },
}  # fmt: skip


def build(cls: type[MultiHeadAttention], **parts: Any) -> Any:
    torch.manual_seed(4)
    mha = cls(M, H, num_kv_heads=K, head_dim=D, value_dim=V, **parts).eval()
    with torch.no_grad():
        for name, part in mha.named_parameters():
            part.copy_(torch.randn(part.shape) * (1.0 if name.endswith(("bias", "norm.weight")) else 0.5))
    return mha


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cls", [MultiHeadAttention, GatedMultiHeadAttention])
@pytest.mark.parametrize("name", PARTS)
def test_every_stage_of_a_trace(name: str, cls: type[MultiHeadAttention], causal: bool) -> None:
    mha = build(cls, **PARTS[name])
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = {stage.name: stage.tensor for stage in trace(mha, x, mask=headwise.causal() if causal else None).stages}
    expected = stages_of(mha, x, causal=causal)
    assert list(found) == [name for name in found if name in expected] and found.keys() == expected.keys()
    for stage, tensor in expected.items():
        torch.testing.assert_close(
            found[stage].double(), tensor, rtol=1e-4, atol=1e-4, msg=lambda m, s=stage: f"{s}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_steps_have_every_part(name: str, dtype: torch.dtype) -> None:
    """A step projects few rows, which the native kernel has ways of its own for; biases and norms are large here."""
    mha = build(MultiHeadAttention, **PARTS[name]).to(dtype)
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(6)).to(dtype)
    with torch.inference_mode():
        cache = StaticCache(B, K, D, V, capacity=T, dtype=dtype)
        outs = [mha(x[:, t : t + 1], cache=cache)[0] for t in range(T)]
        expected = stages_of(mha, x, causal=True)["output"]
    # A step in bfloat16 rounds its heads and outputs to 8 bits; its numbers are below 20.
    within = 1e-4 if dtype == torch.float32 else 0.05 * float(expected.abs().max())
    assert (torch.cat(outs, 1).double() - expected).abs().max() < within


@pytest.mark.unchecked
def test_projections_of_other_shapes_are_refused() -> None:
    class Wrong(nn.Linear):
        change: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return self.change(super().forward(x))  # type: ignore[no-any-return]

    x = torch.randn(B, T, M)
    changes = (
        lambda y: y[:, :, None],
        lambda y: y[:, 0],
        lambda y: y[None],
        lambda y: y[..., 1:],
        lambda y: y.long(),
        lambda y: y[:, None].transpose(1, 2).expand(-1, -1, y.shape[2], -1),
    )
    for change in changes:
        for name, size in (("q_proj", H * D), ("k_proj", K * D), ("v_proj", K * V)):
            mha = build(MultiHeadAttention)
            setattr(mha, name, Wrong(M, size, bias=False))
            getattr(mha, name).change = change
            with pytest.raises(ValueError, match=r"a projection gives \(B, T, heads \* size\) with"):
                mha(x)


@pytest.mark.parametrize("V", [1, 3])
def test_shapes_of_gates(V: int) -> None:
    """A value dim of 1 is one factor a number all the same: the axis stays."""
    x = torch.randn(B, T, M)
    assert OutputGate(M, H, V)(x).shape == (B, H, T, V) and OutputGate(M, H)(x).shape == (B, H, T)
    gated = GatedMultiHeadAttention(M, H, head_dim=D, value_dim=V)
    heads = {stage.name: stage.shape for stage in trace(gated, x).stages}
    assert heads["gate"] == heads["heads"] == heads["gated_heads"] == (B, H, T, V)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("low", [None, 5])
def test_latent_attention_has_the_parameters_of_transformers(low: int | None, bias: bool) -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=M, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=low, kv_lora_rank=11,
        qk_nope_head_dim=D, qk_rope_head_dim=4, v_head_dim=V, attention_bias=bias,
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0).state_dict()
    ours = LatentAttention(M, H, q_lora_rank=low, kv_lora_rank=11, nope_dim=D, rope_dim=4, value_dim=V, bias=bias)
    shapes = [{name: tuple(part.shape) for name, part in state.items()} for state in (theirs, ours.state_dict())]
    assert shapes[0] == shapes[1]
