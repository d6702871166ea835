"""A rank that ends, hangs, raises or disagrees: every other rank says which, and why, within the timeout."""

import re
import time

import failing_cases
import pytest
import ranks

from headwise.parallel import RankError, RankMismatch

HUNG = "rank 1 sent nothing for 3 s: it hangs, or does something else"
ENDED = "rank 1 has ended: its connection is closed"


def said(function: object, *arguments: object, world: int = 3) -> list[str]:
    """The last line of what each rank said."""
    with ranks.Pool(world) as own, pytest.raises(ranks.RankError) as error:
        own.run(function, *arguments, patience=25)  # type: ignore[arg-type]
    return [(text or "").strip().splitlines()[-1] if text else "" for text in error.value.said]


@pytest.mark.parametrize("where", ["before", "within", "backward"])
def test_a_rank_that_ends_is_named_by_all_others(where: str) -> None:
    told = said(failing_cases.die, 1, where)
    assert told[1] == "ended with exit code 7"
    for text in (told[0], told[2]):
        assert text.startswith("headwise.parallel.errors.RankError: ") and text.endswith(ENDED), told


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_rank_that_hangs_is_named_by_all_others_within_the_timeout(where: str) -> None:
    with ranks.Pool(3) as own:
        for pipe in own._pipes:
            pipe.send((failing_cases.hang, (1, where)))
        start = time.monotonic()
        told = [own._answer(rank, 20)[0] or "" for rank in (0, 2)]
        assert time.monotonic() - start < 15  # of a timeout of 3 s, on a machine that may be busy
    for text in told:
        assert text.strip().splitlines()[-1].endswith(HUNG), told


def test_a_rank_that_raises_is_quoted_by_all_others() -> None:
    told = said(failing_cases.raises, 1, "before")
    assert told[1].startswith("ValueError: scale"), told
    for text in (told[0], told[2]):
        assert re.search(r"RankError: context_parallel: rank 1 raised: scale .* nan", text), told


def test_a_rank_that_raises_within_is_named() -> None:
    told = said(failing_cases.raises, 1, "within")
    assert told[1] == "MemoryError: planted: no memory"
    for text in (told[0], told[2]):
        assert "rank 1 raised MemoryError: planted: no memory" in text, told


DISAGREE = {
    "shape": r"on the shape \(B, H, K, D, V\): rank 1 has \(1, 2, 2, 6, 6\), rank 0 has \(1, 2, 2, 4, 4\)",
    "dtype": r"on the dtype: rank 1 has torch.bfloat16, rank 0 has torch.float32",
    "mask": r"on the mask: rank 1 has Band\(left=3, .*\) \[\w+\], rank 0 has Band\(left=4, ",
    "numbers of a mask": r"on the mask: rank 1 has Segments\(\) \[\w+\], rank 0 has Segments\(\) \[",
    "sinks": r"on the sinks: rank 1 has \w+, rank 0 has \w+",
    "layout": r"on the layout: rank 1 has gather, rank 0 has ring",
    "order": r"on the order: rank 1 has 'join_sequence' as its operation 1, rank 0 has 'context_parallel' as its",
    "gradients": r"on the gradients: rank 1 has \[True, True, True\], False, False, rank 0 has \[False, ",
}


def test_ranks_that_disagree_say_so_alike() -> None:
    for on, text in DISAGREE.items():
        told = said(failing_cases.disagree, on)
        for one in told:
            assert re.search(rf"RankMismatch: .*: rank 1 does not agree with rank 0 {text}", one), (on, told)
            assert one.endswith("every rank of the group makes the same calls with the same options")


def test_lengths_that_are_not_those_of_zigzag_are_refused_by_all() -> None:
    told = said(failing_cases.disagree, "zigzag")
    for text in told:
        assert "rank 0 holds 5 queries where zigzag gives it 4 of 13; split with split_sequence(x, order=" in text, told


def test_a_group_that_has_failed_is_not_used_again() -> None:
    told = said(failing_cases.twice)
    assert all("this group has failed before (rank 0 sent nothing" in text for text in told[1:]), told


def test_sizes_are_agreed_on_before_anything_is_sent() -> None:
    for shapes, error in ranks.pool(2).run(failing_cases.short_message):
        assert shapes == "[(1, 3), (2, 3)]"
        assert error == (
            "sizes: rank 1 does not agree with rank 0 on the width: rank 1 has 4, rank 0 has 3; every rank of the group "
            "makes the same calls with the same options"
        )


def test_bytes_are_counted_by_kind() -> None:
    for told in ranks.pool(3).run(failing_cases.counted):
        assert told == [{"gather": 48}, {"scatter": 48}, {"reduce": 48}, {"all": 32}]


def test_errors_travel_between_processes() -> None:
    import pickle

    for kind in (RankError, RankMismatch):
        error = pickle.loads(pickle.dumps(kind("call", 3, "has ended")))
        assert (str(error), error.rank) == ("call: rank 3 has ended", 3)
    assert issubclass(RankMismatch, ValueError)
