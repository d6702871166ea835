"""`headwise.look.over` with a group: the sums, to the last bit, of one process; errors and ends reach every rank."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import many_cases
import numpy as np
import pytest
import ranks
import torch
from draw import drawn

from headwise.distributed.workers import Processes
from headwise.look import Look
from headwise.look.collect import corpus

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]


def same(a: Look, b: Look) -> bool:
    return replace(a, seconds=0.0) == replace(b, seconds=0.0)


def sums(state: Path) -> dict[str, Any]:
    with np.load(state) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "head"}


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `many_cases` changes in this process is put back; it has one thread, as ranks have: the bits follow that."""
    monkeypatch.setattr(corpus, "BLOCK", many_cases.BLOCK)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_sums_the_same_bits(world: int, tmp_path: Path) -> None:
    """The sums themselves, for records are rounded; of an encoder too, which some rank sees at one token alone."""
    for ahead in drawn((False, True), f"{world}"):
        one = many_cases.over(str(tmp_path / f"alone{ahead}"), ahead)
        assert one.kind == ("encoder" if ahead else "decoder") and one.texts == 41
        assert all(same(one, each) for each in ranks.pool(world).run(many_cases.over, str(tmp_path / "shared"), ahead))
        want, got = sums(tmp_path / f"alone{ahead}"), sums(tmp_path / "shared")
        assert want.keys() == got.keys()
        assert [name for name in want if not np.array_equal(want[name], got[name])] == []
        (tmp_path / "shared").unlink()


def test_a_state_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Three begin, two go on, one ends; each starts where the last has stopped."""
    state = str(tmp_path / "state")
    said = ranks.pool(3).run(many_cases.stopped, state, 16)
    assert said == ["Stop: enough", *["RuntimeError: Stop: enough"] * 2]
    said = ranks.pool(2).run(many_cases.stopped, state, 32)
    assert said == ["Stop: enough", "RuntimeError: Stop: enough"]
    assert many_cases.stopped(state, 16) == "nothing", "the first 32 texts are not read again"
    done = many_cases.over(str(tmp_path / "whole"))
    assert same(done, many_cases.over(state))
    want, got = sums(tmp_path / "whole"), sums(tmp_path / "state")
    assert [name for name in want if not np.array_equal(want[name], got[name])] == []


def test_a_process_looks_alone_unless_it_is_told_of_the_others() -> None:
    """In a group that exists for something else no other process is waited for."""
    looks = ranks.pool(2).run(many_cases.alone)
    assert same(looks[0], many_cases.over()) and looks[1] is None


FAULTS = {
    "name": "ValueError: rank 1 looks at another corpus, model, version or options than rank 0; start all processes "
    "alike, on the same files",
    "text": "ValueError: rank 1 has read other texts than rank 0 after the first 16; give all",
    "fewer": "ValueError: rank 1 has read other texts than rank 0 after the first 16; give all",
    "id": "ValueError: rank 1: ids of this model are 0 to 60; got 61",
    "nan": "ValueError: rank 1: layer 1 ('two') has scores that are NaN or infinite in float32; load",
    "weights": "ValueError: rank 1 looks at another corpus, model, version or options than rank 0",
    "code": "TypeError: rank 1: ids are the integers a tokenizer gives",
    "all": "ValueError: ids of this model are 0 to 60; got 61",
    "state": "state: not the state of this look (",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_process_raises_all_do(fault: str, tmp_path: Path) -> None:
    said = ranks.pool(2).run(many_cases.different, fault, str(tmp_path))
    assert FAULTS[fault] in said[1], said
    assert said[0].removeprefix("ValueError: ") in said[1] or said[0] == said[1], said


@pytest.mark.parametrize(("rank", "ended"), [(0, True), (1, True), (1, False)])
def test_a_process_that_ends_or_hangs_is_named(rank: int, ended: bool, tmp_path: Path) -> None:
    """By every other; the third waits for the first while that waits for the second."""
    said = ranks.pool(3).run(many_cases.without, rank, ended, tmp_path.name)
    what = "has ended" if ended else "does not answer"
    want = f"LostProcess: rank {rank} of 3 {what}; saved results are kept: restart all processes"
    assert [text for one, text in enumerate(said) if one != rank] == [want] * 2, said


def test_bytes_of_any_length_arrive() -> None:
    for size in (0, 1, 100_003):
        want = b"".join(bytes([rank, (size * rank + 1) % 251]) for rank in range(3))
        assert ranks.pool(3).run(many_cases.exchanged, size) == [want] * 3


def test_an_error_names_a_file_whose_name_is_no_text() -> None:
    assert ranks.pool(2).run(many_cases.said_of_a_name) == ["rank 1: a\udcff.txt: no such file"] * 2


@pytest.mark.parametrize(("name", "least"), [("WORLD_SIZE", 1), ("RANK", 0)])
def test_what_the_environment_says_of_processes_is_a_number(
    name: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for said in ("abc", "", "-1", "1.5", "9" * 50):
        monkeypatch.setenv(name, said)
        with pytest.raises(ValueError, match=f"^{name} is a whole number of at least {least}, as torchrun sets it; "):
            Processes.here()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Processes.here() == Processes()


def test_a_rank_beyond_the_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_: pytest.fail("it waits for all others"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match=r"^RANK is less than WORLD_SIZE.*got RANK = 2, WORLD_SIZE = 2; start them"):
        Processes.here()


def test_a_part_of_the_processes() -> None:
    outside, *inside = ranks.pool(3).run(many_cases.subgroup)
    assert inside == [bytes([11, 12])] * 2
    assert outside == (
        "group is a torch.distributed process group that this process is in, or None; got a group that this process "
        "is not in"
    )


def test_a_group_is_a_group() -> None:
    with pytest.raises(TypeError, match=r"group is a .* process group that this process is in, or None; got str"):
        Processes.of("world")  # type: ignore[arg-type]


def test_processes_that_have_a_model_together_read_the_same_texts() -> None:
    """Two and two ranks of four: each two share the heads, and the pairs share the texts."""
    for record, want in ranks.pool(4).run(many_cases.split, False):
        assert (record.texts, record.length, len(record.heads)) == (want.texts, want.length, 10)
        for a, b in zip(record.heads, want.heads, strict=True):
            assert (a.layer, a.head, a.module) == (b.layer, b.head, b.module)
            assert a.entropy == pytest.approx(b.entropy, abs=2e-5) and a.offsets == pytest.approx(b.offsets, abs=2e-5)
            assert {n: s.count for n, s in a.scores.items()} == {n: s.count for n, s in b.scores.items()}
    refused = [record for record, _ in ranks.pool(4).run(many_cases.split, True)]
    for rank, text in enumerate(refused):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert f"of one.q_proj.weight ranks {pair} have a part each, and read all texts together: give the" in text


def test_the_command_shares_a_corpus_and_one_process_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = random.Random(5)
    (tmp_path / "texts").mkdir()
    for n in range(23):
        (tmp_path / "texts" / f"{n:02}.txt").write_text("".join(make.choices("abcdefgh", k=make.choice([5, 13, 47]))))
    arguments = ("any", "--corpus", "texts", "--json", "--needles", "--out", "heads.csv")
    monkeypatch.chdir(tmp_path)  # `command` leaves the folder that it works in
    code, alone, _ = many_cases.command(str(tmp_path), *arguments)
    assert code == 0, alone
    table = (tmp_path / "heads.csv").read_bytes()
    (tmp_path / "heads.csv").unlink()
    first, other = ranks.pool(2).run(many_cases.command, str(tmp_path), *arguments)
    assert (first[0], other) == (0, (0, "", "")), first
    want, got = json.loads(alone), json.loads(first[1])
    assert want["texts"] > 23 and {**want, "seconds": 0} == {**got, "seconds": 0}
    assert (tmp_path / "heads.csv").read_bytes() == table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.csv", "texts"], "the state has gone"


WRONG = {
    "one text": (
        ("--text", "a"),
        "torchrun started 2 processes, which share a --corpus; give --corpus, or start headwise",
    ),
    "no corpus": (("--corpus", "none"), "--corpus none: no such file or folder"),
    "no folder": (("--corpus", "texts", "--out", "none/a.csv"), "rank 0: cannot write none/a.csv: its folder does not"),
    "no text": (("--corpus", "texts"), "texts: no *.txt and no *.jsonl below it; give a folder of texts"),
    "state": (("--corpus", "a.txt", "--state", "a.txt"), "a.txt: not the state of this look ("),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_is_one_line_and_exit_code_2_in_all(wrong: str, tmp_path: Path) -> None:
    arguments, text = WRONG[wrong]
    (tmp_path / "texts").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    ends = ranks.pool(2).run(many_cases.command, str(tmp_path), "any", *arguments)
    assert [code for code, _, _ in ends] == [2, 2] and not any(out for _, out, _ in ends), ends
    [line] = [err for _, _, err in ends if err]
    assert line.startswith("headwise: ") and text in line and line.count("\n") == 1, line
