"""The plan's arithmetic against what modules hold and do, and the strict reader of configs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise import plan
from headwise.nn import MultiHeadAttention
from headwise.plan import AttentionShape, read_config
from headwise.plan.config.reader import MAX_BYTES

SHAPES: list[dict[str, Any]] = [
    {"num_heads": 6, "d_model": 42},
    {"num_heads": 6, "d_model": 13, "head_dim": 7, "num_kv_heads": 3},
    {"num_heads": 6, "d_model": 13, "head_dim": 7, "num_kv_heads": 1, "value_dim": 11, "bias": True},
    {"num_heads": 5, "d_model": 13, "head_dim": 7, "value_dim": 11, "bias": "qkv"},
    {"num_heads": 5, "d_model": 13, "head_dim": 7, "memory_dim": 17, "bias": True},
    {"num_heads": 5, "d_model": 13, "head_dim": 7, "memory_dim": (17, 19), "bias": "qkv"},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameters_are_those_a_module_has(shape: dict[str, Any]) -> None:
    mha = MultiHeadAttention(**shape)
    assert plan.parameter_count(**shape) == sum(p.numel() for p in mha.parameters())
    counts = plan.parameter_counts(**shape)
    assert counts == {name: sum(p.numel() for p in getattr(mha, name).parameters()) for name in counts}


def test_plain_multi_head_attention_has_four_squares() -> None:
    for d_model, num_heads in ((512, 8), (512, 64), (768, 12), (4096, 32)):
        assert plan.parameter_count(d_model, num_heads) == 4 * d_model**2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [s for s in SHAPES if "memory_dim" not in s], ids=str)
def test_cache_bytes_are_those_of_the_keys_and_values_of_a_token(shape: dict[str, Any], dtype: torch.dtype) -> None:
    mha, layers, tokens = MultiHeadAttention(**shape).to(dtype), 3, 5
    with headwise.nn.probe(mha) as seen:
        mha(torch.zeros(1, tokens, mha.d_model, dtype=dtype))
    (call,) = seen.calls
    assert call.value is not None
    expected = sum(t.numel() * t.element_size() for t in (call.key, call.value)) * layers // tokens
    sizes = {name: size for name, size in shape.items() if name != "bias"}
    assert plan.kv_bytes_per_token(**sizes, num_layers=layers, bytes_per_number=dtype.itemsize) == expected


def test_sharing_keys_and_values_shrinks_the_cache_by_the_group() -> None:
    whole = plan.kv_bytes_per_token(4096, 32, num_layers=32)
    assert plan.kv_bytes_per_token(4096, 32, num_kv_heads=8, num_layers=32) * 4 == whole == 512 * 1024
    assert plan.kv_bytes_per_token(4096, 32, num_kv_heads=1, num_layers=32) * 32 == whole
    assert plan.kv_bytes_per_token(4096, 32, bytes_per_number=0.5) * 4 == plan.kv_bytes_per_token(4096, 32)


def test_flops() -> None:
    """By hand: 6 heads of 7 and 11, 5 queries, 19 keys, batch 2. (Modules are counted in test_nn_multihead.)"""
    assert plan.attention_flops(13, 6, head_dim=7, value_dim=11, queries=5, keys=19, batch=2) == 2 * 2 * 6 * 5 * 19 * 18
    assert plan.attention_flops(12, 6, queries=5) == 2 * 6 * 5 * 5 * 4
    expected = 2 * (5 * (13 * 42 + 66 * 13) + 19 * (17 * 21 + 23 * 33))
    assert expected == plan.projection_flops(
        13, 6, num_kv_heads=3, head_dim=7, value_dim=11, memory_dim=(17, 23), tokens=5, memory_tokens=19
    )
    assert len({plan.attention_flops(64, h, queries=9) for h in (1, 2, 4, 8, 16, 32, 64)}) == 1


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("function", "arguments", "error", "text"),
    [
        (plan.attention_flops, {"queries": 0}, ValueError, "queries is at least 1; got 0"),
        (plan.attention_flops, {"queries": 3, "keys": 2.5}, TypeError, "keys is an int; got 2.5"),
        (plan.projection_flops, {"tokens": True}, TypeError, "tokens is an int; got True"),
        (plan.kv_bytes_per_token, {"num_layers": 0}, ValueError, "num_layers is at least 1; got 0"),
        (
            plan.kv_bytes_per_token,
            {"num_layers": 10**15 + 1},
            ValueError,
            "num_layers is at most 1,000,000,000,000,000; got a larger number",
        ),
        (plan.kv_bytes_per_token, {"bytes_per_number": 0}, ValueError, "bytes_per_number is above 0; got 0"),
        (plan.parameter_count, {"memory_dim": -1}, ValueError, "memory_dim is at least 1; got -1"),
    ],
)
def test_wrong_numbers(function: Any, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        function(12, 3, **arguments)
    assert str(caught.value) == text


# --- configs ----------------------------------------------------------------------------------------------------------


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config), "utf8")
    return path


PLAIN = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3}
READ: dict[str, tuple[dict[str, Any], AttentionShape]] = {
    "biases": ({"attention_bias": True}, AttentionShape(96, 4, 4, 24, 24, True, 3)),
    "null is absent": ({"num_key_value_heads": None, "head_dim": None}, AttentionShape(96, 4, 4, 24, 24, False, 3)),
    "names of its own": (
        {"model_type": "gpt2", "n_embd": 96, "n_head": 4, "n_layer": 5}, AttentionShape(96, 4, 4, 24, 24, True, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_configs_are_read(kind: str, tmp_path: Path) -> None:
    more, shape = READ[kind]
    path = write(tmp_path, more if "model_type" in more else PLAIN | more)
    assert read_config(path) == shape
    assert read_config(tmp_path) == shape  # the folder of a model
    assert read_config(str(path)) == shape


def test_a_shape_becomes_a_module_and_a_trace() -> None:
    shape = AttentionShape.of(96, 4, num_kv_heads=2, bias=True)
    assert MultiHeadAttention(**shape.arguments()).num_kv_heads == 2
    assert headwise.nn.trace_shape(**shape.arguments(), length=3).parameter_count == plan.parameter_count(
        **shape.arguments()
    )


def test_the_package_s_own_config_is_read() -> None:
    import headwise.models

    path = headwise.models.tiny_path()
    if not (path / "config.json").exists():
        pytest.skip("no model in the package yet")
    shape = read_config(path)
    assert shape.num_heads == 8 and shape.num_layers == 4


REFUSED: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not valid JSON (line 1: "),
    "a list": ([1], "contains a JSON list, and an object is needed"),
    "NaN": ('{"hidden_size": NaN}', "not valid JSON (NaN is not a number)"),
    "Infinity": ('{"hidden_size": 96, "x": -Infinity}', "not valid JSON (-Infinity is not a number)"),
    "twice": ('{"hidden_size": 96, "hidden_size": 97}', "not valid JSON (the key 'hidden_size' occurs twice)"),
    "too many digits": ('{"hidden_size": 1' + "0" * 5000 + "}", "Exceeds the limit"),
    "deep": ("[" * 100_000, "not valid JSON (nested too deeply)"),
    "large": ('{"x": "' + "x" * MAX_BYTES + '"}', "is larger than 1000000 bytes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_config_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    config, text = REFUSED[kind]
    path = write(tmp_path, config)
    with pytest.raises(ValueError) as caught:
        read_config(path)
    message = str(caught.value)
    assert message.startswith(f"{str(path)!r}: ") and text in message
    assert (
        message.isprintable() and caught.value.__cause__ is None
    )  # one line, and none of the file's own control codes


def test_what_is_no_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for name, text in (
        ("absent.json", "absent.json': no such file or folder, no card and no model in the hub's local cache"),
        ("bytes", "not valid JSON (not UTF-8 text"),
        ("folder", "is not a regular file"),
    ):
        with pytest.raises(ValueError) as caught:
            read_config(tmp_path / name)
        assert text in str(caught.value)


def test_a_shape_is_read_from_whatever_a_plan_takes(tmp_path: Path) -> None:
    """Cards, hub names, dicts and config objects, as everywhere in the room; what is none of them is refused."""

    class Config:
        def to_dict(self) -> Any:
            return PLAIN

    assert read_config("llama-3-8b") == AttentionShape(4096, 32, 8, 128, 128, num_layers=32)
    assert read_config(config=PLAIN) == read_config(Config()) == AttentionShape(96, 4, 4, 24, 24, num_layers=3)
    with pytest.raises(ValueError, match=r"^'llama-3-9b': no such file or folder, no card .*: llama-3-8b"):
        read_config("llama-3-9b")
    for name in ("deepseek-v3", {"model_type": "whisper"}):  # latents; keys alone have no bias
        with pytest.raises(ValueError, match="cannot be described by these sizes; give the sizes yourself"):
            read_config(name)
    with pytest.raises(ValueError, match=r"^'config': has no model_type, so its architecture is not known"):
        read_config({"hidden_size": 96})
    with pytest.raises(TypeError, match=r"^a config is a path, a name, a dict or an object with to_dict\(\); got int$"):
        read_config(8)


def test_a_known_architecture_s_shape_is_that_of_its_plan() -> None:
    """Its biases, its key-value heads and the number of its attention layers, whatever other fields the config has."""
    for name in plan.known()["cards"]:
        layers = plan.of(name).model.layers
        if layers[0].latent is not None or layers[0].shared_key is not None:
            with pytest.raises(ValueError, match="cannot be described by these sizes"):
                read_config(name)
            continue
        if name.startswith("whisper"):  # whose keys alone have no bias
            continue
        shape, counts = read_config(name), layers[0].parameter_counts()
        decodes = any(layer.role == "self" for layer in layers)
        assert shape.num_layers == sum(layer.role == ("self" if decodes else "encoder") for layer in layers), name
        if not layers[0].gated:
            weights = sum(counts[part] for part in ("q_proj", "k_proj", "v_proj", "o_proj"))
            assert plan.parameter_count(**shape.arguments()) == weights, name
    falcon = {"model_type": "falcon", "hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    saved = falcon | {"multi_query": True, "num_kv_heads": 4, "new_decoder_architecture": False}  # as transformers does
    assert read_config(saved) == AttentionShape(96, 4, 1, 24, 24, num_layers=2)
    assert read_config(saved | {"new_decoder_architecture": True}).num_kv_heads == 4
