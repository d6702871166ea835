"""Runs that write a checkpoint, and what ends them or runs beside them."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import copied, made

from headwise.files import atomic_folder
from headwise.files import partial as hidden
from headwise.reshape.write.manifest import MANIFEST, verify

LEFT = "written.0123456789abcdef.headwise-partial"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "source")


# -- ends from outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "error"), [(2, KeyboardInterrupt), (15, SystemExit), (1, SystemExit)])
def test_an_interrupt_leaves_nothing(number: int, error: type[BaseException], source: Path, tmp_path: Path) -> None:
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    outside = signal.signal(number, usual)  # the tests may run where it is ignored, as under nohup
    try:
        before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        with pytest.raises(error) as caught:
            copied(source, tmp_path / "written", check=lambda _: os.kill(os.getpid(), number))
        assert os.listdir(tmp_path) == ["source"]
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    finally:
        signal.signal(number, outside)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 128 + number


def test_a_handler_of_the_users_own_stays(source: Path, tmp_path: Path) -> None:
    met: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: met.append(number))
    try:
        copied(source, tmp_path / "written", check=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert met == [signal.SIGTERM] and verify(tmp_path / "written")


def test_in_another_thread(source: Path, tmp_path: Path) -> None:
    """Where Python lets nobody set a handler."""
    thread = threading.Thread(target=copied, args=(source, tmp_path / "written"))
    thread.start()
    thread.join()
    assert verify(tmp_path / "written")


# -- other runs -------------------------------------------------------------------------------------------------------


def test_of_two_runs_to_one_destination_one_wins(source: Path, tmp_path: Path) -> None:
    """The first is about to be done when the second begins; neither clears the other away."""
    inner: list[object] = []

    def second(folder: Path) -> None:
        inner.append(copied(source, tmp_path / "written"))
        assert (folder / "config.json").exists(), "the first run's folder is locked"

    with pytest.raises(FileExistsError, match="another run has created it; nothing is overwritten; give another path"):
        copied(source, tmp_path / "written", check=second)
    assert sorted(os.listdir(tmp_path)) == ["source", "written"] and [verify(tmp_path / "written")] == inner


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("source")])
def test_what_comes_to_be_there_meanwhile_is_not_replaced(
    make: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    def meanwhile(_: Path) -> None:
        make(tmp_path / "written")
        if (tmp_path / "written").is_dir() and not (tmp_path / "written").is_symlink():
            (tmp_path / "written" / "mine").touch()

    with pytest.raises(FileExistsError, match="another run has created it"):
        copied(source, tmp_path / "written", check=meanwhile)
    assert sorted(os.listdir(tmp_path)) == ["source", "written"]


def test_what_killed_runs_left_is_removed_and_nothing_else(source: Path, tmp_path: Path) -> None:
    """Of whatever destination in the folder; what is alike by name only stays."""
    (tmp_path / f".{LEFT}").mkdir()
    (tmp_path / f".{LEFT}" / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".other.{LEFT}").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    (tmp_path / f".link.{LEFT}").symlink_to("mine")
    (tmp_path / f".file.{LEFT}").touch()
    others = [LEFT, f".{LEFT}x", ".written.0123456789abcdeF.headwise-partial", ".written.headwise-partial"]
    for name in others:
        (tmp_path / name).mkdir()
    copied(source, tmp_path / "written")
    left = ["source", "written", "mine", f".link.{LEFT}", f".file.{LEFT}", *others]
    assert sorted(os.listdir(tmp_path)) == sorted(left)
    assert (tmp_path / "mine" / "x").exists()


def test_a_folder_that_is_cleared_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / f".{LEFT}"
    steps: list[str] = []

    def lock(descriptor: int, how: int) -> None:
        steps.append("lock")
        if len(steps) == 1:
            partial.rmdir()

    monkeypatch.setattr(hidden.fcntl, "flock", lock)
    descriptor = atomic_folder.claim(partial)
    assert descriptor is not None and os.path.samestat(os.fstat(descriptor), partial.stat()) and len(steps) == 2
    os.close(descriptor)


def test_a_long_name_has_room_for_the_hidden_one(source: Path, tmp_path: Path) -> None:
    copied(source, tmp_path / ("\U0001f600" * 63))
    assert (tmp_path / ("\U0001f600" * 63) / MANIFEST).exists()


@pytest.mark.parametrize("lasts", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_sync_no_folders(lasts: int, source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(lasts, os.strerror(lasts))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    copied(source, tmp_path / "written")
    assert verify(tmp_path / "written")
