"""A checkpoint is whole or absent: at every system call that writes, killed, failing or interrupted."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import faults
import fresh
import pytest
from checkpoint_folders import content, copied, made
from full_disks import files_of_at_most, small_disk

import headwise
from headwise.reshape.write import shards

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
SWEEP = "import sys, json, faults, pathlib; print(json.dumps(faults.Place(*map(pathlib.Path, sys.argv[1:])).sweep()))"


@pytest.fixture(scope="module")
def sweep() -> Iterator[dict[str, Any]]:
    """What came of all faults; in memory, where to sync costs nothing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with TemporaryDirectory(dir=memory) as folder:
        place = Path(folder)
        path = [Path(__file__).parent, Path(headwise.__file__).parents[1]]
        done = fresh.run(SWEEP, folder, str(faults.library(place)), path=path)
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)


@pytest.mark.slow
@needs_compiler
def test_every_fault_leaves_a_whole_checkpoint_or_none(sweep: dict[str, Any]) -> None:
    """Nothing half-written stays but by a kill or a dead disk, the source is as it was, and the next run succeeds."""
    assert sweep["wrong"] == []
    number = len(sweep["calls"])
    ends = {(mode, end, there): count for mode, end, there, count in sweep["ends"]}
    met = Counter[str]()
    for (mode, end, _), count in ends.items():
        met[mode] += count * (end != "written")
    print(f"{number} calls that write; faults met: {dict(met)}")
    assert number > 50
    assert met["SIGKILL"] == number + 2, "the two more remove what a killed run left"
    assert met["ENOSPC"] == met["EIO"] == number, "what cannot be removed is no reason to write nothing"
    for mode in ("EIO from then on", "Ctrl-C", "SIGTERM"):
        assert met[mode] >= number // 3
    assert ends["SIGKILL", "killed", True] == ends["EIO", "OSError", True] == 1, "as the name is made to last"
    assert ends["Ctrl-C", "KeyboardInterrupt", True] == ends["SIGTERM", "SystemExit", True] == 1, "at the rename"


@pytest.mark.slow
@needs_compiler
def test_all_is_synced_before_it_is_renamed(sweep: dict[str, Any]) -> None:
    """A power cut after the rename finds every byte: each file is synced behind its last byte, then the folder."""
    calls = [tuple(call) for call in sweep["calls"]]
    names = [name for name, _ in calls]
    assert names.count("rename") == 1 and names.count("open") == 11
    rename = names.index("rename")
    assert names[rename - 1] == "fsync" and names[rename + 1 :] == ["fsync"]
    pending: dict[int, str] = {}
    for name, file in calls[: rename - 1]:
        if name == "write":
            pending[file] = "written"
        elif name == "fsync":
            pending[file] = "synced"
        elif name == "close":
            assert pending.pop(file) == "synced"


# -- full disks -------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_in_the_midst_of_a_file(tmp_path: Path) -> None:
    source, out = made(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    with files_of_at_most(2000), pytest.raises(OSError) as caught:
        copied(source, out / "written")
    assert str(caught.value) == f"cannot write {out}/written: File too large; free some space, or give another path"
    assert list(out.iterdir()) == []
    copied(source, out / "written")


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before the first byte; and where it fills up meanwhile, nothing is left."""
    source, out = made(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    with small_disk(out, "512k"):
        with pytest.raises(
            OSError, match=r"written: 1,05\d,\d+ bytes are needed and 524,288 are free; free some space, or"
        ):
            copied(source, out / "written")
        monkeypatch.setattr("headwise.files.atomic_folder.SPARE", 0)
        copied(source, out / "written")
        (out / "rest").write_bytes(bytes(524_288 - 20_000 - sum(map(len, content(out / "written").values()))))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))  # type: ignore[attr-defined]
        for size in (4096, 512):
            monkeypatch.setattr(shards, "MAX_SHARD", size)
            with pytest.raises(OSError, match="second: No space left on device; free some space, or give another path"):
                copied(source, out / "second")
            assert sorted(os.listdir(out)) == ["rest", "written"]
