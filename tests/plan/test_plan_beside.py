"""Plans beside each other and after a heads plan: each number is the one that the plan has alone, by every option."""

from __future__ import annotations

import csv
import io
import random
from typing import Any

import pytest

from headwise import plan

pytestmark = pytest.mark.unchecked
SMALL = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3,
         "intermediate_size": 32, "vocab_size": 50}  # fmt: skip
CONFIGS: list[Any] = [
    "gpt2", "llama-3-8b", "mixtral-8x7b", "t5-small", "deepseek-v2-lite",
    {**SMALL, "model_type": "llama"}, {**SMALL, "model_type": "gemma2", "sliding_window": 7},
    {**SMALL, "model_type": "mistral", "sliding_window": 5},
]  # fmt: skip


def drawn_options(drawn: random.Random) -> dict[str, Any]:
    """Each option differs from its default."""
    lengths = drawn.sample([3, 19, 101, 1009, 20011], 2)
    return {"context": lengths, "batch": drawn.choice([3, 7]), "kv_dtype": drawn.choice(["fp32", "fp8", "int8"])}


def cells(shown: Any) -> list[list[str]]:
    """The columns of a table without the names of its rows, each as a list of texts with their row."""
    names, *columns = [list(column.cells) for column in shown.columns]
    return [[f"{name}: {cell}" for name, cell in zip(names, column, strict=True)] for column in columns]


@pytest.mark.parametrize("seed", range(4))
def test_each_column_is_that_of_the_plan_alone(seed: int) -> None:
    """Names of rows that only some plans have stand in all columns, with "-" or nothing in the others."""
    drawn = random.Random(seed)
    options = drawn_options(drawn)
    plans = [plan.of(config, **options) for config in drawn.sample(CONFIGS, 4)]
    for one, column in zip(plans, cells(plan.side_by_side(plans).renderables[0]), strict=True):
        [alone] = cells(plan.side_by_side([one]).renderables[0])
        assert [cell for cell in column if cell in alone or not cell.endswith((": -", ": "))] == alone


def test_each_line_of_csv_is_that_of_the_plan_alone() -> None:
    options = drawn_options(random.Random(5))
    heads = {"layers": {"*": {"keep": [0, 1]}}}
    plans = [plan.of(config, heads_plan=heads, **options) for config in CONFIGS[:3]]
    together = list(csv.DictReader(io.StringIO(plan.csv(plans))))
    alone = [row for one in plans for row in csv.DictReader(io.StringIO(plan.csv([one])))]
    filled = [[{name: x for name, x in row.items() if x} for row in rows] for rows in (together, alone)]
    assert filled[0] == filled[1] and len(together) == 3 * 2 * 2


@pytest.mark.parametrize("seed", range(4))
def test_what_a_heads_plan_leaves_is_priced_like_the_config_with_those_heads(seed: int) -> None:
    """Whole groups are kept in all layers: at the same contexts, batch, dtype and speeds."""
    drawn = random.Random(seed)
    options = {**drawn_options(drawn), "bandwidth": "3TB/s", "flops": "90TF"}
    config = {**drawn.choice(CONFIGS[5:]), "head_dim": 8}
    groups = drawn.randrange(1, 4)
    heads = {"layers": {"*": {"keep": [*range(2 * groups)]}}}
    fewer = {"num_attention_heads": 2 * groups, "num_key_value_heads": groups}
    after = plan.of(config, heads_plan=heads, **options).planned
    small = plan.of({**config, **fewer}, **options)
    assert after is not None
    assert after.contexts == small.contexts and (after.batch, after.kv_dtype) == (small.batch, small.kv_dtype)
    assert after.bytes_per_token == small.bytes_per_token and after.parameters() == small.parameters()


def test_bytes_and_flops_are_those_of_one_text_times_the_texts() -> None:
    """Before and after a heads plan; what is read of the cache in a step as well."""
    heads = {"layers": {"*": {"keep": [0, 1]}}}
    for config in CONFIGS:
        one, seven = (plan.of(config, context=(3, 101), batch=batch, heads_plan=heads) for batch in (1, 7))
        for single, many in ((one, seven), (one.planned, seven.planned)):
            for a, b in zip(single.contexts, many.contexts, strict=True):
                assert b.cache_bytes == 7 * a.cache_bytes and b.state_bytes == 7 * a.state_bytes, config
                assert b.prefill.total == 7 * a.prefill.total and b.prefill.attention == 7 * a.prefill.attention
                assert (b.decode, a.decode) == (None, None) or b.decode.total == 7 * a.decode.total, config


def test_terms_of_positions_in_any_form() -> None:
    """As transformers reads them: a list, or a text in letters of any case with spaces."""
    base = {"model_type": "deberta", "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2,
            "intermediate_size": 14, "vocab_size": 41, "relative_attention": True,
            "max_relative_positions": 9}  # fmt: skip
    both, one = (plan.of({**base, "pos_att_type": terms}, context=13) for terms in (["c2p", "p2c"], ["p2c"]))
    assert both.parameters() != one.parameters() and both.contexts != one.contexts
    for text in ("c2p|p2c", "C2P|P2C", " p2c | C2p ", "P2c|c2P"):
        made = plan.of({**base, "pos_att_type": text}, context=13)
        assert (made.parameters(), made.contexts) == (both.parameters(), both.contexts), text
    made = plan.of({**base, "pos_att_type": "P2C"}, context=13)
    assert (made.parameters(), made.contexts) == (one.parameters(), one.contexts)
