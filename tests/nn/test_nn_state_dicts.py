"""State dicts in the names of Hugging Face load unrenamed, and give the outputs of the modules they come from."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import MultiHeadAttention, Rotary
from headwise.testing import assert_same_bits

B, T, H, K, D, M = 2, 17, 6, 3, 10, 42
SIZES = {
    "hidden_size": M,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": D,
    "intermediate_size": 2 * M,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}


def theirs(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """An attention layer of transformers with random weights, norms included, and the rotary embedding it is given."""
    import transformers.models.llama.modeling_llama as llama
    import transformers.models.qwen3.modeling_qwen3 as qwen3

    if kind == "llama":
        config = llama.LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **options)
        layer, turn = llama.LlamaAttention(config, 0), llama.LlamaRotaryEmbedding(config)
    else:
        config = qwen3.Qwen3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **options)
        layer, turn = qwen3.Qwen3Attention(config, 0), qwen3.Qwen3RotaryEmbedding(config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer, turn


def output(layer: nn.Module, turn: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    hide = torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1).expand(B, 1, T, T)
    return layer(x, position_embeddings=turn(x, positions.expand(B, T)), attention_mask=hide)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bias"), [("llama", False), ("llama", True), ("qwen3", False)])
def test_a_hugging_face_layer_loads_unrenamed_and_gives_the_same(kind: str, bias: bool, dtype: torch.dtype) -> None:
    layer, turn = theirs(kind, attention_bias=bias)
    norm = (lambda size: nn.RMSNorm(size, eps=1e-6)) if kind == "qwen3" else None
    mha = MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, bias=bias, rotary=Rotary(D, base=500.0), qk_norm=norm)
    mha.load_state_dict(layer.state_dict(), strict=True)
    layer.to(dtype), mha.to(dtype)
    x, positions = torch.randn(B, T, M).to(dtype), torch.arange(3, 3 + T)
    ours = mha(x, mask=headwise.causal(), positions=positions)
    expected = output(layer, turn, x, positions)
    # Two ways to round one sum: over 30 seeds at most 3.1 ulps of the largest output, in either dtype.
    scale = float(expected.detach().abs().max())
    assert float((ours - expected).detach().abs().max()) <= 8 * torch.finfo(dtype).eps * scale


def test_our_state_dict_loads_into_theirs() -> None:
    layer, _ = theirs("qwen3", attention_bias=False)
    mha = MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, qk_norm=nn.RMSNorm, rotary=Rotary(D))
    layer.load_state_dict(mha.state_dict(), strict=True)
    assert list(mha.state_dict()) == list(layer.state_dict())


def test_a_round_trip_keeps_every_bit() -> None:
    sinks = torch.randn(H)
    one, other = (
        MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, bias="qkv", inner=headwise.nn.InnerAttention(sinks=sinks))
        for _ in range(2)
    )
    assert list(one.state_dict()) == [
        *(f"{n}_proj.{p}" for n in "qkv" for p in ("weight", "bias")),
        "o_proj.weight",
        "inner.sinks",
    ]
    other.load_state_dict(one.state_dict())
    x = torch.randn(B, T, M)
    assert_same_bits(other(x), one(x))
