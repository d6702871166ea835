"""The pool of ranks that distributed tests use: it answers for each rank, and says which failed, and how."""

import os

import fresh
import pytest
import rank_cases
import ranks

pytestmark = pytest.mark.slow


def test_each_rank_answers():
    assert ranks.pool(2).run(rank_cases.total, 2.0) == [6.0, 6.0]


def test_a_rank_that_raises_or_dies_is_named_and_the_pool_goes_on():
    with ranks.Pool(2) as own:
        with pytest.raises(ranks.RankError, match=r"(?s)rank 1: .*planted on 1") as error:
            own.run(rank_cases.fail_on, 1)
        assert error.value.said[0] is None
        with pytest.raises(ranks.RankError, match=r"rank 0: ended with exit code 7"):
            own.run(rank_cases.die_on, 0)
        assert own.run(rank_cases.total, 1.0) == [3.0, 3.0]


def test_a_forked_process_has_our_environment_and_shares_what_its_server_imported():
    code = "import gc, os, sys; print(repr(os.environ.get('PYTHONPATH', '')), gc.get_freeze_count() > 10**5)"
    assert fresh.run(code).stdout == f"{os.environ.get('PYTHONPATH', '')!r} True\n"
