"""Hostile checkpoint folders: each ends in one line and exit code 2; nothing runs, nothing outside is opened."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peak_memory
import pytest
from checkpoint_folders import made
from hf_folders import change
from hostile_folders import FAMILIES, Case

import headwise.hf as hf
from headwise.cli.errors import BAD_INPUT, message_of

MEMORY = 64 << 20
"""More than any of these folders may take."""

RUNS = (
    "compile",
    "ctypes",
    "exec",
    "import",
    "marshal",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
)
RUNS += ("pickle", "socket", "subprocess", "urllib")
seen: list[tuple[str, Any]] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if seen is not None and (event == "open" or event.startswith(RUNS)):
        seen.append((event, arguments[0] if arguments else None))


sys.addaudithook(_hook)


@contextmanager
def watched() -> Iterator[list[tuple[str, Any]]]:
    """What is opened and run meanwhile; ends a test that waits for the other end of a pipe."""
    global seen
    seen, mine = [], []
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(20)
    try:
        yield mine
    finally:
        signal.alarm(0)
        mine += seen
        seen = None
        signal.signal(signal.SIGALRM, before)


def _too_long(*_: object) -> None:
    raise AssertionError("it waits")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint in two files, which names code of its own; opened once, so that all is imported."""
    folder = made(tmp_path_factory.mktemp("template") / "model", shards=2)
    change(folder, auto_map={"AutoConfig": "evil.Config"}, custom_pipelines={"x": {"impl": "evil.Model"}})
    code = "open(__file__.replace('evil.py', 'it_ran'), 'w')\nclass Config: ...\nclass Model: ...\n"
    (folder / "evil.py").write_text(code)
    for nested in ({}, {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}}):
        change(folder, **nested)
        hf.checkpoint(folder).close()
    change(folder, model_type="llama", vision_config=None)
    return folder


def faults(case: Case, template: Path, place: Path) -> list[str]:
    """What is wrong with how a hostile folder is met."""
    name, spoil, why = case
    secret = place / "secret.safetensors"
    folder = place / "model"
    folder.mkdir()
    for path in template.iterdir():
        os.link(path, folder / path.name) if path.suffix == ".py" else (folder / path.name).write_bytes(
            path.read_bytes()
        )
    spoil(folder, secret)
    before = sorted(os.listdir(folder))
    start = peak_memory.forget()
    with watched() as events:
        try:
            hf.checkpoint(folder).close()
            return [f"{name}: accepted"]
        except hf.ModelError as error:
            caught = error
    text, code = message_of(caught)
    wrong = {
        "exit code": code != BAD_INPUT,
        "no single line": len(text.splitlines()) != 1 or not text.isprintable() or len(text) > 700,
        "says": why not in text,
        "opened outside": any(event == "open" and not inside(path, folder) for event, path in events),
        "opened what is no file": any(event == "open" and not regular(path) for event, path in events),
        "ran": any(event != "open" for event, _ in events),
        "wrote": sorted(os.listdir(folder)) != before,
        "memory": peak_memory.most() - start > MEMORY,
    }
    return [
        f"{name}: {what}: {text[:200]!r} {[e for e in events if e[0] != 'open']}"
        for what, is_so in wrong.items()
        if is_so
    ]


def inside(path: Any, folder: Path) -> bool:
    """A descriptor was opened by `os.open` before, which is an event of its own."""
    return isinstance(path, int) or Path(os.fsdecode(path)).parent == folder


def regular(path: Any) -> bool:
    """To open a device can do something."""
    return isinstance(path, int) or not os.path.lexists(path) or os.path.isfile(path)


@pytest.mark.unchecked  # the checker runs code of its own at a first call, and such is looked for
@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_folders_are_inert(family: str, template: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for secret in (tmp_path / "secret.safetensors", tmp_path / "blobs" / "secret"):
        secret.write_bytes((template / "config.json").read_bytes())
    messages = []
    for case in FAMILIES[family]:
        messages += faults(case, template, tmp_path)
        (tmp_path / "model").rename(tmp_path / f"met-{len(os.listdir(tmp_path))}")
    assert messages == []


@pytest.mark.unchecked
def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for path in (
        "",
        "nowhere",
        "a\0b",
        "\ud800",
        "x" * 5000,
        *(str(tmp_path / name) for name in ("file", "pipe", "none")),
    ):
        with pytest.raises(hf.ModelError, match=r"name is empty|no such folder; give one with config.json"):
            hf.checkpoint(path)
    for wrong in (None, 3, ["x"]):
        with pytest.raises(TypeError, match="a checkpoint is opened by its path; got"):
            hf.checkpoint(wrong)  # type: ignore[arg-type]


def test_these_are_many_and_each_is_another() -> None:
    names = [f"{family}: {name}" for family, cases in FAMILIES.items() for name, _, _ in cases]
    assert len(set(names)) == len(names) >= 150
    print(f"{len(names)} hostile folders")


def test_the_watch_sees_what_it_must(tmp_path: Path) -> None:
    """So that it cannot go blind."""
    (tmp_path / "x.py").write_text("1")
    with watched() as events:
        exec(compile((tmp_path / "x.py").read_text(), "x", "exec"))
        os.close(os.open(os.devnull, os.O_RDONLY))
        __import__("colorsys")
    assert {event for event, _ in events} >= {"compile", "exec", "open"}
    assert ("open", os.devnull) in events and not inside(os.devnull, tmp_path) and inside(tmp_path / "x.py", tmp_path)
