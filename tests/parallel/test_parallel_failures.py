"""A rank that ends, hangs, raises or disagrees: every other rank says which, and why, within the timeout."""

import re
from collections.abc import Callable, Iterator

import failing_cases
import pytest
import ranks

from headwise.parallel import RankError, RankMismatch

pytestmark = pytest.mark.slow

ENDED = "rank 1 has ended: its connection is closed"
CAUSES = {
    ("hangs", "before"): "rank 1 sent nothing for 4 s: it hangs, or is busy with other work",
    ("hangs", "within"): "rank 1 sent nothing for 4 s: it hangs, or is busy with other work",
    ("raises", "within"): "rank 1 raised MemoryError: planted: no memory",
    ("raises", "backward"): "rank 1 raised MemoryError: planted: no memory",
}


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> Iterator[None]:
    yield
    ranks.renew()


@pytest.mark.parametrize(
    ("how", "where"),
    [(failing_cases.die, ("before",)), (failing_cases.die, ("backward",)), (failing_cases.die_late, ())],
    ids=["before", "backward", "while one waits for another"],
)
def test_a_rank_that_ends_is_named_by_all_others(how: Callable[..., None], where: tuple[str, ...]) -> None:
    with ranks.Pool(3) as own, pytest.raises(ranks.RankError) as error:
        own.run(how, *where)
    said = [(text or "").strip().splitlines()[-1] for text in error.value.said]
    assert said[1] == "ended with exit code 7"
    for text in (said[0], said[2]):
        assert text.startswith("AssertionError: RankError: ") and text.endswith(ENDED), said


@pytest.mark.parametrize(("how", "where"), CAUSES)
def test_a_rank_that_hangs_or_raises_is_named_by_all_others_within_the_timeout(how: str, where: str) -> None:
    results = ranks.pool(3).run(failing_cases.fail, how, where)
    for text, seconds in (results[0], results[2]):
        assert text.startswith("RankError: ") and text.endswith(CAUSES[how, where]), results
        assert seconds < 10 * failing_cases.TIMEOUT  # the machine may be busy; the group's own timeout is 60 s
    if how == "raises":
        assert results[1][0] == "MemoryError: planted: no memory"


def test_a_rank_with_wrong_arguments_is_quoted_by_all_others() -> None:
    messages = ranks.pool(3).run(failing_cases.wrong_argument)
    assert messages[1].startswith("ValueError: scale"), messages
    for text in (messages[0], messages[2]):
        assert re.search(r"RankError: context_parallel: rank 1 raised: scale .* nan", text), messages


DISAGREE = {
    "shape": r"on the shape \(B, H, K, D, V\): rank 1 has \(1, 2, 2, 6, 6\), rank 0 has \(1, 2, 2, 4, 4\)",
    "dtype": r"on the dtype: rank 1 has torch.bfloat16, rank 0 has torch.float32",
    "mask": r"on the mask: rank 1 has \[\w+\] Band\(left=3, .*\), rank 0 has \[\w+\] Band\(left=4, ",
    "numbers of a mask": r"on the mask: rank 1 has \[\w+\] Segments\(\), rank 0 has \[\w+\] Segments\(\)",
    "sinks": r"on the sinks: rank 1 has \w+, rank 0 has \w+",
    "layout": r"on the layout: rank 1 has gather, rank 0 has ring",
    "order": r"on the order: rank 1 has 'join_sequence' as its operation \d+, rank 0 has 'context_parallel' as its",
    "gradients": r"on the gradients: rank 1 has \[True, True, True, False, False, False\], rank 0 has \[False, ",
}


def test_ranks_that_disagree_say_so_alike() -> None:
    results = ranks.pool(3).run(failing_cases.disagreements, list(DISAGREE))
    for on, text in DISAGREE.items():
        for one in results:
            assert re.search(rf"RankMismatch: .*: rank 1 does not agree with rank 0 {text}", one[on]), (on, results)
            assert one[on].endswith("every rank of the group makes the same calls with the same options")


def test_lengths_that_are_not_those_of_zigzag_are_refused_by_all() -> None:
    for one in ranks.pool(3).run(failing_cases.disagreements, ["zigzag"]):
        assert "rank 0 holds 6 queries where zigzag gives it 5 of 16; split with split_sequence(x, " in one["zigzag"]


def test_a_group_that_has_failed_is_not_used_again() -> None:
    results = ranks.pool(3).run(failing_cases.used_again)
    for first, second in results[1:]:
        assert "rank 0 sent nothing for 0.5 s" in first, results
        assert "this group has failed before (rank 0 sent nothing" in second, results


def test_sizes_are_agreed_on_before_anything_is_sent() -> None:
    for shapes, error in ranks.pool(2).run(failing_cases.short_message):
        assert shapes == "[(1, 3), (2, 3)]"
        assert error == (
            "sizes: rank 1 does not agree with rank 0 on the width: rank 1 has 4, rank 0 has 3; every rank of the "
            "group makes the same calls with the same options"
        )


def test_bytes_are_counted_by_kind() -> None:
    for counts in ranks.pool(3).run(failing_cases.counted):
        assert counts == [{"gather": 48}, {"scatter": 48}, {"reduce": 48}, {"all": 32}]


def test_errors_travel_between_processes() -> None:
    import pickle

    for kind in (RankError, RankMismatch):
        error = pickle.loads(pickle.dumps(kind("call", 3, "has ended")))
        assert (str(error), error.rank) == ("call: rank 3 has ended", 3)
    assert issubclass(RankMismatch, ValueError)
