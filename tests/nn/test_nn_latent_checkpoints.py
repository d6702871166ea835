"""Published models of latent attention: their state dicts load as they are, and the numbers are theirs."""

import copy
from typing import Any

import pytest
import torch
import transformers
from latent_cases import Held, rms, stirred
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

import headwise
from headwise import LatentAttention
from headwise.hf.models.architectures import CACHE
from headwise.nn import Rotary, yarn_frequencies, yarn_scale

B, T, M, H = 2, 37, 24, 4
SIZES: dict[str, Any] = {
    "hidden_size": M,
    "num_attention_heads": H,
    "num_key_value_heads": H,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_hidden_layers": 1,
    "attn_implementation": "eager",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
KINDS: dict[str, dict[str, Any]] = {
    "direct": {"q_lora_rank": None},
    "low rank": {"q_lora_rank": 12},
    "biases": {"q_lora_rank": 12, "attention_bias": True},
    "yarn": {"q_lora_rank": 12, "rope_parameters": YARN},
}


class Theirs:
    """One attention of transformers, with random weights, and what its model hands to it."""

    def __init__(self, version: str, **config: Any) -> None:
        modeling = {"v2": v2, "v3": v3}[version]
        name = f"Deepseek{version.upper()}"
        self.config = getattr(transformers, f"{name}Config")(**SIZES | config)
        self.attention: nn.Module = stirred(getattr(modeling, f"{name}Attention")(self.config, 0)).eval()
        self.rotary = getattr(modeling, f"{name}RotaryEmbedding")(self.config)

    def __call__(self, x: Tensor, cache: DynamicCache | None = None) -> Tensor:
        past = 0 if cache is None else cache.get_seq_length()
        new = x.shape[1]
        hide = torch.ones(new, past + new, dtype=torch.bool).tril(past).logical_not()
        mask = torch.zeros(1, 1, new, past + new).masked_fill(hide, -torch.inf)
        angles = self.rotary(x, torch.arange(past, past + new)[None])
        return self.attention(hidden_states=x, position_embeddings=angles, attention_mask=mask, **{CACHE: cache})[
            0
        ].detach()


def ours_of(theirs: Theirs) -> LatentAttention:
    """As a user would build it from the config."""
    config, arguments = theirs.config, {}
    rope = config.qk_rope_head_dim
    frequencies = None
    if config.rope_parameters["rope_type"] == "yarn":
        factor, parameters = config.rope_parameters["factor"], config.rope_parameters
        length = parameters["original_max_position_embeddings"]
        frequencies = yarn_frequencies(rope, factor=factor, original_length=length, base=parameters["rope_theta"])
        head_dim = config.qk_nope_head_dim + rope
        arguments["scale"] = yarn_scale(head_dim, factor=factor, mscale=parameters["mscale_all_dim"])
    return LatentAttention(
        config.hidden_size,
        config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=rope,
        value_dim=config.v_head_dim,
        bias=config.attention_bias,
        rotary=Rotary(rope, interleaved=getattr(config, "rope_interleave", True), frequencies=frequencies),
        **arguments,
    )


def check_equal(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Theirs is the same function (its error is a few roundings), and ours is no worse at it."""
    size, error = rms(exact, torch.zeros_like(exact)), rms(theirs, exact)
    assert 0 < error < 1e-5 * size  # their angles and norms are float32's: measured 1e-7 to 2e-6
    assert rms(ours, exact) <= 2 * error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["v2", "v3", "v3 halves"])
def test_a_checkpoint_gives_the_numbers_it_was_trained_for(version: str, kind: str) -> None:
    config = KINDS[kind] | ({"rope_interleave": False} if version == "v3 halves" else {})
    theirs = Theirs(version[:2], **config)
    ours, x = ours_of(theirs), torch.randn(B, T, M)
    ours.load_state_dict(theirs.attention.state_dict())  # strict: the same names and shapes
    assert ours.scale == pytest.approx(theirs.attention.scaling, rel=1e-15)
    mask = headwise.causal()
    exact = copy.deepcopy(ours).double()(x.double(), mask=mask, form="expanded")
    expected = theirs(x)
    for form in ("auto", "expanded", "absorbed"):
        check_equal(ours(x, mask=mask, form=form), expected, exact)


@pytest.mark.parametrize("version", ["v2", "v3"])
@pytest.mark.parametrize("form", ["auto", "expanded", "absorbed"])
def test_decoding_with_a_cache_gives_their_numbers_and_holds_as_many(form: Any, version: str) -> None:
    theirs = Theirs(version, **KINDS["low rank"])
    ours, x = ours_of(theirs), torch.randn(B, T, M)
    ours.load_state_dict(theirs.attention.state_dict())
    wide = copy.deepcopy(ours).double()
    exact = wide(x.double(), mask=headwise.causal(), form="expanded")
    cache, their_cache, at = Held.of(ours, B), DynamicCache(), 0
    for step in (23, 1, 1, 5, 1, 6):
        chunk = x[:, at : at + step]
        out, _ = ours(chunk, cache=cache, form=form)
        check_equal(out, theirs(chunk, their_cache), exact[:, at : at + step])
        at += step
    layer = their_cache.layers[0]
    assert cache.keys.numel() == layer.keys.numel() + layer.values.numel()


@pytest.mark.parametrize("length", [64, 4096, 7])
@pytest.mark.parametrize(
    ("factor", "base", "fast", "slow"), [(40.0, 1e4, 32.0, 1.0), (4.0, 5e5, 16.0, 2.0), (1.5, 1e4, 8.0, 8.0)]
)
@pytest.mark.parametrize("rope_dim", [64, 8, 2])
def test_yarn_gives_their_frequencies(
    rope_dim: int, factor: float, base: float, fast: float, slow: float, length: int
) -> None:
    fields = {"factor": factor, "rope_theta": base, "beta_fast": fast, "beta_slow": slow}
    parameters = YARN | fields | {"original_max_position_embeddings": length}
    theirs = Theirs("v3", qk_rope_head_dim=rope_dim, q_lora_rank=None, rope_parameters=parameters)
    ours = yarn_frequencies(rope_dim, factor=factor, original_length=length, base=base, beta_fast=fast, beta_slow=slow)
    # theirs are float32 powers and mixes: a few roundings
    assert torch.allclose(torch.tensor(ours), theirs.rotary.inv_freq, rtol=1e-6, atol=0)
    assert theirs.rotary.attention_scaling == 1.0  # mscale is mscale_all_dim, as published: nothing left for the angles
    mscale = yarn_scale(SIZES["qk_nope_head_dim"] + rope_dim, factor=factor, mscale=0.707)
    assert mscale == pytest.approx(theirs.attention.scaling, rel=1e-15)


@pytest.mark.unchecked
@pytest.mark.parametrize("wrong", [{"rotary_dim": 7}, {"factor": 0.5}, {"original_length": 0}])
def test_yarn_names_what_it_cannot_stretch(wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"rotary_dim": 8, "factor": 4.0, "original_length": 64} | wrong
    with pytest.raises(ValueError, match="YaRN stretches the turns of rotary_dim / 2 pairs by factor >= 1"):
        yarn_frequencies(arguments.pop("rotary_dim"), **arguments)
