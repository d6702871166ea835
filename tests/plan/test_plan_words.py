"""What is told of a plan: kinds, notes, tables and the chart, each where it begins and where it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headwise import plan
from headwise.plan import units
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import model_of
from headwise.plan.show import tables as text
from headwise.plan.show.printed import plain

pytestmark = pytest.mark.unchecked
SMALL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 50}  # fmt: skip


# --- kinds and notes --------------------------------------------------------------------------------------------------

KINDS: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 8}, "MHA"),
    ({"num_key_value_heads": 4}, "GQA, 4 KV heads (2 query heads each)"),
    ({"num_key_value_heads": 2}, "GQA, 2 KV heads (4 query heads each)"),
    ({"num_key_value_heads": 1}, "MQA"),
    ({"num_attention_heads": 1, "num_key_value_heads": 1}, "MHA"),
    ({"model_type": "mistral", "sliding_window": 7}, "GQA, 4 KV heads (2 query heads each), window 7"),
    ({"model_type": "mistral", "sliding_window": None}, "GQA, 4 KV heads (2 query heads each)"),
    ({"model_type": "gemma2", "sliding_window": 7}, "GQA, 4 KV heads (2 query heads each), hybrid: 1 full, 2 window 7"),
    ({"model_type": "ministral", "layer_types": ["sliding_attention", "full_attention", "full_attention"],
      "sliding_window": 5}, "GQA, 4 KV heads (2 query heads each), hybrid: 2 full, 1 window 5"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "kind"), KINDS, ids=str)
def test_kinds(fields: dict[str, Any], kind: str) -> None:
    assert plan.of({**SMALL, **fields}).kind == kind


def test_kinds_of_layers_that_differ() -> None:
    after = plan.of(SMALL, heads_plan={"layers": {"0": {"kv_heads": 2}, "1": {"kv_heads": 1}}}).planned
    assert after is not None and after.kind == "GQA and MQA"
    after = plan.of(SMALL, heads_plan={"layers": {"0": {"kv_heads": 2}, "1": {"keep": [0, 1, 2]}}}).planned
    assert after is not None and after.kind == "GQA, 2 or 4 KV heads (4 or 1.5 or 2 query heads each)"


def test_learned_positions_end_where_they_end() -> None:
    assert plan.of("gpt2", context=1024).exact and plan.of("gpt2", context=1024).notes == ()
    result = plan.of("gpt2", context=(1024, 1025, 4096))
    assert result.notes == ("beyond the 1024 positions the model has learned: 1025, 4096",)
    assert plan.of(SMALL, context=10**9).notes == ()


def test_five_unknown_fields_are_named() -> None:
    note = "unknown fields, which are assumed to change no count: 'a0', 'a1', 'a2', 'a3', 'a4'"
    for count, end in ((5, ""), (6, ", ...")):
        assert plan.of({**SMALL, **{f"a{i}": 1 for i in range(count)}}).notes == (note + end,)


def test_a_dtype_counts_under_either_name() -> None:
    """As transformers reads it: a null says nothing, and the name of today goes first."""
    for names, size in (
        ({"dtype": None, "torch_dtype": "float32"}, 4),
        ({"dtype": "float32", "torch_dtype": None}, 4),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, 4),
        ({"torch_dtype": "float32"}, 4),
        ({"dtype": None, "torch_dtype": None}, 2),
    ):
        assert model_of({**SMALL, **names}).weight_bytes == size, names


def test_a_head_of_another_kind_is_told_and_not_counted() -> None:
    bare, known = ({**SMALL, "architectures": [f"Llama{name}"]} for name in ("Model", "ForCausalLM"))
    other = plan.of({**SMALL, "architectures": ["LlamaForSequenceClassification"]})
    assert other.parameters() == plan.of(bare).parameters() and other.parameters()["head"] == 0
    assert plan.of(known).parameters()["head"] == 50 * 64
    assert other.notes == ("the head of 'LlamaForSequenceClassification' is not counted, only the model below it",)


def test_what_stands_around_the_text_model() -> None:
    """The dtype, a quantisation and whether the head is tied may stand in the wrapper; the rest is the text model's."""
    text = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 50, "head_dim": 8}
    outer: dict[str, Any] = {
        "model_type": "gemma3",
        "text_config": text,
        "quantization_config": {"quant_method": "odd"},
    }
    [note] = plan.of(outer).notes
    assert note.startswith("the checkpoint is quantised by 'odd'")
    assert model_of({**outer, "quantization_config": {"quant_method": "fp8"}}).packing is not None
    del outer["quantization_config"]
    assert plan.of(outer).notes == ()
    assert [model_of({**outer, "dtype": dtype}).weight_bytes for dtype in ("float32", "bfloat16")] == [4, 2]
    said = {**outer, "torch_dtype": "bfloat16", "text_config": {**text, "dtype": None, "torch_dtype": "float32"}}
    assert model_of(said).weight_bytes == 4, "the text model's own, under either name"
    sizes = [
        model_of({**outer, "text_config": {**text, "tie_word_embeddings": not tied}, "tie_word_embeddings": tied})
        for tied in (True, False)
    ]
    assert sizes[1].total_parameters() - sizes[0].total_parameters() == 50 * 64
    assert model_of({**outer, "text_config": {**text, "model_type": "gemma3_text"}}).layers == model_of(outer).layers
    with pytest.raises(ValueError, match="has no text_config, where the text model's sizes are"):
        model_of({"model_type": "gemma3", "text_config": 3})


@pytest.mark.parametrize(
    ("fields", "size"),
    [({}, 2), ({"dtype": "float32"}, 4), ({"torch_dtype": "float64"}, 8), ({"dtype": "float16"}, 2),
     ({"torch_dtype": "float32"}, 4), ({"dtype": "bfloat16", "torch_dtype": "float32"}, 2), ({"dtype": 3}, 2)],
)  # fmt: skip
def test_bytes_of_a_weight(fields: dict[str, Any], size: int) -> None:
    model = model_of({**SMALL, **fields})
    assert costs.weight_bytes_read(model) == size * model.active_parameters()
    floor = costs.floors(model, 11, 1)[1]
    assert floor.bytes == size * model.active_parameters() + 2 * 11 * 3 * 4 * 16


# --- numbers of the record --------------------------------------------------------------------------------------------


def test_latent_attention_as_other_kinds() -> None:
    """By hand: keys of 192 and values of 128 numbers for each head that has its own."""
    cost = plan.of("deepseek-v3", context=3).contexts[0]
    assert (cost.as_mha_bytes, cost.as_gqa8_bytes, cost.as_mqa_bytes) == tuple(
        61 * k * 320 * 3 * 2 for k in (128, 8, 1)
    )
    assert cost.decode_expanded is not None and cost.decode is not None
    assert cost.decode_expanded == costs.decode(plan.of("deepseek-v3").model, 3, absorbed=False) != cost.decode
    assert plan.of("gpt2", context=3).contexts[0].decode_expanded is None
    twelve = plan.of("gpt2", context=3).contexts[0]
    assert twelve.as_gqa8_bytes is None and twelve.as_mqa_bytes * 12 == twelve.as_mha_bytes == twelve.cache_bytes


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "t5-small", "mistral-7b", "whisper-tiny", "bert-base"])
def test_a_batch_is_in_every_number_but_the_floors(name: str) -> None:
    one, three = (plan.of(name, context=10_000, batch=n, bandwidth=1e12).contexts[0] for n in (1, 3))
    single, many = one.to_dict(), three.to_dict()
    for key, value in single.items():
        if key in ("context", "source_tokens", "floors"):
            assert many[key] == value
        elif isinstance(value, dict):
            assert many[key] == {part: 3 * number for part, number in value.items()}
        else:
            assert many[key] == (None if value is None else 3 * value), key
    assert one.source_tokens == {"t5-small": 10_000, "whisper-tiny": 1500}.get(name, 0)


def test_as_many_contexts_and_texts_as_there_may_be() -> None:
    assert len(plan.of(SMALL, context=[1] * 64).contexts) == 64
    with pytest.raises(ValueError, match="give 1 to 64 contexts; got 65"):
        plan.of(SMALL, context=[1] * 65)
    assert plan.of(SMALL, context=10**10, batch=10**7).contexts[0].context == 10**10


# --- tables -----------------------------------------------------------------------------------------------------------


def test_a_slow_step_is_told_in_seconds_and_a_slow_speed_is_not_nought() -> None:
    result = plan.of("llama-3-8b", context=131_072, bandwidth="3.35TB/s", flops="990TF")
    shown = rows(result)
    assert shown["1"][3:] == ["9.61 ms", "104", "cache"] and shown["256"][3:] == ["1.32 s", "194", "cache"]
    assert rows(plan.of("llama-3-8b", context=131_072, bandwidth="10GB/s"))["1"][3:5] == ["3.22 s", "0.311"]


def test_numbers_just_below_a_unit_are_rounded_into_it() -> None:
    """No 1e+03: three digits, in the unit that the rounded number has."""
    times = {0.9996: "1 s", 999.6: "1,000 s", 999.4: "999 s", 9.996e-4: "1 ms", 0.9994: "999 ms", 9.994e-4: "999 us"}
    times |= {9.996e-7: "1 us", 123456.7: "123,457 s", 0.0: "0 us"}
    assert {seconds: units.show_seconds(seconds) for seconds in times} == times
    sizes = {1023: "1,023 B", 1024: "1 KiB", 1023.7: "1 KiB", 2**20 - 1: "1 MiB", 2**20 - 600: "1,023 KiB"}
    sizes |= {2**30 - 1: "1 GiB", 2**60 - 1: "1 EiB", 2**71: "2,048 EiB"}
    sizes |= {1024**power: f"1 {'KMGTPE'[power - 1]}iB" for power in range(1, 7)}
    assert {size: units.show_bytes(size) for size in sizes} == sizes
    counts = {999: "999", 999.6: "1 K", 999.6e6: "1 G", 999.6e18: "1 Z", 1e21: "1 Z", 1e30: "1 Q", 2.5e34: "25,000 Q"}
    assert {count: units.show(count) for count in counts} == counts
    digits = {0.1234: "0.123", 99.96: "100", 999.6: "1,000", 1234.4: "1,234", 12: "12"}
    assert {number: units.figures(number) for number in digits} == digits and units.figures(1234.4, 4) == "1,234"
    cost = plan.of("gpt2", context=9, bandwidth="1TB/s").contexts[0]
    table = text._floor_table(replace(cost, floors=(replace(cost.floors[0], intensity=1234.4),)))
    assert [*table.columns[3].cells] == ["1,234"]


def rows(shown: object) -> dict[str, list[str]]:
    """The lines of all tables, by their first cell."""
    cells = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in str(shown).splitlines()]
    return {line[0]: line[1:] for line in cells if line}


def test_the_overview_of_an_encoder_with_a_decoder() -> None:
    result = plan.of("t5-small", context=100, batch=3, bandwidth="1TB/s")
    cost, shown = result.contexts[0], rows(result)
    assert cost.decode is not None
    assert shown["attention layers"] == ["6 encoder, 6 self, 6 cross"]
    assert shown["attention parameters"] == ["18,874,368 (31.2% of the model)"]
    assert shown["all parameters"] == ["60,506,624"] and shown["active parameters per token"] == ["38,479,360"]
    assert shown["cache per token (bf16)"] == ["12,288 B"] and shown["heads in total"] == ["144"]
    assert "at 100 tokens, batch 3" in shown and "at 100 tokens" in rows(plan.of("t5-small", context=100))
    cache = units.show_bytes(3 * 100 * 12 * 2 * 8 * 128)
    assert shown["cache held"] == [cache] and shown["cache reserved"] == [f"{cache} without window savings"]
    assert shown["as MHA, 8 KV heads, 1 KV head"] == [f"{cache}, {cache}, {units.show_bytes(3 * 100 * 12 * 2 * 128)}"]
    flops = [units.show(n, "FLOP") for n in (cost.prefill.total, cost.prefill.attention, cost.prefill.dense)]
    assert shown["prefill"] == [f"{flops[0]}, attention {flops[1]} ({flops[2]} without its mask)"]
    token = [units.show(n, "FLOP") for n in (cost.decode.total, cost.decode.attention)]
    assert shown["one decoded token"] == [f"{token[0]}, attention {token[1]}"]
    eager = [units.show_bytes(n) for n in (3 * 8 * 100 * 100 * 2, 3 * 8 * 100 * 4)]
    assert shown["eager attention weights"] == [f"{eager[0]} per layer; fused {eager[1]}"]
    assert shown["W_Q  q_proj"] == ["262,144", "4,718,592"]
    assert shown["256"][-1] == "cache" and len(shown["256"]) == 6
    assert len(rows(plan.of("t5-small", context=100))["256"]) == 3, "without speeds there is no time"


def test_the_overview_of_others() -> None:
    encoder = rows(plan.of("bert-base", context=512, heads_plan={"layers": {"*": {"keep": [0, 1]}}}))
    assert encoder["attention layers"] == ["12"] and encoder["one decoded token"] == ["-"]
    assert (encoder["cache reserved"], encoder["as MHA, 8 KV heads, 1 KV head"]) == (["-"], ["-"])
    assert "without its mask" not in encoder["prefill"][0]
    assert encoder["cache per token"] == ["0 B", "0 B", "-"] and encoder["at 512: cache"][-1] == "-"
    heads = 12 * 10 * 64 * 2 * (4 * 768 * 512 + 2 * 512 * 512)  # ten heads' projections, scores and weighted sums
    whole = plan.of("bert-base", context=512).contexts[0].prefill.total
    shown = [units.show(n, "FLOP") for n in (whole, whole - heads)]
    assert encoder["at 512: prefill"] == [*shown, f"{heads / whole:.1%}"]
    assert (
        encoder["attention parameters"] == ["28,348,416", "4,732,416", "83.3%"] and "at 512: one token" not in encoder
    )
    state = {**SMALL, "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    assert plan.of(state).kind.endswith("; 1 layer with a state (conv)")
    assert rows(plan.of(state))["layers with a state"] == ["1 conv, 384 B each for a text of any length"]
    assert rows(plan.of("gpt2", context=9))["as MHA, 8 KV heads, 1 KV head"][0].split(", ")[1] == "-"
    deep = plan.of("deepseek-v3", context=99).contexts[0]
    assert deep.decode_expanded is not None
    end = f"; with recomputed keys and values {units.show(deep.decode_expanded.total, 'FLOP')}"
    assert rows(plan.of("deepseek-v3", context=99))["one decoded token"][0].endswith(end)
    mixed = plan.of({**SMALL, "num_hidden_layers": 5, "strange": 1}, context=9, heads_plan={
        "layers": {str(i): {"keep": [*range(i + 1)]} for i in range(4)}})  # fmt: skip
    assert mixed.planned is not None
    after = rows(mixed.planned)
    assert after["all parameters"][0].endswith(" (see the notes)")
    assert after["heads, kv heads"] == ["1, 1; 2, 1; 3, 2; ..."]
    assert rows(plan.of(SMALL, context=9, heads_plan={"layers": {"0": {"keep": [0]}, "1": {"keep": [1, 2]}}}).planned)[
        "heads, kv heads"
    ] == ["1, 1; 2, 2; 8, 4"]


def test_remarks() -> None:
    experts = "experts read:"
    assert experts in str(plan.of("mixtral-8x7b")) and experts not in str(plan.of("gpt2"))
    assert "exact: every count equals that of the model in transformers (gpt2)" in str(plan.of("gpt2", context=9))
    both = plan.side_by_side([plan.of("gpt2", context=9), plan.of("bert-base", context=9)])
    lines = [str(part) for part in both.renderables[1:]]
    assert lines[0].startswith("gpt2: exact: ") and "\ncard: An encoder: it keeps no key-value cache" in lines[1]


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            {"context": (100, 200)},
            r"^plans side by side need the same contexts; gpt2 has 100, 300 and gpt2 100, 200$",
        ),
        (
            {"context": 100},
            r"^plans side by side need the same contexts; gpt2 has 100, 300 and gpt2 100$",
        ),
        (
            {"context": (100, 300), "batch": 3},
            r"^plans side by side need the same batch; gpt2 has 1 and gpt2 3$",
        ),
    ],
)
def test_plans_that_do_not_stand_side_by_side(other: dict[str, Any], line: str) -> None:
    """The rows are named by the first plan's contexts and batch: another plan's numbers would stand under them."""
    with pytest.raises(ValueError, match=line):
        plan.side_by_side([plan.of("gpt2", context=(100, 300)), plan.of("gpt2", **other)])


def test_a_decoded_token_meets_what_the_cache_of_a_chunk_holds() -> None:
    """As transformers computes it, wherever in a chunk the text ends; a prefill counts the pairs of the mask."""
    config = {
        **SMALL,
        "model_type": "llama4_text",
        "attention_chunk_size": 7,
        "head_dim": 16,
        "no_rope_layers": [1] * 3,
    }
    for context in (7, 8, 14, 19):
        decode = plan.of(config, context=context).contexts[0].decode
        assert decode is not None and decode.attention == 3 * 2 * 7 * 8 * (16 + 16), context


def test_side_by_side_show_what_was_asked_for_beside_the_counts() -> None:
    """A heads plan's savings, and the steps where a speed is known; named by their plans, in their order."""
    options: dict[str, Any] = {"context": (9, 100), "heads_plan": {"layers": {"0": {"keep": [0]}}}}
    named = [("gpt2", options), ("bert-base", {"context": (9, 100), "flops": "1TF"}), ("llama-3-8b", options)]
    group = plan.side_by_side([plan.of(name, **more) for name, more in named])
    assert [str(one.title) for one in group.renderables[1:-3]] == [
        "gpt2: What the heads plan saves",
        "llama-3-8b: What the heads plan saves",
    ]
    one, other = (plan.of(name, context=(9, 100), **more) for name, more in (("gpt2", {"flops": "1TF"}), ("gpt-3", {})))
    fast = plan.side_by_side([one, other])
    assert [str(part.title) for part in fast.renderables[1:-2]] == [
        "gpt2: One decoding step at 9 tokens",
        "gpt2: One decoding step at 100 tokens",
    ]
    assert [str(column.header) for column in fast.renderables[2].columns][-1] == "limited by"


def test_plans_of_two_dtypes_are_told_apart() -> None:
    """In the headings, the remarks and the chart; what all plans share is said once."""
    plans = [plan.of("gpt2", context=9, kv_dtype=dtype, batch=2) for dtype in ("bf16", "int8")]
    group = plan.side_by_side(plans)
    assert [str(column.header) for column in group.renderables[0].columns] == ["", "gpt2, bf16", "gpt2, int8"]
    assert [str(part).split(":")[0] for part in group.renderables[1:]] == ["gpt2, bf16", "gpt2, int8"]
    assert rows(plain(group))["cache per token"] == ["36,864 B", "19,584 B"]
    drawing = plan.svg(plans)
    for label in (">gpt2, bf16<", ">gpt2, int8<", ">Key-value cache against context (batch 2)<"):
        assert label in drawing
    drawing = plan.svg([plans[0], plan.of("gpt2", context=9)])
    for label in (">gpt2, batch 2<", ">gpt2, batch 1<", ">Key-value cache against context (bf16)<"):
        assert label in drawing
    drawing = plan.svg([plans[0], plan.of("bert-base", kv_dtype="fp8")])  # an encoder is not drawn
    assert ">gpt2<" in drawing and "(bf16, batch 2)" in drawing
    both = plan.svg([plans[1], plan.of(SMALL, context=9)])
    assert ">llama, bf16, batch 1<" in both and ">Key-value cache against context<" in both
