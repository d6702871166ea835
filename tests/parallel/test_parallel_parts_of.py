"""Parts of what ranks share: parameters from files of other dtypes, inner parts, gathered heads, and a row's own bits."""

from __future__ import annotations

from pathlib import Path

import part_cases
import pytest
import ranks

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
