"""A checkpoint is opened and read tensor by tensor, and what is read is what was checked."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_folders import INDEX, SHARDS, made, tensors
from hf_folders import change
from safetensors.torch import load_file, save_file

import headwise.hf as hf
from headwise.reshape.layout.protocol import CheckpointSource


@pytest.mark.parametrize("shards", [1, 2])
def test_every_tensor_is_read_as_it_is_stored(shards: int, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", shards=shards)
    names = ["model.safetensors"] if shards == 1 else [*SHARDS]
    state = {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    with hf.checkpoint(str(folder)) as opened:
        assert isinstance(opened, CheckpointSource) and opened.folder == folder
        assert opened.tensors.keys() == state.keys() == tensors().keys()
        for name, tensor in state.items():
            entry, read = opened.tensors[name], opened.read(name)
            assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)) == (read.dtype, tuple(read.shape))
            assert torch.equal(read, tensor)
        assert opened.files == ("tokenizer.json", "tokenizer_config.json")
        assert sorted(opened.inputs) == sorted(path.name for path in folder.iterdir())
        assert b"".join(opened.chunks(names[-1])) == (folder / names[-1]).read_bytes()
        with pytest.raises(KeyError):
            opened.read("model.no_such")


def test_a_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    with hf.checkpoint(made(tmp_path / "model")) as opened:
        before = opened.read("model.scale")
        opened.read("model.scale").fill_(7)
        assert before == 2 and opened.read("model.scale") == 2


def test_a_closed_checkpoint_is_not_read(tmp_path: Path) -> None:
    with hf.checkpoint(made(tmp_path / "model")) as opened:
        pass
    with pytest.raises(ValueError, match="closed file"):
        opened.read("model.scale")


def test_a_snapshot_of_the_local_cache(tmp_path: Path) -> None:
    """Its files are links into the blobs of the same repository."""
    repository = tmp_path / "models--someone--small"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    made(tmp_path / "model", shards=2).rename(repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    with hf.checkpoint(snapshot) as opened:
        assert opened.read("model.scale") == 2 and len(opened.inputs) == 6
        opened.check()


def test_the_same_weights_in_another_format_are_not_read(tmp_path: Path) -> None:
    """Some repositories hold them twice, for two programs."""
    folder = made(tmp_path / "model", shards=2)
    for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "model.fp16.safetensors"):
        (folder / name).write_bytes(b"not ours")
    with hf.checkpoint(folder) as opened:
        assert opened.tensors.keys() == tensors().keys() and not {*os.listdir(folder)} <= {*opened.inputs}


# -- the config -------------------------------------------------------------------------------------------------------


def test_a_config_is_taken_over_by_an_allow_list(tmp_path: Path) -> None:
    """What its class in transformers knows, and no key that names code or further files, however deep."""
    evil = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "_attn_implementation": "someone/x"}
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"_x_map": 0, "b": 1}}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "_kernels": "x", "auto_map": {}}
    extra = {"pruned_heads": {"1": [0]}, "torch_dtype": "float16", "transformers_version": "4.1.0"}
    folder = made(tmp_path / "model", **evil, **labels, **extra, rope_parameters=rope, unheard_of=3)
    with hf.checkpoint(folder) as opened:
        assert opened.dropped == ("_attn_implementation", "auto_map", "trust_remote_code", "unheard_of")
        kept = dict(opened.config)
        assert kept.pop("rope_parameters") == {"rope_type": "default", "rope_theta": 10000.0}
        raw = json.loads((folder / "config.json").read_text())
        assert kept == {key: value for key, value in raw.items() if key in kept} and labels.items() <= kept.items()
        assert raw.keys() - kept.keys() == {*opened.dropped, "rope_parameters"}


def test_models_that_a_model_is_made_of(tmp_path: Path) -> None:
    """Each has the list of its own class."""
    text = {"model_type": "gemma3_text", "sliding_window": 7}
    images = {"model_type": "siglip_vision_model", "patch_size": 2}
    evil = {"auto_map": {}, "unheard_of": 1, "_x": 2}
    folder = made(tmp_path / "model", model_type="gemma3", text_config=text | evil, vision_config=images | evil)
    with hf.checkpoint(folder) as opened:
        assert opened.config["text_config"] == text and opened.config["vision_config"] == images
    for wrong, why in (
        ({"model_type": "evil"}, "no model_type 'evil'"),
        ({"model_type": "siglip_vision_model", "hidden_size": 0}, "hidden_size is 0, and"),
    ):
        change(folder, vision_config=wrong)
        with pytest.raises(hf.ModelError, match=why):
            hf.checkpoint(folder)


def test_settings_are_handed_on_without_keys_that_name_code(tmp_path: Path) -> None:
    folder = made(tmp_path / "model")
    table = {
        "auto_map": {"AutoTokenizer": ["evil.Tok", None]},
        "bos_token": "\u00e9",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "more": [{"auto_map": 1, "x": 2, "__type": "evil.Tok"}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    (folder / "generation_config.json").write_text('{"eos_token_id":3}')
    (folder / "vocab.json").write_text('{"_map": 3, "auto_map": 4}')
    with hf.checkpoint(folder) as opened:
        rest = {"bos_token": "\u00e9", "eos_token": table["eos_token"], "more": [{"x": 2}]}
        assert json.loads(b"".join(opened.copy("tokenizer_config.json"))) == rest
        for same in ("generation_config.json", "vocab.json", "tokenizer.json"):
            assert b"".join(opened.copy(same)) == (folder / same).read_bytes()


# -- what changes while it is open ------------------------------------------------------------------------------------


def rewritten(path: Path) -> None:
    """The same size at another time."""
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    """The same bytes and times in another file."""
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


@pytest.mark.parametrize("name", ["config.json", SHARDS[1], INDEX, "tokenizer.json"])
@pytest.mark.parametrize("how", [rewritten, replaced, Path.unlink], ids=lambda how: how.__name__)
def test_a_file_that_changes_is_noticed(how: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    folder = made(tmp_path / "model", shards=2)
    with hf.checkpoint(folder) as opened:
        opened.check()
        how(folder / name)
        with pytest.raises(hf.ModelError, match=f"{name}: changed while it was read; run again when nothing writes"):
            opened.check()


def test_a_file_that_shrinks_is_not_read_as_zeros(tmp_path: Path) -> None:
    folder = made(tmp_path / "model")
    with hf.checkpoint(folder) as opened:
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(999)
        with pytest.raises(hf.ModelError, match="changed while it was read"):
            opened.read("model.embed_tokens.weight")
        opened._check = lambda *_: None  # type: ignore[method-assign]  # as if it shrank a moment later
        with pytest.raises(hf.ModelError, match=r"ends before byte [0-9,]+; it changed while it was read"):
            opened.read("model.embed_tokens.weight")


def test_a_file_that_changes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of its header and the reading of its tensors."""
    from headwise.hf.loading import checkpoint as checkpoints

    folder = made(tmp_path / "model")
    monkeypatch.setattr(checkpoints, "_check_dtypes", lambda *_: rewritten(folder / "model.safetensors"))
    with pytest.raises(hf.ModelError, match="changed while it was read"):
        hf.checkpoint(folder)


def test_nothing_is_opened_to_be_written(tmp_path: Path) -> None:
    folder = made(tmp_path / "model")
    before = {path: (path.stat(), path.read_bytes()) for path in folder.iterdir()}
    with hf.checkpoint(folder) as opened:
        for file in opened._open.values():
            assert not file.writable()
        for name in opened.tensors:
            opened.read(name)
    for path, (status, content) in before.items():
        assert path.stat().st_mtime_ns == status.st_mtime_ns and path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(status.st_mode)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def test_one_weight_has_one_dtype_in_all_layers(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", shards=2)
    state = load_file(folder / SHARDS[1])
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(state | {name: state[name].half()}, folder / SHARDS[1], metadata={"format": "pt"})
    with pytest.raises(
        hf.ModelError, match=r"mixed dtypes: '[\w.]*0\.self[\w.]*' is float32 and .* is float16; load it"
    ):
        hf.checkpoint(folder)
