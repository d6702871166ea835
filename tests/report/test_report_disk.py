"""How a file is put on the disk: whole or not at all, and what killed runs left behind is cleared away."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disks import files_of_at_most, small_disk
from looks import make_look

import headwise
from headwise import report
from headwise.files import atomic_file, partial

SOURCE = str(Path(headwise.__file__).parent.parent)


def test_write_returns_the_bytes_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    assert report.write(make_look(), target) == target.stat().st_size
    assert target.read_text() == report.render(make_look())
    assert list(tmp_path.iterdir()) == [target]


def test_the_file_has_the_mode_any_new_file_has(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        report.write(make_look(), tmp_path / "r.html")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "r.html").stat().st_mode) == 0o644


@pytest.mark.parametrize("step", ["replace", "fsync"])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_fault_leaves_the_old_file_and_nothing_half_written(
    step: str, fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr(os, step, broken)
    with pytest.raises(type(fault)):
        report.write(make_look(), target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "there" / "real.html")
    report.write(make_look(), tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "there" / "real.html").is_file()


def test_where_it_cannot_be_written_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, error, words_of_it in (
        (tmp_path / "none" / "r.html", FileNotFoundError, "its folder does not exist; create it"),
        (tmp_path, IsADirectoryError, "it is a folder; give a file name"),
        (Path(os.devnull), OSError, "it is not a regular file"),
    ):
        for function in (report.check_destination, lambda p: report.write(make_look(), p)):
            with pytest.raises(error, match=words_of_it):
                function(path)
        assert [*tmp_path.iterdir()] == []
    path, why = tmp_path / "r.html", r"no file can be created in its folder \(Permission denied\)"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        for function in (report.check_destination, lambda p: report.put(b"", p)):
            with pytest.raises(PermissionError, match=f"cannot write {path}: {why}; give another path"):
                function(path)
    path.write_text("old")
    assert report.check_destination(path) == path.resolve()
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path], "what was tried leaves nothing"


def denied(*_: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where no file can be made and all may write")
def test_a_folder_that_takes_no_files_is_told_before_the_work() -> None:
    with pytest.raises(
        OSError, match=r"cannot write /proc/r.html: no file can be created in its folder \(No such file"
    ):
        report.check_destination("/proc/r.html")


def test_a_name_that_is_too_long_is_told_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write .*: File name too long; give another path"):
        report.check_destination(tmp_path / f"{'r' * 260}.html")


def test_a_hostile_path_is_shown_harmless(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        report.check_destination(tmp_path / "\x1b[2J" / "r.html")
    assert "\\x1b[2J" in str(caught.value) and "\x1b" not in str(caught.value)


# --- full disks -------------------------------------------------------------------------------------------------------


def writers() -> dict[str, Callable[[Path], object]]:
    return {"write": lambda path: report.write(make_look(), path), "put": lambda path: report.put(b"new" * 9999, path)}


@pytest.mark.parametrize("writer", writers())
def test_a_disk_that_is_full_midway_keeps_the_old_file(writer: str, tmp_path: Path) -> None:
    target = tmp_path / "chart\x1b.svg"
    target.write_text("old")
    with files_of_at_most(4096), pytest.raises(OSError) as caught:
        writers()[writer](target)
    assert str(caught.value) == (
        f"cannot write {tmp_path}/chart\\x1b.svg: File too large; free some space, or give another path"
    )
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.EFBIG
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_small_disk_that_is_full_keeps_the_old_file(tmp_path: Path) -> None:
    with small_disk(tmp_path, "8k"):
        target = tmp_path / "chart.svg"
        target.write_text("old")
        with pytest.raises(OSError, match="No space left on device"):
            report.put(b"new" * 9999, target)
        assert target.read_text() == "old"
        assert list(tmp_path.iterdir()) == [target]


# --- what killed runs leave -------------------------------------------------------------------------------------------


def killed(folder: Path, name: str) -> Path:
    """A run that is killed while it writes; the half-written file it leaves."""
    before = {*folder.iterdir()}
    code = "import os; from headwise import report; os.fsync = lambda _: os.kill(os.getpid(), 9); "
    code += f"report.put(b'half', {name!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": SOURCE})
    assert done.returncode == -signal.SIGKILL
    (left,) = {*folder.iterdir()} - before
    assert left.read_bytes() == b"half"
    return left


def test_what_a_killed_run_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    left, other = killed(tmp_path, "report.html"), killed(tmp_path, "other.html")
    assert left.name.startswith(".report.html.") and left.name.endswith(".partial")
    others = (
        ".report.html.0123.partial",
        "report.html.0123456789abcdef.partial",
        ".reportxhtml.0123456789abcdef.partial",
    )
    near = [tmp_path / name for name in others]
    for path in near:
        path.write_text("another's")
    report.put(b"whole", tmp_path / "report.html")
    assert {*tmp_path.iterdir()} == {tmp_path / "report.html", other, *near}


def test_what_another_run_writes_now_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    real, met = os.fsync, []

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        met.extend(tmp_path.iterdir())
        report.put(b"second", target)
        assert target.read_bytes() == b"second" and met[0].exists()

    monkeypatch.setattr(os, "fsync", meanwhile)
    report.put(b"first", target)
    assert len(met) == 1 and target.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_cleared_before_it_was_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, cleared = partial.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not cleared:
            cleared.extend(tmp_path.iterdir())
            cleared[0].unlink()
        real(descriptor, how)

    monkeypatch.setattr(partial.fcntl, "flock", late)
    report.put(b"whole", tmp_path / "report.html")
    assert cleared and (tmp_path / "report.html").read_bytes() == b"whole"


def test_links_and_folders_of_that_name_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / ".r.0123456789abcdef.partial").symlink_to(tmp_path / "kept")
    (tmp_path / ".r.fedcba9876543210.partial").mkdir()
    report.put(b"", tmp_path / "r")
    assert (tmp_path / "kept").read_text() == "kept" and len([*tmp_path.iterdir()]) == 4


def test_without_locks_files_are_written_and_nothing_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which renames no open file either."""
    real = os.replace

    def closed_first(source: Any, target: Any) -> None:
        assert str(source) not in {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
        real(source, target)

    (tmp_path / ".r.0123456789abcdef.partial").write_text("half")
    monkeypatch.setattr(partial, "fcntl", None)
    for module in (partial, atomic_file):
        monkeypatch.setattr(module, "HAS_LOCKS", False)
    monkeypatch.setattr(os, "replace", closed_first)
    report.put(b"whole", tmp_path / "r")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".r.0123456789abcdef.partial", "r"]


def test_the_content_and_then_the_name_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a power cut, too: the file is synced before it has its name, and the folder after."""
    order: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("name"), rename(*paths)))
    report.put(b"whole", tmp_path / "r")
    assert order == ["file", "name", "folder"]


def test_a_name_as_long_as_a_name_may_be(tmp_path: Path) -> None:
    name = "\U0001f642" * 62 + ".html"  # 253 bytes
    report.put(b"whole", tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
