"""Loading: what works, and one clear line for each thing that does not. A model folder is hostile until read."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_folders import change, quiet, refused, written
from hf_models import BY_NAME, OUTSIDE, ROWS, VOCAB, Row, inputs, logits, token_ids
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import headwise.hf as hf

TEXT = tuple(row for row in ROWS if row.kind in ("decoder", "encoder"))


# -- what works -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("row", TEXT, ids=lambda row: row.name)
def test_every_text_model_loads_with_its_own_weights(row: Row, tmp_path: Path) -> None:
    loaded = hf.load(written(row, tmp_path))
    assert loaded.kind == row.kind and loaded.max_positions == 64 and loaded.name == str(tmp_path)
    assert not loaded.model.training and type(loaded.model).__name__ == row.model
    for part in loaded.model.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation_internal = "eager"  # the default wants sizes divisible by 4
    loaded.model.set_attn_implementation("eager")
    assert torch.equal(logits(loaded.model, inputs(row)), logits(row.build(), inputs(row)))
    with hf.probe(loaded.model) as seen:
        logits(loaded.model, inputs(row))
    assert len(seen.calls) == row.calls


def test_what_look_needs_to_know(model_folder: Path) -> None:
    loaded = hf.load(str(model_folder))
    assert loaded.bos_id == loaded.tokenizer.convert_tokens_to_ids("<s>") == 0
    marks = {loaded.tokenizer.decode([i]) for i in loaded.delimiters}
    assert marks == {".", ",", ";", ":", "!", "?", "\n", "[SEP]"}
    assert (
        loaded.tokenizer("a b")["input_ids"]
        == Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode("a b").ids
    )


def test_nothing_is_printed(model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar, no report of keys; and transformers' own settings are put back."""
    level, bars = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    hf.load(model_folder)
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == level
    assert transformers.utils.logging.is_progress_bar_enabled() == bars
    transformers.utils.logging.disable_progress_bar()
    try:
        hf.load(model_folder)
        assert not transformers.utils.logging.is_progress_bar_enabled(), "off stays off"
    finally:
        transformers.utils.logging.enable_progress_bar()


def test_the_dtype(model_folder: Path) -> None:
    state = {name: x.half() for name, x in load_file(model_folder / "model.safetensors").items()}
    save_file(state, model_folder / "model.safetensors", metadata={"format": "pt"})
    assert hf.load(model_folder).model.dtype == torch.float32, "on the CPU, whatever the file holds"
    assert hf.load(model_folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert hf.load(model_folder, dtype=torch.float64).model.dtype == torch.float64
    for dtype in ("int8", "float8_e4m3fn", "nonsense", "load"):
        refused(
            model_folder,
            f"dtype is float32, bfloat16, float16 or float64; got '{dtype}'",
            dtype=dtype,
        )


def test_the_device(model_folder: Path) -> None:
    refused(model_folder, "device 'toaster' cannot be used here", device="toaster")
    if not torch.cuda.is_available():
        refused(model_folder, "device 'cuda' cannot be used here", device="cuda")


def test_positions_that_begin_after_the_pad(tmp_path: Path) -> None:
    sizes = dict(BY_NAME["BERT"].sizes, pad_token_id=1, bos_token_id=0)
    row = Row("RoBERTa", "RobertaForMaskedLM", "RobertaConfig", 2, "encoder", sizes)
    loaded = hf.load(written(row, tmp_path))
    assert loaded.max_positions == 62
    loaded.model(torch.full((1, 62), 5))
    with pytest.raises((IndexError, RuntimeError)):
        loaded.model(torch.full((1, 63), 5))


def test_shards(model_folder: Path) -> None:
    state = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    table = {}
    for number, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        save_file({name: state[name] for name in names}, model_folder / f"part-{number}.safetensors")
        table |= {name: f"part-{number}.safetensors" for name in names}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    out = hf.load(model_folder).model(token_ids()).logits
    torch.testing.assert_close(out, BY_NAME["Llama GQA"].build()(token_ids()).logits, atol=1e-5, rtol=1e-5)


def test_a_model_of_the_local_cache(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a cached snapshot are links into the cache's blobs, and are read; nothing asks the network."""
    repository = tmp_path / "cache" / "models--someone--small"
    snapshot = repository / "snapshots" / ("0" * 40)
    for place in (repository / "refs", repository / "blobs", snapshot):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for file in model_folder.iterdir():
        shutil.copy(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert hf.load("someone/small").name == "someone/small"


# -- what does not ----------------------------------------------------------------------------------------------------


def test_no_such_folder_or_name(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: no such folder; give one with config.json and *.safetensors, or a hub name")
    refused("./nowhere", "./nowhere: no such folder")
    refused("some one/x", "some one/x: no such folder")
    refused(
        "someone/nothing",
        "someone/nothing: no such folder, no such model in the local cache, and it could not be fetched",
    )
    (tmp_path / "file").write_text("")
    refused(
        str(tmp_path / "file"), "a file, and a model is a folder with config.json and *.safetensors; give the folder"
    )
    refused(tmp_path, "no config.json, so no transformers checkpoint; give the folder that holds it")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "holds an adapter, no model; merge it first")


def test_nothing_in_the_folder_is_run(model_folder: Path) -> None:
    """auto_map, attention and expert implementations, kernels and whatever begins with _ are not read."""
    marker = model_folder / "it_ran"
    (model_folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    evil = "someone/kernel"
    change(
        model_folder,
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        attn_implementation=evil,
        _attn_implementation=evil,
        _attn_implementation_internal=evil,
        experts_implementation=evil,
        _experts_implementation_internal=evil,
        transformers_weights="../../secret.safetensors",
        fusion_config={"patch_embeddings": True},
        kernel_config={"RMSNorm": evil},
        use_kernels=True,
        name_or_path="/etc",
        return_dict=False,
        to_dict="x",
        dtype="load",
    )
    loaded = hf.load(model_folder)
    assert not marker.exists()
    said = vars(loaded.model.config)
    assert evil not in str(said) and "evil" not in str(said)
    assert not {"auto_map", "transformers_weights", "fusion_config", "kernel_config", "to_dict"} & said.keys()
    assert loaded.model(token_ids()).logits.shape[-1] == VOCAB
    change(model_folder, model_type="evil")
    refused(
        model_folder,
        f"transformers {transformers.__version__} knows no model_type 'evil'; headwise runs no code from a model",
    )


def test_keys_that_name_code_are_left_out_at_any_depth() -> None:
    from headwise.hf.files.config_fields import harmless

    evil, labels = "someone/kernel", {"_0": "a", "x_plan": "b", "kernels": "c"}
    below = {"hidden_size": 3, "parts": [{"depth": 2, "auto_map": evil}, [{"x_file": evil, "width": 5}], 7]}
    value = {"text_config": {"_attn_implementation": evil, **below}, "id2label": labels, "kernels": {"a": 1}}
    left = {"hidden_size": 3, "parts": [{"depth": 2}, [{"width": 5}], 7]}
    assert harmless(value) == {"text_config": left, "id2label": labels}


def test_which_keys_of_a_config_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its class declares or its file names, but for such as choose code; sizes of kernels are sizes."""
    from headwise.hf.files import config_fields as fields

    assert {"conv_kernel_size", "sconv_kernel_size"} <= fields.known_keys(transformers.InklingTextConfig)
    dangerous = [
        "attn_implementation",
        "auto_map",
        "x_plan",
        "weights_path",
        "code_file",
        "use_kernels",
        "kernel_config",
    ]
    text = " ".join(f'"{key}"' for key in [*dangerous, "_private", "old_name"])
    monkeypatch.setattr("headwise.hf.files.config_fields.inspect.getsource", lambda _: text)
    known = fields.known_keys(transformers.LlamaConfig)
    assert {"old_name", "hidden_size"} <= known and not known & {*dangerous, "_private", "architectures"}


def test_the_tokenizers_own_code_is_not_run(model_folder: Path) -> None:
    marker = model_folder / "it_ran"
    (model_folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Tok: ...\n")
    table = {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}, "tokenizer_class": "Tok", "bos_token": "<s>"}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(table))
    assert hf.load(model_folder).bos_id == 0 and not marker.exists()
    (model_folder / "tokenizer.json").rename(model_folder / "vocab.json")
    refused(model_folder, "no tokenizer that can be read")
    assert not marker.exists()


def test_a_folder_in_a_locale_that_cannot_name_it(model_folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "modèle"
    shutil.copytree(model_folder, named)
    # In the C locale without Python's UTF-8 mode, each byte beyond ASCII becomes a lone surrogate.
    folder = Path(os.fsencode(named).decode("ascii", "surrogateescape"))
    loaded, text = hf.load(folder), "for i in range(3):"
    assert torch.equal(loaded.encode(text)[0], hf.load(model_folder).encode(text)[0])


@pytest.mark.skipif(sys.platform == "darwin", reason="file names of macOS are UTF-8")
def test_a_path_that_is_not_utf_8(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xe8le"))
    shutil.copytree(model_folder, folder)
    refused(folder, "the path is not valid UTF-8, and the safetensors library opens no other; rename the folder")
    with pytest.raises(hf.ModelError, match="the path is not valid UTF-8"):
        hf.checkpoint(folder)


def test_a_missing_tokenizer(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    refused(model_folder, "no tokenizer that can be read")
    (model_folder / "tokenizer.json").unlink()
    refused(model_folder, "no tokenizer; put the model's tokenizer.json beside config.json")


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("gpt2", "n_layer", 10**30),
        ("gpt2", "n_head", -1),
        ("t5", "num_layers", 10**30),
        ("t5", "num_decoder_layers", -1),
        ("t5", "num_heads", 0),
        ("whisper", "encoder_layers", 10**30),
        ("whisper", "decoder_layers", 10**30),
        ("whisper", "decoder_attention_heads", -1),
    ],
)
def test_a_size_is_within_bounds_under_whatever_name_its_config_has_it(
    model_type: str, field: str, value: int, tmp_path: Path
) -> None:
    """Layers without end would be built, on the meta device, for ever."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, field: value}))
    with pytest.raises(hf.ModelError, match=rf"config.json: {field} is {value}, and an integer of [01] to 10*"):
        hf.loading.model.describe(tmp_path, any_input=True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and an integer of 1 to 10000 is needed"),
        ({"num_attention_heads": True}, "num_attention_heads is True, and an integer"),
        ({"num_attention_heads": 2.0}, "num_attention_heads is 2.0, and an integer"),
        ({"num_attention_heads": [4, 0]}, "num_attention_heads is 0, and an integer"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', and an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and an integer of 1 to 1000 is needed"),
        ({"vocab_size": -1}, "vocab_size is -1, and"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000, and"),
        ({"num_attention_heads": 5}, "no valid LlamaConfig (Class validation error"),
        ({"hidden_size": 28_000}, "config.json describes "),
        ({"vocab_size": 9_000_000}, "numbers, the safetensors files hold"),
        ({"hidden_size": 32}, "weights of another size than config.json says, 'lm_head.weight' first, ("),
        ({"num_hidden_layers": 3}, "9 missing keys, 'model.layers.2.input_layernorm.weight' first, so those"),
        ({"hidden_act": "explode"}, "config.json describes no LlamaForCausalLM that can be built"),
        ({"model_type": None}, "model_type is None, and a name is needed"),
        ({"model_type": ["llama"]}, "model_type is ['llama'], and a name is needed"),
        ({"quantization_config": {"quant_method": "gptq"}}, "a quantised checkpoint (quantization_config)"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_config_that_lies(model_folder: Path, fields: dict[str, Any], text: str) -> None:
    change(model_folder, **dict.fromkeys(("model_type",)) if fields.get("model_type", "") is None else fields)
    refused(model_folder, text)


def test_a_config_that_is_no_json(model_folder: Path) -> None:
    path = model_folder / "config.json"
    whole = path.read_text()
    for text, why in (
        (whole[:-3], "not valid JSON"),
        (whole.replace('"vocab_size": 53', '"vocab_size": NaN'), "not valid JSON (NaN is not a number)"),
        (
            whole.replace('"vocab_size": 53', '"vocab_size": 53, "vocab_size": 54'),
            "the key 'vocab_size' occurs twice",
        ),
        ("[1]", "contains a JSON list, and an object is needed"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "bytes, at most 1048576 are read"),
    ):
        path.write_text(text)
        refused(model_folder, why)
    path.write_bytes(b"\xff\xfe")
    refused(model_folder, "not valid JSON")
    path.unlink()
    path.mkdir()
    refused(model_folder, "not a regular file")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_is_read_strictly(model_folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_folder / file
    text = path.read_text() if path.exists() else "{}"
    path.write_text(text.rstrip()[:-1] + (", " if len(text) > 2 else "") + '"x": 1, "x": 2}')
    refused(model_folder, f"{file}: not valid JSON (the key 'x' occurs twice)")
    path.write_text(text[:-1] + " " * 99_000 + "}")
    monkeypatch.setattr("headwise.hf.loading.tokenizer.MAX_TOKENIZER", 90_000)
    refused(model_folder, f"{file}: {path.stat().st_size} bytes, at most 90000 are read")


# -- models that look does not read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_models_outside_the_interface_are_refused_before_their_weights(model_type: str, tmp_path: Path) -> None:
    model, config, sizes = OUTSIDE[model_type]
    written_config = getattr(transformers, config)(**sizes, architectures=[model])
    quiet(lambda: written_config.save_pretrained(tmp_path))
    refused(tmp_path, f"{model} (model_type '{model_type}') is not on transformers' attention interface, so its heads")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("T5", "it is made of several models (encoder and decoder, or text and images)"),
        ("BART", "it is made of several models (encoder and decoder, or text and images)"),
        ("Whisper", "it is made of several models (encoder and decoder, or text and images)"),
        ("CLIP", "it is made of several models (encoder and decoder, or text and images)"),
        ("ViT", "its input is 'pixel_values'"),
    ],
)
def test_models_that_are_no_text_model(name: str, why: str, tmp_path: Path) -> None:
    row = BY_NAME[name]
    config = getattr(transformers, row.config)(**row.sizes, architectures=[row.model])
    quiet(lambda: config.save_pretrained(tmp_path))
    refused(tmp_path, "text models that are decoder-only or encoder-only are read here; this one")
    refused(tmp_path, f"{why}; `headwise look` takes it, or load it with transformers and use headwise.hf.probe(")


def test_an_architecture_of_another_model_is_not_taken(model_folder: Path) -> None:
    """The class is taken by name from transformers only if it belongs to the model_type."""
    for names in (["BertModel"], ["os"], ["AutoModel"], ["PreTrainedModel"], [3], "LlamaModel", []):
        change(model_folder, architectures=names)
        assert type(hf.load(model_folder).model).__name__ == "LlamaForCausalLM"
