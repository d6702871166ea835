"""Ranks without heads, and ranks that disagree where it is hard to see."""

from __future__ import annotations

import mismatch_cases
import pytest
import ranks
import torch


@pytest.mark.parametrize("dtype, wide", [(torch.float64,) * 2, (torch.float32,) * 2, (torch.bfloat16, torch.float32)])
def test_a_rank_without_heads_has_the_lse_of_the_others(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert ranks.pool(4).run(mismatch_cases.lse_dtype, dtype) == [wide] * 4


@pytest.mark.parametrize("what", ["sinks", "a table"])
def test_a_rank_without_heads_goes_back_where_only_parameters_learn(what: str) -> None:
    assert ranks.pool(4).run(mismatch_cases.learned, what) == [(True, True)] * 4


def test_masks_that_differ_in_their_last_rule_are_refused() -> None:
    for text in ranks.pool(2).run(mismatch_cases.long_mask):
        assert text.startswith("RankMismatch: ") and "on the mask" in text, text


def test_parameters_in_another_order_are_refused() -> None:
    for text in ranks.pool(2).run(mismatch_cases.turned_parameters):
        assert text.startswith("RankMismatch: ") and "in their order" in text, text


def test_one_tensor_is_no_list_of_parameters() -> None:
    wanted = "TypeError: sum_gradients takes a module or a list of tensors, got one tensor; pass [x]"
    assert ranks.pool(2).run(mismatch_cases.one_tensor) == [wanted] * 2


def test_a_tensor_that_is_negated_when_read_is_sent_as_what_it_says() -> None:
    assert ranks.pool(4).run(mismatch_cases.lazily_negative) == [0.0] * 4
