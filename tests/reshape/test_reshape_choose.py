"""Which heads go: named, a fraction, a budget; and what is refused, with the reason and the way out."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reshape_models import Made, decoder

from headwise.plan import of
from headwise.reshape import Budget, by_call, by_twins, plan_prune, random_scores
from headwise.reshape.layout.head_axes import KeptHeads, Sizes
from headwise.reshape.pruning import budget as select
from headwise.reshape.pruning.selection import best_kept, parse_heads

Scores = dict[tuple[str, int], float]


def scores(*layers: list[float]) -> Scores:
    return {(str(layer), head): value for layer, row in enumerate(layers) for head, value in enumerate(row)}


def kept(source: Made, **wish: Any) -> dict[str, tuple[int, ...]]:
    """The query heads that stay, by layer."""
    return {key: some.query for key, some in plan_prune(source, **wish).kept.items()}


# --- named heads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["0.1, 1.3", {0: [1], "1": [3]}, [(0, 1), ("1", 3)]])
def test_named_heads_go_and_no_other(heads: Any) -> None:
    assert kept(decoder(4, 4), heads=heads) == {"0": (0, 2, 3), "1": (0, 1, 2)}


def test_layers_of_an_encoder_with_a_decoder_have_names() -> None:
    assert parse_heads("encoder.03.7,cross.0.1,2.5") == [("encoder.3", 7), ("cross.0", 1), ("2", 5)]


@pytest.mark.parametrize("text", ["", "1", "0.", "a.1", "0.1;1.3", "decoder.0.1", "-1.0", "0.1,,1.3", "0.9999999"])
def test_a_text_that_names_no_head_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"heads are LAYER\.HEAD with commas between, such as 0\.1,3\.7; got"):
        plan_prune(decoder(4, 4), heads=text)


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ({2: [1]}, "no layer '2'; the layers are 0 to 1"),
        ({0: [4]}, "layer 0 has the heads 0 to 3; got 4"),
        ({0: [True]}, "layer 0 has the heads 0 to 3; got True"),
        ("0.1,1.3,0.1", "head 0.1 is named twice; name each head once"),
        (
            {0: [1], 1: [2, 3]},
            "one number, num_attention_heads, counts the heads of all these layers: layer 0 must lose 1",
        ),
        ({0: [0, 1, 2, 3]}, "layer 0 would lose all its 4 heads; leave one, or add zero"),
    ],
)
def test_heads_that_cannot_go_alone_are_refused(heads: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        plan_prune(decoder(4, 4), heads=heads)
    assert "\n" not in str(caught.value)


def test_a_layer_alone_is_no_range() -> None:
    with pytest.raises(ValueError, match=r"no layer '2'; the layers are 0$"):
        plan_prune(decoder(4, 4, layers=1), heads={2: [1]})


def test_groups_lose_as_many_or_go_whole() -> None:
    source = decoder(12, 3)
    assert kept(source, heads={0: [0, 4, 8], 1: [3, 7, 11]})["1"] == (0, 1, 2, 4, 5, 6, 8, 9, 10)
    assert plan_prune(source, heads={0: [0, 1, 2, 3], 1: [8, 9, 10, 11]}).kept["1"].kv == (0, 1)
    text = (
        "layer 0 would keep 3, 4, 4 query heads of its 3 groups of 4, and every key-value head is read by equally many"
    )
    with pytest.raises(ValueError, match=text):
        plan_prune(source, heads={0: [0], 1: [0]})
    text = "counts the key-value heads of all layers, and layer 0 keeps 2, 1 keeps 1"
    with pytest.raises(ValueError, match=text):
        plan_prune(decoder(4, 2), heads={0: [0, 2], 1: [0, 1]})


def test_with_scores_the_worst_go_too_and_it_is_said_which() -> None:
    worth = scores([5, 1, 2, 9], [4, 8, 7, 3], [1, 2, 3, 4])
    plan = plan_prune(decoder(4, 4, layers=3), heads={0: [3], 1: [1, 2]}, scores=worth)
    assert plan.gone == {"0": [1, 3], "1": [1, 2], "2": [0, 1]}
    assert "one number counts all layers: 0.1, 2.0, 2.1" in plan.notes[0]
    plan = plan_prune(decoder(4, 2), heads={0: [1]}, scores=scores([9, 0, 5, 4], [1, 2, 3, 9]))
    assert plan.gone == {"0": [1, 3], "1": [0, 2]}  # one of each group, the worse one


def test_with_scores_nothing_more_goes_where_nothing_must() -> None:
    harmful = scores([-1, -2, -3, -4], [-4, -3, -2, -1])  # fewer heads would come to a higher sum
    for worth in (random_scores(), harmful):
        plan = plan_prune(decoder(4, 4), heads={0: [3], 1: [1]}, scores=worth)
        assert plan.gone == {"0": [3], "1": [1]} and plan.notes == ()


# --- a fraction -------------------------------------------------------------------------------------------------------


def test_the_best_of_each_layer_stay() -> None:
    worth = scores([3, 1, 2, 5], [4, 4, 4, 4])
    assert kept(decoder(4, 4), keep_fraction=0.5, scores=worth) == {"0": (0, 3), "1": (0, 1)}
    assert kept(decoder(4, 4), keep_fraction=0.7, scores=worth)["0"] == (0, 2, 3)
    assert kept(decoder(4, 4), keep_fraction=1, scores=worth)["0"] == (0, 1, 2, 3)
    assert kept(decoder(4, 4), keep_fraction=0.01, scores=worth)["0"] == (3,)


@pytest.mark.parametrize(
    ("worth", "query", "kv"),
    [([9, 9, 1, 1], (0, 1), (0,)), ([9, 1, 1, 9], (0, 3), (0, 1)), ([1, 1, 1, 1], (0, 1), (0,))],
    ids=["a whole group is worth more", "one of each is worth more", "of equal worth, the smaller cache"],
)
def test_groups_go_whole_or_in_part_by_what_is_worth_more(worth: list[float], query: Any, kv: Any) -> None:
    plan = plan_prune(decoder(4, 2, layers=1), keep_fraction=0.5, scores=scores(worth))
    assert (plan.kept["0"].query, plan.kept["0"].kv) == (query, kv)


def test_a_fraction_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0.75 of 4 heads is 3, and no number .* nearer to it than all; keep 0.5, or"):
        plan_prune(decoder(4, 2), keep_fraction=0.75, scores=random_scores())
    assert kept(decoder(4, 2), keep_fraction=0.9, scores=random_scores())["0"] == (0, 1, 2, 3)


def test_zeroed_heads_need_no_class_and_no_even_layers() -> None:
    source = decoder(4, 2, model_type="mistral")
    plan = plan_prune(source, heads={0: [0, 1, 2, 3], 1: [2]}, zero=True)
    assert plan.gone == {"0": [0, 1, 2, 3], "1": [2]} and plan.target.config == source.config
    plan = plan_prune(source, keep_fraction=0.5, scores=scores([9, 1, 1, 9], [9, 9, 1, 1]), zero=True)
    assert plan.target.config == source.config


# --- a budget ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [0, 17, 1000])
def test_the_most_heads_that_a_budget_allows_stay(context: int) -> None:
    source = decoder(6, 6, layers=3)

    def cost(heads: int) -> int:
        rows = heads * 5 * 26 * 4 * 3 + 11 * 26
        cache = of(
            source.config | dict(num_attention_heads=heads, num_key_value_heads=heads),
            context=max(context, 1),
            kv_dtype="fp32",
        )
        return 4 * rows + (cache.contexts[0].cache_bytes if context else 0)

    for heads in (6, 4, 1):
        for short, stay in ((0, heads), (1, heads - 1)):
            budget = Budget((cost(heads) - short) / 1e6, context)
            if stay:
                assert len(kept(source, budget=budget, scores=random_scores())["2"]) == stay
            else:
                with pytest.raises(
                    ValueError, match=r"is below .* MB, which weights and cache come to with the fewest"
                ):
                    plan_prune(source, budget=budget, scores=random_scores())


def test_a_budget_takes_the_smaller_cache_where_it_must() -> None:
    source, worth = decoder(4, 2, layers=1), scores([9, 1, 1, 9])
    weights_of = lambda heads, kv: 4 * (11 * 26 + 5 * 26 * (2 * heads + 2 * kv))  # noqa: E731
    small = weights_of(2, 1)  # two query heads that read one key-value head
    assert plan_prune(source, budget=Budget(small / 1e6), scores=worth).kept["0"].kv == (0,)
    assert plan_prune(source, budget=Budget(2 * small / 1e6), scores=worth).gone == {}
    whole = weights_of(2, 2)
    assert plan_prune(source, budget=Budget(whole / 1e6), scores=worth).kept["0"] == KeptHeads((0, 3), (0, 1))
    assert plan_prune(source, budget=Budget(whole / 1e6), scores=scores([9, 9, 1, 1])).kept["0"].kv == (0,)
    assert plan_prune(source, budget=Budget((whole - 1) / 1e6), scores=worth).kept["0"].kv == (0,)
    harmful = scores([-9, -1, -1, -9])  # as many heads as fit, though fewer would come to a higher sum
    assert plan_prune(source, budget=Budget(2 * small / 1e6), scores=harmful).gone == {}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "numbers", [(0, 0), (-1, 0), (math.nan, 0), (True, 0), ("3", 0), (3, -1), (3, 1.5), (3, 10**9)]
)
def test_a_budget_is_a_number_of_megabytes(numbers: Any) -> None:
    with pytest.raises(
        ValueError, match=r"a budget is a number of megabytes above 0|context is a whole number of tokens"
    ):
        Budget(*numbers)


@pytest.mark.unchecked
def test_a_budget_and_a_list_of_twins_end_somewhere() -> None:
    with pytest.raises(ValueError, match="a budget is a finite number of megabytes; got inf"):
        Budget(math.inf)
    for twins in ([], [(0, 0.5, (0, 1))], [((0, 1, 2), 0.5, None)]):
        with pytest.raises(ValueError, match=r"twins are \(\(layer, head\), .*, one at least; got"):
            by_twins(twins)


# --- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({}, "give one of heads, keep_fraction and budget; got none"),
        (
            {"heads": "0.1", "keep_fraction": 0.5},
            "give one of heads, keep_fraction and budget; got heads and keep_fraction",
        ),
        ({"keep_fraction": 0.5}, r"which heads of a layer stay is chosen by score; give scores \(--by\)"),
        ({"keep_fraction": 0}, "keep_fraction is the fraction of the heads that stays, above 0 and at most 1; got 0"),
        ({"keep_fraction": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"keep_fraction": math.nan}, "above 0 and at most 1; got nan"),
        ({"budget": Budget(1.0), "zero": True}, "zeroed heads weigh what they did"),
        (
            {"keep_fraction": 0.5, "scores": {("0", 0): 1.0}},
            "scores has a finite number for every .* head 1 of layer 0 has none",
        ),
        ({"keep_fraction": 0.5, "scores": scores([1, 2, math.nan, 3], [1] * 4)}, "head 2 of layer 0 has nan"),
    ],
)
def test_a_wish_that_says_nothing_or_too_much_is_refused(wish: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_prune(decoder(4, 4), **wish)


@pytest.mark.parametrize("heads", [3, {0: 1}, [3], ["01"], [(0, 1, 2)]])
@pytest.mark.unchecked
def test_heads_of_another_kind_are_refused(heads: Any) -> None:
    with pytest.raises(TypeError, match=r"heads are '0\.1,3\.7'"):
        plan_prune(decoder(4, 4), heads=heads)


@pytest.mark.parametrize("value", ["0.5", None, [1.0], True])
@pytest.mark.unchecked
def test_scores_of_another_kind_are_refused_by_their_head(value: Any) -> None:
    with pytest.raises(TypeError, match=r"the score of head 1\.2 is a number"):
        plan_prune(decoder(4, 4), keep_fraction=0.5, scores={**scores([1] * 4, [1] * 4), ("1", 2): value})


def test_random_scores_are_the_same_again_and_others_by_seed() -> None:
    layers = plan_prune(decoder(4, 4), heads=[]).family.layers
    assert random_scores(3)(layers) == random_scores(3)(layers) != random_scores(4)(layers)
    assert len(set(random_scores()(layers).values())) == 8


def pair_of_stacks() -> Made:
    """An encoder with a decoder, two layers each, of three heads; each stack shares a table of position biases."""
    names = ["encoder.block.0.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention"]
    names += [f"decoder.block.{n}.layer.{m}" for n in range(2) for m in ("0.SelfAttention", "1.EncDecAttention")]
    shapes = {f"{name}.{part}.weight": (12, 12) for name in names for part in "qkvo"}
    return Made(dict(model_type="t5", d_model=12, d_kv=4, num_heads=3, num_layers=2, vocab_size=7, d_ff=5), shapes)


def test_layers_that_share_a_table_lose_the_same_heads() -> None:
    every = {key: [1] for key in ("encoder.0", "encoder.1", "0", "1", "cross.0", "cross.1")}
    assert plan_prune(pair_of_stacks(), heads=every | {"cross.1": [2]}).gone["cross.1"] == [2]
    text = r"the layers encoder.0 to encoder.1 share one table of position biases .* loses \[1\], layer encoder.1 \[2\]"
    with pytest.raises(ValueError, match=text):
        plan_prune(pair_of_stacks(), heads=every | {"encoder.1": [2]})
    worth = {(key, head): float(head) for key in every for head in range(3)} | {("encoder.0", 2): -9.0}
    gone = plan_prune(pair_of_stacks(), keep_fraction=2 / 3, scores=worth).gone
    assert (gone["encoder.0"], gone["encoder.1"], gone["0"], gone["cross.0"]) == ([2], [2], [0], [0])


def test_scores_of_calls_belong_to_the_layers_in_their_order() -> None:
    layers = plan_prune(pair_of_stacks(), heads=[]).family.layers
    scores = by_call([[10 * call + head for head in range(3)] for call in range(6)])(layers)
    order = ["encoder.0", "encoder.1", "0", "cross.0", "1", "cross.1"]
    assert scores == {(key, head): 10 * call + head for call, key in enumerate(order) for head in range(3)}
    with pytest.raises(ValueError, match="the model has 6 layers of 3 heads, the scores 5 of 3"):
        by_call([[1, 2, 3]] * 5)(layers)


def test_of_heads_that_are_alike_one_is_spared() -> None:
    twins = [
        ((0, 0), 0.3, (1, 1)),
        ((0, 1), 0.9, (0, 0)),
        ((1, 0), None, None),
        ((1, 1), 0.2, (0, 0)),
    ]
    assert by_twins(twins) == [[1.3, 0.9], [1.0, 0.2]]


@pytest.mark.unchecked  # a family that has nothing but its counts
def test_several_fields_shrink_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an encoder with a decoder has them: by the same part, each to a number that loads, the most first."""
    loads = {"encoder": [(6, 6), (4, 4), (3, 3), (1, 1)], "decoder": [(4, 4), (2, 2), (1, 1)]}
    counts = {field: [SimpleNamespace(sizes=Sizes(one[0][0], one[0][0], 5, 5))] for field, one in loads.items()}
    monkeypatch.setattr(select, "loadable", lambda family, field: loads[field])
    steps = select._steps(SimpleNamespace(counts=counts))  # type: ignore[arg-type]
    pairs = [(step["encoder"][0], step["decoder"][0]) for step in steps]
    assert pairs == sorted(set(pairs), reverse=True) and all(step.keys() == loads.keys() for step in steps)
    assert pairs[0] == (6, 4) and pairs[-1] == (1, 1) and (3, 2) in pairs


def test_of_groups_those_stay_whose_kept_heads_are_worth_more_together() -> None:
    """The best head of all may be in the group that goes."""
    worth = [10.0, 0.0, 0.0, 6.0, 5.0, 1.0, 4.0, 4.0, 4.0]  # three groups of three
    assert best_kept(Sizes(9, 3, 5, 5), (3, 1), set(), worth) == KeptHeads((3, 4, 5), (1,))
    assert best_kept(Sizes(9, 3, 5, 5), (6, 2), set(), worth) == KeptHeads((3, 4, 5, 6, 7, 8), (1, 2))
    assert best_kept(Sizes(9, 3, 5, 5), (1, 1), set(), worth) == KeptHeads((0,), (0,))


@pytest.mark.parametrize("named", ["encoder.0", "encoder.1"])
def test_a_head_named_in_any_of_the_layers_that_share_a_table_goes_in_all(named: str) -> None:
    keys = ("encoder.0", "encoder.1", "0", "1", "cross.0", "cross.1")
    worth = {(key, head): float(head) for key in keys for head in range(3)}
    plan = plan_prune(pair_of_stacks(), heads={named: [2]}, scores=worth)
    assert plan.gone["encoder.0"] == plan.gone["encoder.1"] == [2]
    assert "encoder.1.2" in plan.notes[0] or named == "encoder.1"


def test_the_cache_of_a_budget_is_in_the_largest_dtype_of_the_layers() -> None:
    """Where a matrix of one layer is wider than those beside it, what is computed with it is, too."""
    source = decoder(4, 4, layers=2)
    for n, dtype in enumerate((torch.float16, torch.float32)):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            source.tensors[f"model.layers.{n}.self_attn.{name}.weight"].dtype = dtype
    source.tensors["model.layers.1.self_attn.v_proj.weight"].dtype = torch.bfloat16
    family = plan_prune(source, heads=[]).family
    now = {field: (4, 4) for field in family.counts}
    assert select.cache_of(family, source.tensors, now, 17) == 2 * 2 * 4 * 5 * 17 * 4  # keys and values of two layers


def test_the_cache_of_a_decoder_counts_beside_an_encoder() -> None:
    """Keys and values of its own tokens, and of as many that it reads from the encoder; the encoder holds none."""
    source = pair_of_stacks()
    family = plan_prune(source, heads=[]).family
    now = {field: (3, 3) for field in family.counts}
    own, read = (2 * 2 * 3 * 4 * 17 * 4 for _ in range(2))  # two layers of three heads of size 4
    assert select.cache_of(family, source.tensors, now, 17) == own + read
    assert select.cache_of(family, source.tensors, now, 0) == 0


def test_the_weights_of_a_budget_have_each_the_bytes_of_their_dtype() -> None:
    source = decoder(4, 4, layers=1)
    for name, dtype in (("q_proj", torch.float16), ("v_proj", torch.float64)):
        source.tensors[f"model.layers.0.self_attn.{name}.weight"].dtype = dtype
    sizes = 4 * 11 * 26 + 3 * 5 * 26 * (2 + 4 + 8 + 4)  # the embedding, and three heads that stay
    for most, stay in ((sizes + 0.5, 3), (sizes - 0.5, 2)):  # no number that rounds to another
        assert len(kept(source, budget=Budget(most / 1e6), scores=random_scores())["0"]) == stay
