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


def test_what_is_no_rank_and_no_axis_is_refused() -> None:
    axes = [
        "dim is at most 1; got 2",
        "dim is at least -2; got -3",
        "dim is an int; got '1'",
        "dim is an int; got None",
    ]
    of_ranks = [
        "rank is at most 1; got 2",
        "rank is at least 0; got -1",
        "rank is an int; got True",
        "rank is an int; got 1.5",
    ]
    wanted = [*of_ranks, *axes, *axes, "x has an axis of tokens; got a number, a tensor of shape ()"]
    for said in ranks.pool(2).run(mismatch_cases.places_and_axes):
        assert [text.split(": ", 1)[1] for text in said] == wanted
        assert {text.split(": ")[0] for text in said} == {"TypeError", "ValueError"}


def test_joining_what_learns_on_one_rank_alone_is_refused() -> None:
    for text in ranks.pool(2).run(mismatch_cases.one_learns):
        assert text.startswith("RankMismatch: ") and "on the requires_grad" in text, text


def test_one_number_is_sent_whatever_its_stride() -> None:
    assert ranks.pool(2).run(mismatch_cases.one_number) == [[1.0, 2.0]] * 2
