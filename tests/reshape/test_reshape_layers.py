"""A layer's tensors as HeadWeights and back, in every format, against the model's own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reshape_models import FAMILIES, decoder, saved

from headwise import hf
from headwise.reshape.layout.families import CheckpointLayout, family_of
from headwise.reshape.layout.head_weights import RotaryLayout
from headwise.reshape.layout.layer_weights import head_weights, layer_tensors, rotary_layout

PLAIN = [family for family in FAMILIES if family != "deepseek_v3"]


@pytest.mark.parametrize("family", PLAIN)
def test_there_and_back_changes_no_bit(family: str, tmp_path: Path) -> None:
    with hf.checkpoint(saved(FAMILIES[family], tmp_path / "source")) as opened:
        known = family_of(opened.config, opened.tensors, opened.layouts)
        for layer in known.layers:
            weights = head_weights(known, layer, opened.read)
            sizes = layer.sizes
            assert (weights.num_heads, weights.num_kv_heads, weights.head_dim) == (sizes.H, sizes.K, sizes.D)
            made = layer_tensors(known, layer, weights, opened.read)
            assert made.keys() == layer.tensors.keys()
            for name, tensor in made.items():
                torch.testing.assert_close(tensor, opened.read(name), atol=1e-6, rtol=0)
                if "norm" not in name:
                    assert torch.equal(tensor, opened.read(name)), name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "gpt_bigcode", "qwen2", "bert", "t5"])
def test_each_head_is_where_the_model_has_it(family: str, tmp_path: Path) -> None:
    """`out = sum_h output[:, h] (value[h] x)`: what the layer gives where every token sees itself alone."""
    row = FAMILIES[family]
    model = row.build()
    with hf.checkpoint(saved(row, tmp_path / "source")) as opened:
        known = family_of(opened.config, opened.tensors, opened.layouts)
        layer = known.layers[1]
        weights = head_weights(known, layer, opened.read)
    module = model.get_submodule({"bert": "bert.encoder.layer.1.attention"}.get(family, layer.prefix.rstrip(".")))
    x = torch.randn(1, 1, weights.query.shape[2], generator=torch.Generator().manual_seed(3))
    group = weights.num_heads // weights.num_kv_heads
    values = torch.einsum("kvm,m->kv", weights.value, x[0, 0])
    values = values if weights.value_bias is None else values + weights.value_bias
    expected = torch.einsum("mhv,hv->m", weights.output, values.repeat_interleave(group, 0))
    expected = expected if weights.output_bias is None else expected + weights.output_bias
    with torch.no_grad():
        torch.testing.assert_close(attended(module, x, family), expected, atol=1e-5, rtol=1e-5)


def attended(module: Any, x: torch.Tensor, family: str) -> torch.Tensor:
    """The attention of one token to itself."""
    if family == "bert":
        return module.output.dense(module.self(x)[0])[0, 0]
    if family in ("gpt2", "gpt_bigcode", "t5"):
        return module(x)[0][0, 0]
    turn = torch.ones(1, 1, 8), torch.zeros(1, 1, 8)
    size = 2 if family == "gpt_neox" else 6  # a quarter of a head turns, or half of it
    angles = tuple(part[..., : 4 if family == "gpt_neox" else size] for part in turn)
    return module(x, position_embeddings=angles, attention_mask=None)[0][0, 0]


def test_fewer_key_value_heads_fit_the_same_tensors() -> None:
    source = decoder(6, 3, 4)
    known = family_of(source.config, source.tensors, source.layouts)
    layer = known.layers[0]
    weights = head_weights(known, layer, source.read).select([0, 1, 4, 5], [0, 2])
    shapes = {
        name.split(".")[-2]: tuple(x.shape) for name, x in layer_tensors(known, layer, weights, source.read).items()
    }
    assert shapes == {"q_proj": (16, 26), "k_proj": (8, 26), "v_proj": (8, 26), "o_proj": (26, 16)}


def test_latent_attention_has_none_of_that_form(tmp_path: Path) -> None:
    with hf.checkpoint(saved(FAMILIES["deepseek_v3"], tmp_path / "source")) as opened:
        known = family_of(opened.config, opened.tensors, opened.layouts)
        with pytest.raises(ValueError, match="deepseek_v3 makes keys and values from a small shared vector"):
            head_weights(known, known.layers[0], opened.read)


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("mistral", {}, [RotaryLayout(4), RotaryLayout(4)]),
        ("cohere", {}, [RotaryLayout(4, interleaved=True)] * 2),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, [RotaryLayout(2)] * 2),
        ("phi3", {"partial_rotary_factor": 0.5}, [RotaryLayout(2)] * 2),
        ("mistral", {"partial_rotary_factor": 0.5}, [RotaryLayout(4), RotaryLayout(4)]),  # its class does not read it
        ("mistral", {"rope_parameters": {"partial_rotary_factor": 0.5}}, [RotaryLayout(4), RotaryLayout(4)]),
        ("smollm3", {"no_rope_layers": [1, 0]}, [RotaryLayout(4), None]),
        ("smollm3", {"no_rope_layer_interval": 2}, [RotaryLayout(4), None]),
        ("smollm3", {}, [RotaryLayout(4), RotaryLayout(4)]),
    ],
)
def test_how_queries_and_keys_turn(family: str, config: dict[str, Any], expected: list[RotaryLayout | None]) -> None:
    known = of_config(family, config)
    assert [rotary_layout(known, layer) for layer in known.layers] == expected


def of_config(family: str, config: dict[str, Any]) -> CheckpointLayout:
    """Two layers of four heads of four numbers."""
    source = decoder(4, 4, 4, model_type=family, **config)
    if family == "phi3":
        source.tensors = {
            f"model.layers.{n}.self_attn.{name}": source.tensors["model.layers.0.self_attn.q_proj.weight"]
            for n in range(2)
            for name in ("qkv_proj.weight", "o_proj.weight")
        }
    return family_of(source.config, source.tensors, source.layouts)


@pytest.mark.parametrize(
    ("family", "config", "text"),
    [
        *(("phi3", {"partial_rotary_factor": x}, "the part of a head that turns is") for x in (0, 1.5, True, "0.5")),
        ("phi3", {"rope_parameters": [1]}, "rope_parameters are a table of settings; config.json has"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has a number for each layer; config.json has"),
        ("smollm3", {"no_rope_layers": "1"}, "no_rope_layers has a number for each layer; config.json has"),
        *(
            ("smollm3", {"no_rope_layer_interval": x}, "no_rope_layer_interval is a whole number of layers")
            for x in (-2, "4", True, 1.5)
        ),
    ],
)
def test_turns_that_cannot_be_are_refused(family: str, config: dict[str, Any], text: str) -> None:
    known = of_config(family, config)
    with pytest.raises(ValueError, match=text):
        rotary_layout(known, known.layers[1])
