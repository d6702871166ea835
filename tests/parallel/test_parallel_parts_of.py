"""Parts of what ranks share: parameters from files of other dtypes, inner parts, gathered heads, the bits of a row."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import part_cases
import pytest
import ranks
import torch

import headwise
from headwise.parallel.context_layouts.layout_costs import mesh_call_of

pytestmark = pytest.mark.unchecked


def test_files_of_other_dtypes_fill_modules_in_their_own(tmp_path: Path) -> None:
    assert ranks.pool(2).run(part_cases.slices_in_their_dtype, str(tmp_path)) == [{}] * 2


def test_inner_parts_that_attend_on_one_rank_alone_are_refused() -> None:
    for said in ranks.pool(2).run(part_cases.inner_parts_in_a_context):
        assert said.pop("InnerAttention") == ""
        for name, text in said.items():
            assert text.startswith(f"the inner part {name} attends the tokens of this process alone"), (name, text)


@pytest.mark.parametrize("world", [2, 3])
def test_a_probe_sees_sinks_and_biases_of_all_heads(world: int) -> None:
    assert ranks.pool(world).run(part_cases.gathered_of_all_heads) == [{}] * world


@pytest.mark.parametrize("world", [2])
def test_a_probe_sees_the_mask_of_all_heads(world: int) -> None:
    assert ranks.pool(world).run(part_cases.masks_that_a_probe_sees) == [{}] * world


def test_a_row_of_a_sharded_cache_has_the_same_bits_in_every_batch() -> None:
    """Which rank merges the parts of a row depends on the batch, and the order in which it adds them does not."""
    assert ranks.pool(3).run(part_cases.rows_of_a_batch_have_bits_of_their_own) == [{}] * 3


def test_query_key_and_value_are_all_dtensors_or_none() -> None:
    for said in ranks.pool(2).run(part_cases.tensors_of_some_kinds):
        assert len(said) == 14
        for name, text in said.items():
            if "(1, 1, 1)" in name:
                assert text == "", (name, text)
            else:
                assert text.startswith("ValueError: query, key and value are DTensors all, or none"), (name, text)


def test_calls_of_plain_tensors_refuse_dtensors_and_say_what_to_pass() -> None:
    for said in ranks.pool(2).run(part_cases.dtensors_in_place_of_plain_tensors):
        assert len(said) == 20
        for name, text in said.items():
            assert re.match(r"ValueError: .*plain tensors?\b.* is a DTensor .*its to_local\(\)", text), (name, text)
        assert "headwise.parallel.tensor_parallel" in said["static"]


def test_parts_of_split_modules_stay_in_their_mode() -> None:
    assert ranks.pool(2).run(part_cases.modes_of_split_modules) == [{}] * 2


def test_masks_over_a_rolling_cache_mean_the_same_or_are_refused() -> None:
    for said in ranks.pool(2).run(part_cases.masks_over_a_rolling_cache):
        taken = {name for name, text in said.items() if text == ""}
        assert taken == {"none", "causal", "window", "window ahead", "both"}, said
        for name in said.keys() - taken:
            assert said[name].startswith("a rolling ShardedCache takes a further window() or causal() alone"), name


def test_first_tokens_are_attended_where_the_window_is_on_another_rank() -> None:
    assert ranks.pool(3).run(part_cases.first_tokens_on_a_rank_alone) == [{}] * 3


def test_the_call_whose_costs_are_planned_contains_the_mask() -> None:
    """By brute force over small masks: what is planned may be more than what is attended, and never less."""
    T, S = 7, 11
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    bands = [headwise.window(left, right) for left in (1, 2, 4, None) for right in (0, 1, 3, 6, None)]
    others = [headwise.causal(), headwise.blocks(3), headwise.causal() & headwise.blocks(4), headwise.dilated(2)]
    others += [headwise.window(3, first=2), headwise.window(2) & headwise.window(5, 1), headwise.causal(offset=0)]
    exact = 0
    for mask in bands + others:
        call = mesh_call_of(mask, T, S, heads=1, kv_heads=1, head_dim=4, value_dim=4, batch=1)
        planned = torch.ones(T, S).bool()
        planned &= True if call.left is None else j >= i - call.left
        planned &= True if call.right is None else j <= i + call.right
        planned &= True if call.chunk is None else i // call.chunk == j // call.chunk
        allowed = headwise.keep(torch.ones(T, S).bool()) & mask
        attended = allowed.allowed(T, S)[0, 0]
        assert not (attended & ~planned).any(), mask
        exact += bool((attended == planned).all())
    assert exact >= 8


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.parallel_utils") is None,
    reason="transformers has its styles of tensor parallelism there since 5.23",
)
def test_key_heads_that_ranks_share_stay_frozen_or_learned() -> None:
    for found in ranks.pool(2).run(part_cases.frozen_key_heads):
        assert found == {"True": ([True, True], True), "False": ([False, False], True)}
