"""The ledger of mutants fits the tree, and its runner tells a fault that a test notices from one that it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutants as runner  # noqa: E402
from mutants_ledger import Mutant, draw, faults, read  # noqa: E402

ROOMS = "cache cli csrc hf look native nn ops plan report shapes testing"

# A project of its own, with faults of every fate.
FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\naddopts = "--import-mode=importlib"\n',
    "src/fake/__init__.py": '''"""Fake."""
import os
import sys

LIMIT = 7
FACTOR = 2  # of double


def double(x):
    return FACTOR * x


def unseen(x):
    return x + 3


def value():
    return 5


def end():
    sys.stdout.flush()
''',
    "tests/fake/test_fake.py": """import subprocess
import sys

import fake
import pytest


@pytest.fixture
def five():
    assert fake.value() == 5
    return 5


def test_double():
    assert fake.double(3) == 6


def test_in_a_process():
    told = subprocess.run([sys.executable, "-c", "import fake; print(fake.double(4))"], capture_output=True, text=True)
    assert told.stdout == "8\\n"


@pytest.mark.parametrize("x", [1, 2])
def test_unseen(x):
    fake.unseen(x)


def test_end():
    fake.end()


def test_with_fixture(five):
    assert five


def test_wrong_anyway():
    assert fake.LIMIT == 8


def test_skips():
    pytest.skip("there is no such machine")


class TestLimit:
    def test_limit(self):
        assert fake.LIMIT == 7
""",
}
FAKE, TEST = "src/fake/__init__.py", "tests/fake/test_fake.py::"
FATES: dict[str, list[tuple[str, str, str, str]]] = {
    "killed": [
        (FAKE, "FACTOR = 2", "FACTOR = 3", "test_double"),
        (FAKE, "FACTOR * x", "FACTOR + x", "test_in_a_process"),
        (FAKE, "LIMIT = 7", "LIMIT = 9", "TestLimit::test_limit"),
    ],
    "survived": [(FAKE, "x + 3", "x - 3", "test_unseen"), (FAKE, "x + 3", "x * 3", "test_unseen[2]")],
    "crashed": [(FAKE, "sys.stdout.flush()", "os.abort()", "test_end")],
    "not run": [(FAKE, "return 5", "return 7", "test_skips")],
    "proves nothing": [
        (FAKE, "import sys", "import nosuch", "test_double"),
        (FAKE, "return 5", "return 6", "test_with_fixture"),
        (FAKE, "LIMIT = 7", "LIMIT = 6", "test_wrong_anyway"),
        (FAKE, "x + 3", "x / 3", "test_unseen[3]"),
    ],
}


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake projects need none, and loading them takes half of the time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def mutant(file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(file, old, new, TEST + test)


def ledger_of(mutants: list[Mutant]) -> str:
    return "\n".join("[[mutant]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in vars(x).items()) for x in mutants)


def project(folder: Path, mutants: list[Mutant], files: dict[str, str] = FILES) -> Path:
    for name, text in {**files, "tests/fake/mutants.toml": ledger_of(mutants)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fates(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a run."""
    code = runner.main(["--root", str(root), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


# The ledger of this tree


def test_the_ledger_fits_the_tree() -> None:
    mutants = read(ROOT)
    assert faults(mutants, ROOT) == []
    assert set(ROOMS.split()) <= {mutant.room for mutant in mutants}


@pytest.mark.parametrize(
    "change, why",
    [
        ({"old": "FACTOR = 5"}, "its old text must occur once in the file and occurs 0 times"),
        ({"old": "return"}, "occurs 3 times"),
        ({"old": ""}, "occurs 0 times"),
        ({"new": "FACTOR = 2"}, "its new text is the old one"),
        ({"new": "FACTOR = ="}, "is no Python: invalid syntax"),
        ({"file": "src/fake/other.py"}, "no such file"),
        ({"file": "../outside.py"}, "no such file"),
        ({"test": TEST + "test_doubled"}, "there is no test tests/fake/test_fake.py::test_doubled"),
        ({"test": TEST + "test_limit"}, "there is no test tests/fake/test_fake.py::test_limit"),
        ({"test": "tests/fake/test_other.py::test_double"}, "there is no test tests/fake/test_other.py::test_double"),
        ({"test": "tests/fake/test_fake.py"}, "there is no test tests/fake/test_fake.py"),
    ],
)
def test_an_entry_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], why: str
) -> None:
    (tmp_path / "outside.py").write_text("FACTOR = 2")
    fits = mutant(*FATES["killed"][0])
    root = project(tmp_path / "root", [fits, replace(fits, **change)])
    (fault,) = faults(read(root), root)
    assert why in fault
    assert runner.main(["--root", str(root)]) == 1
    assert capsys.readouterr().err == f"mutants: {fault}\n"


def test_an_entry_twice(tmp_path: Path) -> None:
    entries = [mutant(*FATES["killed"][0])] * 2
    assert faults(entries, project(tmp_path, entries)) == [f"{entries[0]}: is there 2 times"]


@pytest.mark.parametrize("text", ['[[mutant]]\nfile = "a"', "[[mutant]", "[[mutant]]\nfile=1\nold=1\nnew=2\ntest=3"])
def test_a_malformed_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    project(tmp_path, [])
    (tmp_path / "tests/fake/mutants.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        runner.main(["--root", str(tmp_path)])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_an_entry_of_another_rooms_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = project(tmp_path, [Mutant(FAKE, "LIMIT = 7", "LIMIT = 9", "tests/other/test_fake.py::test_double")])
    with pytest.raises(SystemExit):
        runner.main(["--root", str(root)])
    said = "tests/fake/mutants.toml: mutant 1 belongs beside its test, tests/other/test_fake.py::test_double"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "file, room",
    [
        ("src/headwise/nn/rotary.py", "nn"), ("src/headwise/cli.py", "cli"),
        ("src/headwise/ops/masks/mask.py", "ops"),
        ("src/headwise/ops/native/library.py", "native"), ("src/headwise/ops/native/library.py", "native"),
        ("csrc/isa/avx2.h", "csrc"), ("scripts/mutants.py", "scripts"), ("src/headwise/plan/cards.json", "plan"),
    ],
)  # fmt: skip
def test_the_room_of_a_file(file: str, room: str) -> None:
    assert mutant(file, "", "", "").room == room


def test_a_sample() -> None:
    """The same for a seed, another for another, with C++ only if there are too few of Python."""
    files = ["csrc/a.h"] * 61 + ["src/fake/b.py"] * 59
    mutants = [mutant(file, str(n), "", "") for n, file in enumerate(files)]
    drawn = draw(mutants, 10, "seed")
    assert drawn == draw(mutants, 10, "seed") != draw(mutants, 10, "another")
    assert len(set(drawn)) == 10 and not any(x.is_native for x in drawn)
    assert len({x for seed in range(60) for x in draw(mutants, 10, str(seed))}) == 59
    assert sum(x.is_native for x in draw(mutants[-4:] + mutants[:9], 10, "seed")) == 6


# The runner


@pytest.mark.slow
def test_every_fate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = project(tmp_path, [mutant(*fate) for some in FATES.values() for fate in some])
    before = content(root)
    code, report = fates(capsys, root)
    expected = sorted((*fate[:3], verdict) for verdict, some in FATES.items() for fate in some)
    assert sorted((x["file"], x["old"], x["new"], x["verdict"]) for x in report["mutants"]) == expected
    assert code == 1 and content(root) == before
    counts = {"killed": 4, "survived": 2, "of": 10, "not run": 1}
    assert report["rooms"] == {"__init__": counts, "all": counts} and report["seed"] is None
    why = {x["new"]: x["detail"] for x in report["mutants"]}
    assert why["FACTOR = 3"] == "tests/fake/test_fake.py::test_double - assert 9 == 6"
    assert why["LIMIT = 6"].startswith("fails without the mutant: killed tests/fake/test_fake.py::test_wrong_anyway")
    assert why["x / 3"].startswith("fails without the mutant: proves nothing pytest ends with exit code 4")
    assert why["import nosuch"].startswith("pytest ends with exit code ")
    assert why["return 6"].startswith("pytest ends with exit code 1 and no failed test: ")
    assert "1 skipped" in why["return 7"] and why["os.abort()"] == "SIGABRT"


@pytest.mark.slow
def test_all_killed_is_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = project(tmp_path, [mutant(*fate) for fate in FATES["killed"]])
    assert runner.main(["--root", str(root), "--jobs", "1", "--sample", "2"]) == 0
    output = capsys.readouterr()
    assert "2 mutants drawn by --seed 0" in output.err and "100 %" in output.out


def test_a_survivor_is_told_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = project(tmp_path, [mutant(*FATES["survived"][0])])
    assert runner.main(["--root", str(root), "--only", FAKE]) == 1
    assert capsys.readouterr().out.endswith(
        "survived: src/fake/__init__.py: 'x + 3' -> 'x - 3'\n  test: tests/fake/test_fake.py::test_unseen\n"
    )


def test_a_selection_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**FILES, "src/fake/nn/a.py": "A = 1\n"}
    root = project(tmp_path, [mutant(*FATES["killed"][0]), mutant("src/fake/nn/a.py", "1", "2", "test_double")], other)
    assert runner.main(["--root", str(root), "--only", "nn", "--list"]) == 0
    assert capsys.readouterr().out == "nn: src/fake/nn/a.py: '1' -> '2'\n    tests/fake/test_fake.py::test_double\n"
    with pytest.raises(SystemExit) as ended:
        runner.main(["--root", str(root), "--only", "cache"])
    assert ended.value.code == 2 and "--only names no room or file" in capsys.readouterr().err


def test_a_timeout_counts_and_is_named(tmp_path: Path) -> None:
    """No test ends in so little time; without a mutant that proves nothing."""
    root = project(tmp_path / "root", [])
    copy = runner.Copy(root, tmp_path / "copy", runner.Processes(), 0.01)
    assert copy.verdict(mutant(*FATES["killed"][0])) == ("timed out", "")
    assert "timed out" in runner.KILLED
    why = "fails without the mutant: timed out "
    assert copy.clean([TEST + "test_double"], native=False) == {TEST + "test_double": why}


def test_equal_size_in_the_same_second(tmp_path: Path) -> None:
    """What Python compiled before and after is never taken for the mutant, or the mutant for it."""
    copy = runner.Copy(project(tmp_path / "root", []), tmp_path / "copy", runner.Processes(), 60)
    path, node = copy.folder / FAKE, TEST + "test_double"
    os.utime(path, (10**9, 10**9))
    assert copy.clean([node], native=False) == {} and list(path.parent.glob("__pycache__/*"))
    write = Path.write_text

    def in_one_second(self: Path, *args: Any) -> int:
        size = write(self, *args)
        os.utime(self, (10**9, 10**9))
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", in_one_second)
        assert copy.verdict(mutant(*FATES["killed"][0]))[0] == "killed"
    assert copy.test(node).code == 0


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Neither what a test has started, nor the copies."""
    waits = """import os, pathlib, time


def test_waits():
    pathlib.Path(os.environ["STARTED"]).write_text(str(os.getpid()))
    time.sleep(300)
"""
    files = {**FILES, "tests/fake/test_fake.py": waits}
    root = project(tmp_path / "root", [mutant(*FATES["killed"][0][:3], "test_waits")], files)
    started, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "STARTED": str(started), "TMPDIR": str(temporary)}
    command = [sys.executable, ROOT / "scripts" / "mutants.py", "--root", root]
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    while not (started.exists() and started.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert list(temporary.iterdir())
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130 and message.endswith("mutants: stopped after 0 of 1\n")
    assert not list(temporary.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
