"""The weights of a model folder: safetensors alone, of the folder alone, and as many as config.json says."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import change, refused, written
from hf_models import BY_NAME, Row
from safetensors.torch import load_file, save_file

import headwise.hf as hf


def test_pickled_weights_are_refused_unopened(model_folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(model_folder / "exploded"),)

    (model_folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb()}, model_folder / "pytorch_model.bin")
    refused(
        model_folder, "the weights are in 'pytorch_model.bin' only, and opening such a file can run code hidden in it"
    )
    refused(model_folder, f".from_pretrained('{model_folder}').save_pretrained('{model_folder}-safetensors')")
    assert not (model_folder / "exploded").exists()
    (model_folder / "pytorch_model.bin").unlink()
    refused(model_folder, "no model.safetensors and no model.safetensors.index.json; download the weights too")


def test_a_tensor_in_two_files(model_folder: Path) -> None:
    name = "model.norm.weight"
    state = load_file(model_folder / "model.safetensors")
    (model_folder / "model.safetensors").unlink()
    for file, part in (("a.safetensors", state), ("b.safetensors", {name: state[name]})):
        save_file(part, model_folder / file)
    table = dict.fromkeys(state, "a.safetensors") | {"more": "b.safetensors"}
    (model_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    refused(model_folder, f"b.safetensors: the tensor '{name}' stands in two files; download the model anew")


def test_weights_elsewhere_are_not_read(model_folder: Path, tmp_path: Path) -> None:
    """Shard names are hostile: no path, no link out of the folder."""
    (model_folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = model_folder / "model.safetensors.index.json"
    for name in (
        "../secret.safetensors",
        str(tmp_path / "secret.safetensors"),
        ".hidden.safetensors",
        "x.bin",
        "a\x00.safetensors",
        "",
    ):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        refused(model_folder, "where a plain *.safetensors name belongs")
    (model_folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "link.safetensors"}}))
    refused(model_folder, "outside of the model's folder; copy the file into it")
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    refused(model_folder, "the weights file 'gone.safetensors' is missing")
    (model_folder / "folder.safetensors").mkdir()
    index.write_text(json.dumps({"weight_map": {"x": "folder.safetensors"}}))
    refused(model_folder, "folder.safetensors: not a regular file; download it anew")
    for table in ({}, {"weight_map": []}, {"weight_map": {"x": 3}}, {"weight_map": {}}):
        index.write_text(json.dumps(table))
        refused(model_folder, "no weight_map of tensor names to file names")


def test_damaged_weights(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_folder / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]

    def with_header(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode() + whole[8 + length :]

    header = whole[8 : 8 + length].decode()
    entries = json.loads(header)
    name = next(key for key in entries if key != "__metadata__")
    one = json.dumps(entries[name])
    for bad, why in (
        (b"", "no safetensors file (its header says 0 bytes)"),
        (struct.pack("<Q", 2**63), "no safetensors file"),
        (whole[: len(whole) // 2], "the download broke off, or bytes were added"),
        (with_header(header.rstrip()[:-1] + f', "{name}": {one}}}'), "occurs twice"),
        (with_header(header.replace('"F32"', '"F8_E4M3"', 1)), "tensors of 'F8_E4M3', a quantised checkpoint"),
        (
            with_header(json.dumps({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})),
            "has no shape and dtype",
        ),
        (with_header(json.dumps({"x": 3})), "the tensor 'x' has no shape and dtype"),
    ):
        path.write_bytes(bad)
        refused(model_folder, why)
    path.write_bytes(whole)
    monkeypatch.setattr("headwise.hf.files.safetensors_header.MAX_HEADER", length - 1)
    refused(model_folder, f"no safetensors file (its header says {length} bytes)")


def test_tables_that_no_model_of_the_size_has(tmp_path: Path) -> None:
    """Numbers that are no weights (a causal mask as a buffer) are asked for by the config alone."""
    sizes = dict(BY_NAME["GPT-2"].sizes)
    row = Row("GPT-BigCode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", 2, sizes=sizes)
    folder = written(row, tmp_path)
    assert hf.load(folder).max_positions == 64
    change(folder, n_positions=12_000)
    refused(folder, "numbers, the safetensors files hold")


def test_experts_beyond_number(tmp_path: Path) -> None:
    folder = written(BY_NAME["Mixtral"], tmp_path)
    change(folder, num_hidden_layers=1000, num_local_experts=2001)
    refused(folder, "1000 layers of 2001 experts; such a model does not exist")
