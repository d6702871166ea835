"""Plans for heads: what is left after pruning and merging, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise import plan
from headwise.plan.model.heads_plan import apply_heads

pytestmark = pytest.mark.unchecked
SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 50}  # fmt: skip


def test_a_heads_plan_is_what_modules_of_those_heads_hold() -> None:
    """Against headwise's own module with fewer heads, and by hand for an uneven plan."""
    whole = plan.of(SMALL, context=100)
    after = plan.of(SMALL, context=100, heads_plan={"layers": {"*": {"kv_heads": 2}, "1": {"keep": [0, 1, 3]}}}).planned
    assert after is not None
    sizes = [(layer.num_heads, layer.num_kv_heads) for layer in after.model.layers]
    assert sizes == [(8, 2), (3, 2), (8, 2)]
    modules = [headwise.MultiHeadAttention(64, 8, num_kv_heads=2, head_dim=8) for _ in range(2)]
    pruned = headwise.MultiHeadAttention(64, 8, num_kv_heads=4, head_dim=8)
    matrices = [pruned.head(h) for h in (0, 1, 3)]
    queries = sum(head.W_Q.numel() + head.W_O.numel() for head in matrices)
    keys = sum(head.W_K.numel() + head.W_V.numel() for head in (matrices[0], matrices[2]))  # heads 0 and 1 share theirs
    expected = sum(p.numel() for module in modules for p in module.parameters()) + queries + keys
    assert after.model.attention_parameters() == expected
    assert after.contexts[0].cache_bytes * 2 == whole.contexts[0].cache_bytes
    assert (
        after.model.total_parameters() - expected == whole.model.total_parameters() - whole.model.attention_parameters()
    )


def test_a_heads_plan_of_whole_groups_is_the_model_with_fewer_heads() -> None:
    keep = {"layers": {"*": {"keep": [0, 1, 2, 3]}}}
    after = plan.of(SMALL, heads_plan=keep).planned
    small = plan.of({**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8})
    assert after is not None and after.contexts == small.contexts and after.parameters() == small.parameters()


def test_heads_that_share_in_another_order_count_as_those_that_share_in_theirs() -> None:
    def after(entry: dict[str, Any]) -> Any:
        return plan.of(SMALL, heads_plan={"layers": {"*": entry}}).planned

    turned = after({"keep": [0, 1, 4, 5, 2, 3, 6, 7], "kv_heads": 2})
    assert turned == after({"kv_heads": 2})
    few, one = after({"keep": [0, 1, 4, 5], "kv_heads": 1}), after({"keep": [0, 1]})
    assert (
        few.contexts[0].cache_bytes == one.contexts[0].cache_bytes
        and few.model.attention_parameters() > one.model.attention_parameters()
    )


T5 = {"model_type": "t5", "vocab_size": 53, "d_model": 28, "d_kv": 7, "d_ff": 17, "num_heads": 5, "num_layers": 2,
      "num_decoder_layers": 3, "relative_attention_num_buckets": 11}  # fmt: skip


def test_the_table_of_position_biases_keeps_the_columns_of_the_heads_that_stay() -> None:
    """All layers of a stack add one table, a column a head, so it is as wide as the layer with the most heads."""
    three = {f"{role}{n}": {"keep": [0, 1, 4]} for role in ("", "encoder.", "cross.") for n in range(3)}
    three = {key: entry for key, entry in three.items() if key != "encoder.2"}
    after = plan.of(T5, heads_plan={"layers": three}).planned
    small = plan.of({**T5, "num_heads": 3})
    assert after is not None and after.parameters() == small.parameters() and after.contexts == small.contexts
    one = {key: entry for key, entry in three.items() if key in ("encoder.0", "1", "cross.0", "cross.1", "cross.2")}
    whole, some = plan.of(T5).parameters(), plan.of(T5, heads_plan={"layers": one}).planned
    assert some is not None and some.parameters()["embedding"] == whole["embedding"]
    for keys in (("encoder.0", "encoder.1"), ("0", "1", "2")):  # cross-attention adds no table, whatever it keeps
        some = plan.of(T5, heads_plan={"layers": {key: three[key] for key in keys}}).planned
        assert some is not None and some.parameters()["embedding"] == whole["embedding"] - 2 * 11


def test_layers_that_are_one_lose_the_same_heads() -> None:
    albert = {"model_type": "albert", "hidden_size": 28, "num_attention_heads": 4, "num_hidden_layers": 3,
              "embedding_size": 11, "intermediate_size": 17, "vocab_size": 53}  # fmt: skip
    whole, all_three = plan.of(albert), plan.of(albert, heads_plan={"layers": {"*": {"keep": [0, 2, 3]}}}).planned
    assert all_three is not None
    lost = whole.parameters()["attention"] - all_three.parameters()["attention"]
    assert lost == 4 * 7 * 28 + 3 * 7  # one layer's weights, and biases of all but o_proj
    for layers in ({"0": {"keep": [0]}}, {"2": {"keep": [0, 1]}, "*": {"keep": [3]}}):
        with pytest.raises(ValueError, match=r"heads plan: all layers of this architecture share"):
            plan.of(albert, heads_plan={"layers": layers})


def test_latent_heads_can_go_and_leave_the_cache_as_it_is() -> None:
    result = plan.of("deepseek-v2-lite", heads_plan={"layers": {"*": {"keep": [0, 1, 2, 3]}}})
    assert result.planned is not None and result.planned.bytes_per_token == result.bytes_per_token
    assert result.planned.model.attention_parameters() < result.model.attention_parameters()


HEADS_PLANS: list[tuple[Any, str]] = [
    ({}, 'a heads plan is {"layers": {"0": {"keep": [0, 1]}, "1": {"kv_heads": 2}}}'),
    ({"layers": []}, "a heads plan is"),
    ({"layers": {}}, "a heads plan is"),
    ({"layers": {"0": {"keep": [0]}}, "more": 1}, "a heads plan is"),
    ({"layers": {"3": {"keep": [0]}}}, "heads plan: there is no layer '3'; the layers are 0 to 2"),
    ({"layers": {"0": {}}}, "heads plan: layer 0: give keep, kv_heads or both; got {}"),
    ({"layers": {"0": {"keep": [0, 1], "kv_heads": 3}}}, "heads plan: layer 0: kv_heads divides the"),
    ({"layers": {"0": {"drop": [0]}}}, "heads plan: layer 0: give keep, kv_heads or both; got {'drop': [0]}"),
    (
        {"layers": {"0": {"keep": []}}},
        "heads plan: layer 0: keep is a list of distinct heads from 0 to 7, at least one; got []",
    ),
    (
        {"layers": {"0": {"keep": [8]}}},
        "heads plan: layer 0: keep is a list of distinct heads from 0 to 7, at least one; got [8]",
    ),
    ({"layers": {"0": {"keep": [1, 1]}}}, "heads plan: layer 0: keep is a list of distinct heads"),
    ({"layers": {"0": {"keep": [True]}}}, "heads plan: layer 0: keep is a list of distinct heads"),
    (
        {"layers": {"0": {"keep": 3}}},
        "heads plan: layer 0: keep is a list of distinct heads from 0 to 7, at least one; got 3",
    ),
    (
        {"layers": {"0": {"kv_heads": 3}}},
        "heads plan: layer 0: kv_heads divides the number of key-value heads, 4; got 3",
    ),
    (
        {"layers": {"0": {"kv_heads": 8}}},
        "heads plan: layer 0: kv_heads divides the number of key-value heads, 4; got 8",
    ),
    (
        {"layers": {"0": {"kv_heads": 0}}},
        "heads plan: layer 0: kv_heads divides the number of key-value heads, 4; got 0",
    ),
]


@pytest.mark.parametrize(("heads_plan", "text"), HEADS_PLANS, ids=str)
def test_heads_plans_that_do_not_fit(heads_plan: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan.of(SMALL, heads_plan=heads_plan)
    assert str(caught.value).startswith(f"'llama': {text}")


def test_layers_of_two_stacks_have_names_of_their_own() -> None:
    model = plan.of("t5-small").model
    after = apply_heads(
        model, {"layers": {"encoder.0": {"keep": [0]}, "cross.5": {"keep": [1, 2]}, "0": {"keep": [3]}}}
    )
    heads = {(layer.role, layer.index): layer.num_heads for layer in after.layers if layer.num_heads != 8}
    assert heads == {("encoder", 0): 1, ("cross", 5): 2, ("self", 0): 1}


def test_a_heads_plan_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"layers": {"*": {"kv_heads": 1}}}')
    assert (
        plan.of(SMALL, heads_plan=path).planned == plan.of(SMALL, heads_plan={"layers": {"*": {"kv_heads": 1}}}).planned
    )
    path.write_text("{")
    with pytest.raises(ValueError, match=r"heads plan '.*plan\.json': not valid JSON"):
        plan.of(SMALL, heads_plan=path)
