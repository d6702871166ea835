"""`headwise.look.over`: many texts, in any order and in parts, give the sums of each."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from planted import DELIMITERS, VOCABULARY, Tiny, text

import headwise
from headwise import look
from headwise.look import Look, Vocabulary
from headwise.look.collect import corpus
from headwise.look.collect import resume as identity
from headwise.look.collect.corpus import cut, documents
from headwise.look.collect.forward import batches
from headwise.look.collect.resume import load

WORDS = Vocabulary(frozenset(DELIMITERS))


@pytest.mark.parametrize("name", [one.name for one in fields(Vocabulary)])
def test_a_state_knows_what_the_ids_are(name: str) -> None:
    other = replace(WORDS, **{name: frozenset({5, 7})})
    one, two = (identity.fingerprint("tiny", None, words, {}, [1, 2]) for words in (WORDS, other))
    assert one != two and one == identity.fingerprint("tiny", None, replace(WORDS), {}, [1, 2])


def test_a_state_knows_what_else_was_read() -> None:
    """Not the kinds of readings alone: their contents."""
    passages = [
        look.Passage([5, 6, 7], links={"retrieval": [[], [0], []]}),
        look.Passage([5, 6, 8], links={"retrieval": [[], [0], []]}),
        look.Passage([5, 6, 7], links={"retrieval": [[], [], [0]]}),
        look.Passage([5, 6, 7], classes={"noun": [1]}),
        look.Passage([5, 6, 7], text=1),
    ]
    lists = [[], *([one] for one in passages), passages[:2], passages[1::-1]]
    prints = [identity.fingerprint("tiny", None, WORDS, {"needles": some}, [1, 2]) for some in lists]
    assert len({*prints}) == len(lists)
    again = look.Passage((5, 6, 7), links={"retrieval": ([], (0,), ())})
    assert identity.fingerprint("tiny", None, WORDS, {"needles": [again]}, [1, 2]) == prints[1]


def test_a_state_knows_how_roles_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds are held against the sums at the end, so another one mixes nothing."""
    one, roles = identity.fingerprint("tiny", None, WORDS, {}, [1]), identity.ROLES
    for change, same in (({"threshold": 0.9}, True), ({"formula": "other"}, False), ({"reads": "needles"}, False)):
        monkeypatch.setattr(identity, "ROLES", (replace(roles[0], **change), *roles[1:]))
        assert (identity.fingerprint("tiny", None, WORDS, {}, [1]) == one) is same, change


class Config:
    def __init__(self, **values: object) -> None:
        self.values = {"_name_or_path": object(), "window": None, "dtype": "float32"} | values

    def to_dict(self) -> dict[str, object]:
        return self.values


def test_a_state_knows_its_model_by_weights(tmp_path: Path) -> None:
    """Another model of the same name, such as a later checkpoint in the same folder."""
    texts, state, other = drawn(5), tmp_path / "state", model()
    one, again = (look.over(model(), texts, words=WORDS, name="tiny", state=state) for _ in range(2))
    assert same(one, again)
    with torch.no_grad():
        [*other.parameters()][-1].view(-1)[-1] += 0.5
    with pytest.raises(ValueError, match=r"\(another model \(by name, configuration or weights\), version, or other"):
        look.over(other, texts, words=WORDS, name="tiny", state=state)


def test_what_a_model_is_known_by() -> None:
    plain, named = model(), model()
    named.config = Config()  # type: ignore[assignment]
    assert identity.of_model(plain) == identity.of_model(model()) != identity.of_model(named)
    for change, other in (({"dtype": "x"}, False), ({"_name_or_path": 3}, False), ({"window": 5}, True)):
        one = model()
        one.config = Config(**change)  # type: ignore[assignment]
        assert (identity.of_model(one) != identity.of_model(named)) is other, change
    layers = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).bfloat16(), torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)]
    assert len({*map(identity.of_model, layers)}) == 4
    with torch.no_grad():
        layers[0].weight.copy_(layers[0].weight.flip(0))
    assert len({*map(identity.of_model, layers)}) == 4
    before = identity.of_model(layers[3])
    layers[3].running_mean += 1  # type: ignore[operator,union-attr]
    assert identity.of_model(layers[3]) != before


def drawn(count: int, seed: int = 0) -> list[list[int]]:
    make = random.Random(seed)
    return [[1, *make.choices(range(VOCABULARY), k=make.choice([2, 7, 12, 28]))] for _ in range(count)]


def model() -> Tiny:
    return Tiny(mask=headwise.causal())


def same(a: Look, b: Look) -> bool:
    return replace(a, seconds=0.0) == replace(b, seconds=0.0)


def test_one_text_is_what_at_reads() -> None:
    one = look.at(model(), text(), delimiters=DELIMITERS, full_maps=False)
    over = look.over(model(), [text()], words=WORDS)
    assert same(replace(one, tokens=()), replace(over, tokens=()))


def test_means_are_over_all_queries_of_all_texts() -> None:
    texts = drawn(13)
    record = look.over(model(), texts, words=WORDS, repeats=None)
    assert (record.texts, record.length, record.tokens) == (13, sum(map(len, texts)), ())
    alone = [look.at(model(), ids, delimiters=DELIMITERS, repeats=None) for ids in texts]
    for n, head in enumerate(record.heads):
        for name in ("previous-token", "first-token sink", "delimiter", "broad", "local band"):
            each = [one.heads[n].scores[name] for one in alone if name in one.heads[n].scores]
            count = sum(score.count for score in each)
            mean = sum(score.value * score.count for score in each) / count
            score = head.scores[name]
            assert score.count == count and score.value == pytest.approx(mean, abs=2e-6)
            assert score.low is not None and score.high is not None and score.low <= score.value <= score.high
        rows = sum(map(len, texts))
        assert head.entropy == pytest.approx(sum(one.heads[n].entropy * one.length for one in alone) / rows, abs=2e-6)


@pytest.mark.slow
def test_order_and_batches_change_no_bit() -> None:
    texts = drawn(31)
    whole = look.over(model(), texts, words=WORDS, repeats=None)
    for batch in (1, 64, 100_000):
        assert same(whole, look.over(model(), texts, words=WORDS, repeats=None, batch=batch))
    other = look.over(model(), texts[::-1], words=WORDS, repeats=None)
    for a, b in zip(whole.heads, other.heads, strict=True):
        assert (a.entropy, a.offsets, a.map) == (b.entropy, b.offsets, b.map)
        assert {n: (s.value, s.null, s.count) for n, s in a.scores.items()} == {
            n: (s.value, s.null, s.count) for n, s in b.scores.items()
        }


def test_batches_keep_to_their_tokens() -> None:
    passages = [look.Passage([1] * n) for n in (3, 5, 3, 3, 7, 3, 5)]
    groups = [*batches(passages, 8)]
    assert sorted(len(one.ids) for some in groups for one in some) == [3, 3, 3, 3, 5, 5, 7]
    for some in groups:
        assert len({len(one.ids) for one in some}) == 1
        assert sum(len(one.ids) for one in some) <= 8 and len(some) <= 2


def test_at_most_256_passages_wait() -> None:
    """Beyond that the batch of most tokens goes first, whatever its number of passages; none is lost."""
    read = 0

    def reading() -> Iterator[look.Passage]:
        nonlocal read
        for n in range(600):
            read += 1
            yield look.Passage([1] * (7 if n % 2 else 11 + n), text=n)

    done, first = 0, True
    seen: list[int] = []
    for some in batches(reading(), 10**9):
        assert read - done <= 256 and len({len(one.ids) for one in some}) == 1
        if first:  # 128 of 7 tokens, and one each of 11 to 265
            assert (read, len(some), len(some[0].ids)) == (256, 128, 7)
            first = False
        elif read < 600:
            assert len(some) * len(some[0].ids) == max(
                [11 + n for n in range(0, read, 2) if n not in seen]
                + [7 * sum(n not in seen for n in range(1, read, 2))]
            )
            assert read - done == 256, "a batch goes before it must"
        done += len(some)
        seen += [one.text for one in some]
        assert [one.text for one in some] == sorted(one.text for one in some)
    assert sorted(seen) == [*range(600)]


def test_full_batches_make_room_for_those_that_wait() -> None:
    """300 passages of which never more than 200 wait at once: each batch goes when it is full, not before."""
    passages = [look.Passage([1] * (2 if n < 200 else 3), text=n) for n in range(300)]
    assert [len(some) for some in batches(passages, 2 * 100)] == [100, 100, 66, 34]


def test_a_second_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK", 16)
    texts = drawn(41)
    state = tmp_path / "state"

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done == 16:
            raise Stop

    with pytest.raises(Stop):
        look.over(model(), texts, words=WORDS, state=state, progress=stop)
    read: list[int] = []
    record = look.over(model(), texts, words=WORDS, state=state, progress=lambda done, total: read.append(done))
    assert read == [32, 41]  # the first block was not read again
    assert same(record, look.over(model(), texts, words=WORDS))
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    with pytest.raises(ValueError, match=r"state: not the state of this look \(another model \(by name"):
        look.over(model(), texts, words=Vocabulary(), state=state)
    state.write_bytes(state.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"state: not the state of this look \(.*\); remove it to begin anew"):
        look.over(model(), texts, words=WORDS, state=state)


def test_a_state_that_cannot_be_written_is_told_before_a_text_is_read(tmp_path: Path) -> None:
    passes: list[object] = []
    watched = model()
    watched.register_forward_hook(lambda *_: passes.append(1))
    with pytest.raises(FileNotFoundError, match=r"cannot write .*: its folder does not exist"):
        look.over(watched, drawn(3), words=WORDS, state=tmp_path / "none" / "state")
    assert not passes


def test_a_role_needs_its_interval_above_chance() -> None:
    """A head that plays a role in few of many texts does not play it."""
    sums = look.collect.sums.RoleSums.empty(2)
    for n in range(40):
        sums.add([n], [[6.0, 10.0 * (n % 2)]], [[10, 10]], [[4.9, 0.0]])
    low, high = sums.interval() or pytest.fail("no interval")
    value, null, _, count = sums.means()
    assert value.tolist() == [0.6, 0.5] and null[0] == pytest.approx(0.49) and count.tolist() == [400, 400]
    assert low[0] == high[0] == pytest.approx(0.6) and low[1] == pytest.approx(0.35, abs=0.05)


def test_texts_of_one_group_that_come_together_all_count() -> None:
    sums = look.collect.sums.RoleSums.empty(2)
    groups = [5, 6, 5 + look.collect.sums.GROUPS]
    sums.add(groups, [[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]], [[2, 3], [5, 7], [11, 13]], None)
    one = look.collect.sums.UNIT
    assert (sums.ints[:2, 5] / one).tolist() == [[8.0, 13.0], [13.0, 16.0]] and not sums.has_null
    assert (sums.ints[:2, 6] / one).tolist() == [[3.0, 5.0], [5.0, 7.0]] and not sums.ints[2:].any()


def test_what_a_call_is_of_does_not_depend_on_the_text_that_was_first() -> None:
    """One token does not show whether queries look ahead, nor two texts of one length that they are two."""
    for parts, part in ((("decoder", "encoder"), "encoder"), (("encoder", "cross", "decoder"), "cross")):
        for order in (parts, parts[::-1]):
            tallies = [look.collect.sums.LayerTally({"module": "a", "call": 0, "part": one}, 3) for one in order]
            for other in tallies[1:]:
                tallies[0].merge(other)
            assert tallies[0].place["part"] == part
    one = look.collect.sums.LayerTally({"module": "a", "call": 0, "part": "decoder"}, 3)
    with pytest.raises(ValueError, match=r"looks merge call by call; got .* with 3 heads where .* with 3 stands"):
        one.merge(look.collect.sums.LayerTally({"module": "b", "call": 0, "part": "decoder"}, 3))


def test_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second\n", "utf8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl").write_text(
        json.dumps({"text": "first"}) + '\n\n"as a string"\n{"text": " "}\n', "utf8"
    )
    (tmp_path / "c.md").write_text("no text", "utf8")
    assert [*documents(tmp_path)] == ["first", "as a string", "second\n"]
    assert [*documents(tmp_path / "b.txt")] == ["second\n"]
    bad = tmp_path / "bad.jsonl"
    for line, message in (("{", "bad.jsonl:1: not JSON; write an object"), ('{"x": 1}', 'no "text" in it that is a')):
        bad.write_text(line, "utf8")
        with pytest.raises(ValueError, match=re.escape(message)):
            [*documents(bad)]
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 0\); convert it first"):
        [*documents(bad)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no \*.txt and no \*.jsonl below it"):
        [*documents(tmp_path / "empty")]


def test_a_device_without_end_is_not_read() -> None:
    with pytest.raises(ValueError, match=r"^/dev/zero: a device, and a corpus is a file or a folder of texts; give"):
        next(documents("/dev/zero"))
    with pytest.raises(ValueError, match=r"^/dev/zero: not the state of this look \(it is no regular file\)"):
        load("/dev/zero", "a look")


def test_long_texts_are_cut() -> None:
    with pytest.raises(ValueError, match="most is at least 2; got 1"):
        next(cut([5, 6, 7], 1))
    assert [*cut([1, 2, 3], 5)] == [[1, 2, 3]]
    assert [*cut([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    assert [*cut([9, 1, 2, 3], 3, opener=9)] == [[9, 1, 2], [9, 3]]


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ([], ValueError, "look.over needs at least one text; got none"),
        ("text", TypeError, "texts are token ids, a list for each text; got 'text'"),
        ([[1, 2], [1, 61]], ValueError, "ids of this model are 0 to 60; got 61"),
        ([[1, 2], []], ValueError, "look needs at least one token"),
    ],
)
def test_errors(texts: list[list[int]], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        look.over(model(), texts)
