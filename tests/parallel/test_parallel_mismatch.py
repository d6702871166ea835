"""Ranks without heads, and ranks that disagree where it is hard to see."""

from __future__ import annotations

import error_cases
import mismatch_cases
import pytest
import ranks
import torch

from headwise.parallel.context_layouts.agreement import digest

pytestmark = pytest.mark.slow


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


TOLD = {
    "context_parallel": "NotImplementedError: Cannot copy out of meta tensor",
    "append": "this cache stores torch.float32",
    "room": "KeyError: 'planted'",
    "attention to a ShardedCache": "KeyError: 'planted'",
    "join_sequence": "x is a tensor; got list",
    "sum_gradients": "sum_gradients takes a module or a list of tensors, got one tensor; pass [x]",
    "positions": "rank 1 has 5 of 11 tokens in contiguous order; got 4",
    "forward": "it cannot split logits_to_keep",
}


@pytest.mark.unchecked
def test_what_a_rank_raises_before_it_agrees_is_told_the_others() -> None:
    other, own = ranks.pool(2).run(error_cases.early_errors)
    for what, text in TOLD.items():
        assert text in own[what] and "RankError" not in own[what], own
        assert "rank 1 raised: " in other[what] and text in other[what], other
    assert other["lengths"] == own["lengths"] == "[0] [0]"


def test_what_a_rank_raises_amid_a_cache_is_told_the_others() -> None:
    other, own = ranks.pool(2).run(error_cases.late_error)
    assert (other, own) == ("RankError: cache parts: rank 1 raised KeyError: 'planted'", "KeyError: 'planted'")


def test_a_backend_that_all_ranks_refuse_leaves_their_group_in_use() -> None:
    for refused, after in ranks.pool(2).run(error_cases.refused_backend):
        assert refused.startswith("ValueError: backend is auto, ") and after == "nothing"


DISAGREED = {
    "scale": "on the options: rank 1 has scale=0.5000001, softcap=None, ",
    "width": "on the width of an expansion: rank 1 has 7, rank 0 has 6; ",
    "read": "on the gradients: rank 1 has [False, False, False, False, True], rank 0 has [False, ",
    "no_grad": "on the gradients: rank 1 has [False, False, False, False, False, False], rank 0 has [False, ",
    "own width": "ValueError: key is (B, 1, S, E) with E = 5, the width of the expansion; got (1, 1, 5, 6)",
    "value_dim": "ValueError: value_dim is at least 1; got 0",
    "fine": "nothing",
}


@pytest.mark.unchecked
def test_ranks_agree_on_all_digits_of_the_scale_on_widths_and_on_what_learns() -> None:
    for said in ranks.pool(2).run(error_cases.disagreed):
        assert said.keys() == DISAGREED.keys()
        assert {what: said[what] for what, text in DISAGREED.items() if text not in said[what]} == {}


@pytest.mark.unchecked
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_runs_anew_is_within_the_context_or_refused(reentrant: bool) -> None:
    for within, plain, outside, inside in ranks.pool(2).run(error_cases.checkpointed, reentrant):
        assert max(within, plain) <= 1e-5
        for said in (outside, inside):
            assert said.startswith("ValueError: a forward pass runs again in a backward pass")
    assert max(ranks.pool(2).run(error_cases.checkpointed_model, reentrant)) <= 1e-5


@pytest.mark.unchecked
def test_what_is_parallel_runs_within_what_is_compiled() -> None:
    for far, whole in ranks.pool(2).run(error_cases.compiled):
        assert max(far.values()) <= 1e-5 and far.keys() == {"context", "op", "heads"}
        assert "reason: ranks send each other messages here: leave fullgraph=True out" in whole


def test_sums_of_bfloat16_are_rounded_once() -> None:
    assert ranks.pool(4).run(error_cases.sums) == [[[260.0], [4 * 2**24 + 259]]] * 4


def test_a_checksum_is_of_all_numbers_whatever_the_strides() -> None:
    x = torch.arange(6.0).view(2, 3)
    for at in range(6):
        other = x.clone()
        other.view(-1)[at] += 1
        assert digest(other) != digest(x), at
    one = torch.tensor([[1.0], [2.0]])
    assert digest(one.expand(2, 3)) != digest((2 * one).expand(2, 3)) and digest(one) != digest(one.expand(2, 3))
    assert digest(x.T.contiguous().T) == digest(x) != digest(x.double()) and digest(None, x) == digest(x)


@pytest.mark.parametrize("layout", ["ring", "gather", "ulysses"])
def test_a_mask_that_changes_before_the_backward_is_refused(layout: str) -> None:
    """Or, where its map went along with the forward, it is that of the forward."""
    for text in ranks.pool(2).run(mismatch_cases.changed_before_backward, layout):
        assert "modified by an inplace operation" in text or (layout == "ulysses" and text == "nothing")
