"""What a written checkpoint holds, where it is not written, and what other runs beside it see."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peak_memory
import pytest
import torch
import transformers
from checkpoint_folders import content, copied, made, tensors
from hf_folders import quiet
from hf_models import BY_NAME
from safetensors.torch import load_file, save, save_file
from torch import Tensor

import headwise.hf as hf
from headwise.files import atomic_folder
from headwise.reshape.write import shards
from headwise.reshape.write.manifest import MANIFEST, verify
from headwise.reshape.write.writer import Planned, kept, write

LEFT = "written.0123456789abcdef.headwise-partial"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "source")


def planned(state: dict[str, Tensor]) -> list[Planned]:
    return [Planned(name, t.dtype, tuple(t.shape), lambda t=t: t) for name, t in state.items()]  # type: ignore[misc]


def wrote(
    source: Path, destination: Path, state: dict[str, Tensor] | list[Planned], **options: Any
) -> dict[str, bytes]:
    """The files of a checkpoint of these tensors."""
    with hf.checkpoint(source) as opened:
        rows = planned(state) if isinstance(state, dict) else state
        write(destination, config=opened.config, tensors=rows, source=opened, **options)
    verify(destination)
    return content(destination)


# -- what is written --------------------------------------------------------------------------------------------------


def test_the_weights_are_as_the_safetensors_library_writes_them(source: Path, tmp_path: Path) -> None:
    """Byte by byte: every dtype, scalars, empty tensors, views."""
    state = tensors()
    for number, dtype in enumerate(shards.WORDS):
        state[f"b.{number}"] = torch.arange(7).to(dtype)
        state[f"a.{number}"] = torch.arange(3).to(dtype)
    views = {"t": torch.randn(5, 3).T, "cut": torch.randn(7, 5)[2:, 1:4], "grad": torch.randn(3, requires_grad=True)}
    files = wrote(source, tmp_path / "written", state | views)
    whole = {name: tensor.detach().contiguous() for name, tensor in (state | views).items()}
    assert files["model.safetensors"] == save(whole, metadata={"format": "pt"})


def test_a_copy_has_the_same_bytes(source: Path, tmp_path: Path) -> None:
    manifest = copied(source, tmp_path / "written")
    before, after = content(source), content(tmp_path / "written")
    assert json.loads(after.pop(MANIFEST)) == json.loads(manifest.to_json())
    assert json.loads(after["config.json"]) == json.loads(before.pop("config.json"))
    del after["config.json"]
    assert before == after


def test_what_is_no_part_of_a_copy_stays_behind(source: Path, tmp_path: Path) -> None:
    """Code, pickles, other formats, the card; and no key that names code goes along."""
    for name in (
        "modeling_x.py",
        "pytorch_model.bin",
        "README.md",
        "model.gguf",
        "x.safetensors",
        "run.sh",
        ".gitattributes",
    ):
        (source / name).write_bytes(b"x")
    (source / "LICENSE").write_text("free")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.T", null]}, "bos_token": "<s>"}')
    copied(source, tmp_path / "written")
    after = content(tmp_path / "written")
    assert sorted(after) == sorted(
        [MANIFEST, "LICENSE", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    )
    assert b"auto_map" not in b"".join(after.values())


def test_shards_are_filled_in_order_and_named_by_an_index(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    sizes = {"e": 7, "d": 3, "c": 4, "b": 11, "a": 1}
    monkeypatch.setattr(shards, "MAX_SHARD", 10)
    files = wrote(source, tmp_path / "written", {name: torch.zeros(n, dtype=torch.int8) for name, n in sizes.items()})
    index = json.loads(files["model.safetensors.index.json"])
    names = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert index == {
        "metadata": {"total_size": 26},
        "weight_map": {"a": names[3], "b": names[2], "c": names[1], "d": names[0], "e": names[0]},
    }
    assert [*load_file(tmp_path / "written" / names[0])] == ["d", "e"]
    assert sorted(name for name in files if name.endswith("safetensors")) == names
    with hf.checkpoint(tmp_path / "written") as opened:
        assert opened.tensors.keys() == sizes.keys()


def test_stock_transformers_loads_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied weight that the files leave out stays out, and is tied again."""
    model = BY_NAME["Llama GQA"].build()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    quiet(lambda: model.save_pretrained(tmp_path / "model"))
    monkeypatch.setattr(shards, "MAX_SHARD", 9000)
    copied(tmp_path / "model", tmp_path / "written")
    with hf.checkpoint(tmp_path / "written") as opened:
        assert "model.embed_tokens.weight" in opened.tensors and "lm_head.weight" not in opened.tensors
        assert sum(name.endswith(".safetensors") for name in opened.inputs) > 2
    loaded = quiet(lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_the_same_work_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    """At another time, in another place, from keys in another order."""
    first = copied(source, tmp_path / "first")
    config = json.loads((source / "config.json").read_text())
    moved = Path(shutil.copytree(source, tmp_path / "elsewhere" / "moved"))
    (moved / "config.json").write_text((source / "config.json").read_text())
    with hf.checkpoint(moved) as opened:
        rows = [kept(opened, name) for name in opened.tensors]
        backwards = dict(reversed(config.items()))
        assert write(tmp_path / "second", config=backwards, tensors=rows, source=opened) == first
    assert content(tmp_path / "first") == content(tmp_path / "second")


def test_a_system_that_writes_less_than_it_is_told(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, piece: real(file, piece[:997]))
    copied(source, tmp_path / "written")
    assert content(tmp_path / "written")["model.safetensors"] == content(source)["model.safetensors"]


def test_the_modes_are_those_of_any_new_file(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        copied(source, tmp_path / "written")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "written").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "written").iterdir()} == {0o640}


def test_progress_ends_with_all(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.reshape.write.writer.PIECE", 100)
    calls: list[tuple[int, int]] = []
    copied(source, tmp_path / "written", progress=lambda done, total: calls.append((done, total)))
    total = 2 * sum(tensor.nbytes for tensor in tensors().values())
    assert {number for _, number in calls} == {total} and calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and len(calls) > 30


def test_further_files(source: Path, tmp_path: Path) -> None:
    """One of the source's name takes its place; what a check returns is written, too."""
    seen: list[list[str]] = []

    def check(folder: Path) -> dict[str, bytes]:
        seen.append(sorted(os.listdir(folder)))
        with hf.checkpoint(folder) as opened:
            assert folder.parent == tmp_path and opened.read("model.scale") == 2
        return {"RESHAPE.md": b"it is well"}

    extra = {"README.md": b"card", "tokenizer.json": b"{}"}
    copied(source, tmp_path / "written", extra=extra, check=check)
    files = content(tmp_path / "written")
    assert {name: files[name] for name in extra} == extra and files["RESHAPE.md"] == b"it is well"
    assert seen == [sorted(files.keys() - {"RESHAPE.md", MANIFEST})]
    assert {"README.md", "RESHAPE.md"} <= json.loads(files[MANIFEST])["files"].keys()


# -- what is not written ----------------------------------------------------------------------------------------------


def refused(source: Path, destination: Path, error: type[Exception], text: str, **options: Any) -> None:
    """The run ends with this, and all is as it was."""
    before = sorted(path for path in source.parent.rglob("*"))
    with pytest.raises(error, match=re.escape(text)):
        copied(source, destination, **options)
    assert sorted(path for path in source.parent.rglob("*")) == before


def test_destinations_that_cannot_be(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "same").symlink_to(source)
    exists = "it already exists, and nothing is overwritten; remove it or give another path"
    own = "it is the source folder or inside it"
    for path, error, text in (
        (tmp_path / "folder", FileExistsError, f"cannot write {tmp_path}/folder: {exists}"),
        (tmp_path / "file", FileExistsError, exists),
        (tmp_path / "link", FileExistsError, exists),
        (
            tmp_path / "none" / "x",
            FileNotFoundError,
            "its folder does not exist; create it, or give another path",
        ),
        (tmp_path / "file" / "x", FileNotFoundError, "its folder does not exist"),
        (source, ValueError, own),
        (source / "x", ValueError, own),
        (tmp_path / "same" / "x", ValueError, own),
        (tmp_path / "same", ValueError, own),
        (Path("/"), ValueError, "it does not name a new folder; give one, such as ./smaller"),
        (source / "..", ValueError, "it does not name a new folder"),
        (Path(""), ValueError, "it does not name a new folder"),
        (tmp_path / "a\0b", ValueError, "it does not name a new folder"),
    ):
        refused(source, path, error, text)
    if sys.platform != "darwin":  # file names of macOS are UTF-8
        not_utf_8 = Path(os.fsdecode(os.fsencode(tmp_path) + b"/pr\xfcned"))
        refused(source, not_utf_8, ValueError, "the path is not valid UTF-8, and the safetensors library opens no")
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused(source, tmp_path / "x", PermissionError, "no permission to write in its folder; give another path")


@pytest.mark.unchecked
def test_wrong_kinds(source: Path, tmp_path: Path) -> None:
    refused(source, 3, TypeError, "a checkpoint is written to a path; got int")  # type: ignore[arg-type]
    refused(source, tmp_path / "x", TypeError, "a file's content is bytes; got str for 'a'", extra={"a": "text"})


def test_tensors_that_are_not_as_planned(source: Path, tmp_path: Path) -> None:
    ones = torch.ones(2, 3)
    many = planned({"a": ones})

    def made_as(tensor: Tensor) -> list[Planned]:
        return [*planned({"b": ones}), Planned("a", torch.float32, (2, 3), lambda: tensor)]

    for rows, text in (
        ([], "a checkpoint has tensors; none are planned"),
        ([*many, *many], "the tensor 'a' is planned twice; a checkpoint has each once"),
        (planned({"../a": ones}), "'../a' is no name of a tensor (letters, digits, '.', '_', '-')"),
        (planned({"__metadata__": ones}), "'__metadata__' is no name of a tensor"),
        (
            planned({"a": ones.to(torch.complex64)}),
            "the tensor 'a' is planned in torch.complex64; plain numbers",
        ),
        (made_as(ones.half()), "the tensor 'a' was planned as torch.float32 (2, 3), and made as torch.float16 (2, 3)"),
        (made_as(ones.T), "and made as torch.float32 (3, 2); a plan and its making must agree"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            wrote(source, tmp_path / "written", rows)
        assert os.listdir(tmp_path) == ["source"]


def test_names_that_are_taken_or_code(source: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", MANIFEST):
        refused(source, tmp_path / "x", ValueError, f"the file {name!r} is written already", extra={name: b""})
    for name in ("../x", "a/b", "", ".x", "modeling_x.py", "x.so", "a\0"):
        refused(source, tmp_path / "x", ValueError, f"{name!r} is no name of a file beside weights", extra={name: b""})
    text = "the file 'tokenizer.json' is written already; give another name"
    refused(source, tmp_path / "x", ValueError, text, check=lambda _: {"tokenizer.json": b""})


def test_not_enough_room_is_told_before_the_first_byte(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 1_050_000))  # type: ignore[attr-defined]
    refused(
        source,
        tmp_path / "x",
        OSError,
        "bytes are needed and 1,050,000 are free; free some space, or give another path",
    )


def test_room_is_needed_for_every_file_and_no_more(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Weights with their headers, settings, what is copied, and a spare megabyte for the manifest."""
    (source / "LICENSE").write_bytes(b"free" * 1000)
    extra, rows = {"NOTE.md": b"n" * 3000, "tokenizer_config.json": b"{}"}, {"a": torch.zeros(7)}
    files = wrote(source, tmp_path / "first", rows, extra=extra)
    needed = sum(len(part) for name, part in files.items() if name != MANIFEST) + atomic_folder.SPARE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(OSError, match=f"{needed:,} bytes are needed and {needed - 1:,} are free; free some space"):
        wrote(source, tmp_path / "second", rows, extra=extra)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert wrote(source, tmp_path / "second", rows, extra=extra) == files


@pytest.mark.parametrize("denied", [os.W_OK, os.X_OK])
def test_a_folder_that_may_not_be_written_or_entered(
    denied: int, source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Asked of the system, for to root all is allowed."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or not mode & denied)
    refused(source, tmp_path / "x", PermissionError, "no permission to write in its folder; give another path")


def test_a_source_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    def touch(_: Path) -> None:
        os.utime(source / "tokenizer.json", ns=(1, 1))

    with pytest.raises(hf.ModelError, match=r"tokenizer.json: changed while it was read; run again"):
        copied(source, tmp_path / "written", check=touch)
    assert os.listdir(tmp_path) == ["source"]


def test_a_check_that_fails_or_writes(source: Path, tmp_path: Path) -> None:
    def fails(_: Path) -> None:
        raise ValueError("the logits differ")

    def starts_nothing(_: Path) -> None:
        os.open("no such program", os.O_RDONLY)

    def writes(folder: Path) -> None:
        (folder / "cache").mkdir()

    def spoils(folder: Path) -> None:
        os.truncate(folder / "model.safetensors", 99)

    refused(source, tmp_path / "x", ValueError, "the logits differ", check=fails)
    refused(source, tmp_path / "x", FileNotFoundError, "No such file or directory: 'no such", check=starts_nothing)
    refused(source, tmp_path / "x", ValueError, "'cache' is not as it was written; let nothing", check=writes)
    refused(source, tmp_path / "x", ValueError, "'model.safetensors' is not as it was written", check=spoils)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_a_tensor_and_what_is_made_of_it(tmp_path: Path) -> None:
    """A part is cut of each, so that there are two at a time; of this size the allocator keeps none that is freed."""
    folder, size = made(tmp_path / "source"), 33 << 20
    (folder / "model.safetensors").unlink()
    save_file({f"w.{i}": torch.zeros(size // 4).view(1024, -1) for i in range(2)}, folder / "model.safetensors")
    with hf.checkpoint(folder) as opened:

        def cut(name: str) -> Planned:
            return Planned(name, torch.float32, (1024, size // 4096 - 1), lambda: opened.read(name)[:, 1:])

        rows = [cut(name) for name in opened.tensors]
        before = peak_memory.forget()
        write(tmp_path / "written", config=opened.config, tensors=rows, source=opened)
        assert peak_memory.most() - before < 2 * size + (size // 2)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_finds_what_is_not_as_written(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    manifest = copied(source, folder)
    assert verify(folder) == manifest == verify(str(folder))
    (folder / "mine.txt").touch()
    assert verify(folder) == manifest, "what it does not name is not its matter"
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for spoilt in (whole[:-1], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match=r"'model.safetensors' is not what was written: .* write it anew"):
            verify(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"'model.safetensors' cannot be read .No such file or directory"):
        verify(folder)
    path.symlink_to(source / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.safetensors' is no plain file of the folder"):
        verify(folder)
    rows = json.loads(manifest.to_json())
    row = {"bytes": 1, "sha256": "x"}
    for text in ("", "[]", "{}", '{"files": 3}', json.dumps(rows | {"files": {"a": 3}}), "[" * 99_999, " " * (2 << 20)):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=r"no manifest that can be read .*; headwise wrote no such folder"):
            verify(folder)
    for name in ("../x", "/etc/passwd", ".", ""):
        (folder / MANIFEST).write_text(json.dumps(rows | {"files": {name: row}}))
        with pytest.raises(ValueError, match=r"is no plain file of the folder; write the checkpoint anew"):
            verify(folder)
