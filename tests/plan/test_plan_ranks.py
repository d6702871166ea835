"""A model over ranks: what one holds and sends, against the plan of one machine and the bytes of `links`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import CliRunner

from headwise import cli, plan
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import Model, model_of
from headwise.plan.ranks import communication as links
from headwise.plan.ranks.communication import Link
from headwise.plan.ranks.mesh import Grid, call_of, mesh_cost
from headwise.plan.ranks.rank_plan import FAR
from headwise.plan.ranks.sharding import MeshCall
from headwise.plan.ranks.weight_shards import local
from headwise.plan.units import link as read_link
from headwise.plan.units import show_seconds

pytestmark = pytest.mark.unchecked
SLOW = Link(1e9, 1e-6)
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 210, "hidden_size": 48, "intermediate_size": 66, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "attention_bias": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": LLAMA,
    "windows": {**LLAMA, "model_type": "gemma3_text", "sliding_window": 13, "sliding_window_pattern": 2},
    "chunks": {
        "model_type": "llama4_text", "vocab_size": 210, "hidden_size": 48, "intermediate_size": 66,
        "intermediate_size_mlp": 30, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 10, "num_local_experts": 4, "attention_chunk_size": 16, "interleave_moe_layer_step": 2,
    },
    "latent": {
        "model_type": "deepseek_v3", "vocab_size": 210, "hidden_size": 48, "intermediate_size": 66,
        "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 14,
        "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 18, "first_k_dense_replace": 1,
    },
    "states": {
        "model_type": "qwen3_next", "vocab_size": 210, "hidden_size": 48, "intermediate_size": 66,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 18, "shared_expert_intermediate_size": 6,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    },
    "encoder": {
        "model_type": "modernbert", "vocab_size": 210, "hidden_size": 48, "intermediate_size": 66,
        "num_hidden_layers": 4, "num_attention_heads": 6, "local_attention": 12,
    },
}  # fmt: skip


def made(name: str) -> Model:
    return model_of(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_is_one_machine(name: str) -> None:
    """Nothing is sent, all is held, and the times are those of the plan's bytes and operations."""
    model, tokens, batch = made(name), 61, 3
    one = mesh_cost(model, Grid(1, 1, SLOW, 1e9, 1e12), tokens, batch=batch, kv_dtype="fp32")
    assert one.weight_bytes == model.stored_bytes() and one.sent() == 0
    expected = costs.cache_bytes(model, tokens, 4, batch=batch) + costs.state_bytes(model, batch=batch)
    assert one.cache_bytes == expected
    assert one.prefill.compute == pytest.approx(costs.prefill(model, tokens, batch=batch).total / 1e12)
    assert one.prefill.link == 0 and sum(layer.count for layer in one.layers) == len(model.layers)
    token = costs.decode(model, tokens, batch=batch)
    if token is None:
        assert one.decode is None
        return
    assert one.decode is not None and one.decode.compute == pytest.approx(token.total / 1e12)
    assert (
        one.decode.memory == pytest.approx((costs.weight_bytes_read(model, batch) + expected) / 1e9)
        and one.decode.link == 0
    )


@pytest.mark.parametrize(("name", "n"), [("plain", 2), ("windows", 2), ("latent", 2), ("plain", 6)])
def test_tensor_ranks_share_heads_widths_and_the_table(name: str, n: int) -> None:
    """All ranks together hold everything once, and what is not shared once more for each further rank.

    With more ranks than key-value heads, each has the projections of all of these.
    """
    model = made(name)
    one = mesh_cost(model, Grid(n, 1, SLOW), 64)
    whole = 0
    for layer in model.layers:
        shared = {"q_proj", "o_proj"} | ({"k_proj", "v_proj"} if layer.num_kv_heads % n == 0 else set())
        bias = layer.d_model * layer.bias.o
        whole += sum(part.parameters for part in layer.parts() if part.name not in shared) + bias
    whole += sum(part.parameters for part in model.others if part.name in ("norms", "final_norm", "router"))
    assert n * one.weight_bytes == model.stored_bytes() + 2 * (n - 1) * whole
    kv = 1 if name == "latent" else min(n, 2)
    assert kv * one.cache_bytes == costs.cache_bytes(model, 64, 2)


def test_more_tensor_ranks_than_key_value_heads_hold_one_each() -> None:
    layer = local(made("plain").layers[0], 6)
    assert (layer.num_heads, layer.num_kv_heads) == (1, 1)
    six, two = (mesh_cost(made("plain"), Grid(n, 1, SLOW), 64).cache_bytes for n in (6, 2))
    assert six == two


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_sends_what_its_own_mask_needs(name: str) -> None:
    model, tokens, batch = made(name), 61, 2
    at = mesh_cost(model, Grid(2, 4, SLOW, flop_rate=1e12), tokens, batch=batch)
    for layer in at.layers:
        first = next(one for one in model.layers if layer.kind.split()[0] in _words(one, tokens))
        call = call_of(local(first, 2), tokens, 2, batch)
        if layer.kind in ("causal", "both ways"):
            assert not call.bounded
        for cost in layer.costs:
            assert cost.bytes == max(links.bytes_sent(call, cost.layout, 4))
            assert layer.backward[cost.layout] == max(links.bytes_sent(call, cost.layout, 4, backward=True))
        assert layer.choose.seconds == min(cost.seconds or 0.0 for cost in layer.costs)
        assert layer.tensor_bytes == 2 * (2 * (2 - 1) * 16 * batch * 48 // 2) * 2  # 16 of 61 tokens on the fullest
    assert at.sent() == sum(layer.count * (layer.tensor_bytes + layer.choose.bytes) for layer in at.layers)


def _words(layer: Any, tokens: int) -> str:
    if layer.window is None or layer.window >= tokens:
        return "both" if layer.role == "encoder" else "causal"
    return "chunks" if layer.chunked else "window"


def test_a_window_needs_a_halo_however_many_ranks() -> None:
    model = made("windows")
    for ranks in (2, 4, 8):
        at = mesh_cost(model, Grid(1, ranks, SLOW), 256)
        [window] = [layer for layer in at.layers if layer.kind == "window 13"]
        ring = next(cost for cost in window.costs if cost.layout == "ring")
        assert ring.bytes == 12 * 2 * 2 * 10 * 2  # W - 1 keys and values of 2 heads of 10 numbers of 2 bytes
        assert window.choose.layout == "ring"
    assert call_of(made("chunks").layers[0], 64, 2).chunk == 16
    assert call_of(made("encoder").layers[1], 64, 2) == MeshCall(64, 64, 6, 6, 8, 8, 2, left=6, right=6)


def test_a_decoded_token_sends_two_sums_and_partial_outputs() -> None:
    model, batch = made("plain"), 5
    at = mesh_cost(model, Grid(2, 4, SLOW, 1e9, 1e12), 64, batch=batch)
    [layer] = at.layers
    sums = 2 * (2 * (2 - 1) * batch * 48 // 2) * 2
    own, rows = 4, 3 * batch  # of 3 of 6 heads of each text; merged on four ranks, at most 4 on each
    merging = [(rows - n) * (10 * 4 + 4) + 3 * n * 10 * 2 for n in (own, own - 1)]
    assert layer.decode_bytes == sums + max(merging) and layer.decode_messages == 4 * 1 + 1 + 2
    assert at.decode is not None and at.decode.link == pytest.approx(3 * (layer.decode_bytes / 1e9 + 7e-6))
    assert at.decode.total == pytest.approx(max(at.decode.compute or 0, at.decode.memory or 0) + at.decode.link)


def test_a_rank_holds_its_share_of_the_cache_and_of_a_window() -> None:
    model = made("windows")
    at = mesh_cost(model, Grid(1, 3, SLOW), 64, kv_dtype="int8")
    per_token = 2 * (10 + 10) + 4 * 4
    assert at.cache_bytes == per_token * (22 + 5 + 5)  # one full layer: 22 of 64 tokens; two windows: 5 of 13
    assert mesh_cost(model, Grid(1, 16, SLOW), 64, kv_dtype="int8").cache_bytes == per_token * (4 + 1 + 1)


def test_without_speeds_only_the_link_is_told() -> None:
    at = mesh_cost(made("plain"), Grid(2, 4, SLOW), 64)
    assert at.prefill.compute is None and at.prefill.total is None and at.prefill.link > 0
    fast, slow = (mesh_cost(made("plain"), Grid(1, 4, SLOW, flop_rate=rate), 6400).prefill for rate in (1e15, 1e6))
    assert fast.link > 0 and slow.link == 0  # a ring's bytes hide behind slow computing


# --- the command and the record ---------------------------------------------------------------------------------------


def test_scaling_goes_to_4096_ranks_and_ten_million_tokens() -> None:
    result = plan.over("llama-3-8b", "50GB/s,2us", tensor=8, ranks=16, tokens=131072, flops="400TF", bandwidth="3TB/s")
    by_tokens: dict[int, list[Any]] = {}
    for row in result.scaling:
        by_tokens.setdefault(row.tokens, []).append(row)
    assert set(by_tokens) == {131072, FAR}
    for rows in by_tokens.values():
        assert [row.ranks for row in rows] == [8 * 2**i for i in range(10)]
        times = [row.prefill_seconds for row in rows]
        assert times == sorted(times, reverse=True) and rows[0].efficiency == 1.0
        sizes = [row.rank_bytes for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        assert all(0 <= row.link_share < 1 for row in rows)
    here = next(row for row in by_tokens[131072] if row.ranks == 128)
    assert here.prefill_seconds == result.cost.prefill.total
    assert result.cost.weight_bytes == 2 * (8030261248 - 4096 * 65) // 8 + 2 * 4096 * 65
    short = plan.over(LLAMA, "50GB/s,2us", tokens=6)
    assert [row.ranks for row in short.scaling if row.tokens == 6] == [1, 2, 4]


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *arguments])


def test_the_command_prints_tables_or_json() -> None:
    command = ["gemma-3-27b", "--tensor", "8", "--context-ranks", "4", "--link", "50GB/s,2us", "--context", "32768"]
    result = ran(*command, "--flops", "400TF", "--bandwidth", "3TB/s")
    assert result.exit_code == 0 and result.stderr == ""
    for word in (
        "32 ranks: 8 x heads, 4 x tokens",
        "window 1024",
        "halo (fastest)",
        "ring, zigzag",
        "two all-reduces",
        "Scaling",
        "4,096",
    ):
        assert word in result.stdout
    report = json.loads(ran(*command, "--json").stdout)
    assert (report["ranks"], report["tokens"], report["prefill"]["compute"]) == (32, 32768, None)
    assert {layer["kind"] for layer in report["layers"]} == {"causal", "window 1024"}
    assert {"ring", "gather", "ulysses"} <= {one["layout"] for one in report["layers"][1]["layouts"]}


WRONG: list[tuple[list[str], str]] = [
    (["llama-3-8b", "--link", "50"], "link is a bandwidth and a latency such as 50GB/s,2us; got '50'"),
    (["llama-3-8b", "--link", "50GB/s"], "link is a bandwidth and a latency such as 50GB/s,2us; got '50GB/s'"),
    (["llama-3-8b", "--link", "0GB/s,2us"], "link is a bandwidth and a latency"),
    (["llama-3-8b", "--link", "50GB/s,2"], "link is a bandwidth and a latency"),
    (["llama-3-8b", "--link", "1GB/s,2us", "--tensor", "5"], "tensor = 5 does not divide the 32 query heads of"),
    (["qwen2-7b", "--link", "1GB/s,2us", "--tensor", "14"], "tensor = 14 neither divides"),
    (["mixtral-8x7b", "--link", "1GB/s,2us", "--tensor", "0"], "tensor is a whole number between 1 and 4096; got 0"),
    (["llama-3-8b", "--link", "1GB/s,2us", "--context-ranks", "0"], "context-ranks is a whole number between 1"),
    (["llama-3-8b", "--link", "1GB/s,2us", "--context", "0"], "context is a whole number between 1 and"),
    (["llama-3-8b", "--link", "1GB/s,2us", "--context", "9", "--context-ranks", "10"], "context-ranks = 10 is more"),
    (["llama-3-8b", "--link", "1GB/s,2us", "--tensor", "32", "--context-ranks", "256"], "tensor times context-ranks"),
    (["t5-small", "--link", "1GB/s,2us"], "an encoder-decoder cannot be planned over several ranks"),
    (["llama-3-8b", "--tensor", "2"], "--tensor and --context-ranks need --link"),
    (["llama-3-8b", "--link", "1GB/s,2us", "--svg", "x.svg"], "--link plans one model over ranks; leave out"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[text[:34] for _, text in WRONG])
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments: list[str], text: str) -> None:
    result = ran(*arguments)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and text in said and "Traceback" not in said


def test_what_cannot_be_is_told_in_the_words_of_who_asks() -> None:
    """Python's arguments by their names; the command line's options by theirs, above."""
    for arguments, text in (
        ({"ranks": 0}, "ranks is a whole number between 1 and 4096; got 0"),
        ({"tokens": True}, "tokens is a whole number between 1 and 10000000000; got True"),
        ({"tokens": 10**10 + 1}, "tokens is a whole number between 1 and 10000000000; got 10000000001"),
        ({"batch": 10**7 + 1}, "batch is a whole number between 1 and 10000000; got 10000001"),
        ({"tensor": 32, "ranks": 256}, "tensor times ranks is at most 4096; got 32 x 256"),
        ({"ranks": 10, "tokens": 9}, "ranks = 10 is more than the number of tokens, 9"),
    ):
        with pytest.raises(ValueError, match=f"^{text}$"):
            plan.over("llama-3-8b", "1GB/s,2us", **arguments)
    plain = plan.over("llama-3-8b", "1GB/s,2us").cost
    assert (plain.tokens, plain.batch) == (131072, 1)
    assert (plain.grid.tensor, plain.grid.context) == (1, 1)
    remark = "without flops, times include the link only"
    assert str(plan.over("llama-3-8b", "1GB/s,2us", tokens=9)).endswith(remark)


def test_every_rank_holds_all_towers_and_the_text_model_s_share() -> None:
    whole = {"every rank holds all towers and all layers with a state"}
    said = {name: str(plan.over(MODELS[name], "1GB/s,2us", ranks=2, tokens=61)) for name in ("plain", "states")}
    assert not whole & {*said["plain"].splitlines()} and whole <= {*said["states"].splitlines()}
    seeing = {"model_type": "gemma3", "text_config": MODELS["windows"]}
    assert whole <= {*str(plan.over(seeing, "1GB/s,2us", tensor=2, tokens=61)).splitlines()}
    both, text = model_of(seeing), made("windows")
    tower = both.stored_bytes() - text.stored_bytes()
    held = [mesh_cost(model, Grid(2, 1, SLOW), 61).weight_bytes for model in (both, text)]
    assert held[0] - held[1] == tower > 0 and held[1] < text.stored_bytes()


@pytest.mark.slow
def test_what_a_plan_leaves_out_is_told_over_ranks_too() -> None:
    left_out = plan.of("gpt-3", context=99).notes
    assert left_out[0].startswith("every other layer of the original is locally banded")
    result = plan.over("gpt-3", "1GB/s,2us", ranks=2, tokens=99)
    assert result.notes == left_out and f"not counted or unknown: {left_out[0][:60]}" in str(result)
    beyond = "beyond the 2048 positions the model has learned: 4096"
    assert plan.over("gpt-3", "1GB/s,2us", tokens=4096).notes == (*left_out, beyond)
    assert plan.of("gpt-3", context=(99, 4096)).notes == (*left_out, beyond)


def test_feed_forward_layers_are_divided_too() -> None:
    with pytest.raises(ValueError, match="tensor = 4 does not divide the width of the feed-forward layers, 66"):
        mesh_cost(model_of({**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 8}), Grid(4, 1, SLOW), 64)


def test_links_and_times_as_people_write_them() -> None:
    for text in ("50G,2us", "50,2us", "GB/s,2us", "50GB/s;2us", "50GB/s,2 hours", 50):
        with pytest.raises(ValueError, match="link is a bandwidth and a latency such as 50GB/s,2us; got"):
            read_link(text)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="and a small b means bits; got '400Gb/s'"):
        read_link("400Gb/s,2us")
    assert read_link("1.5TB/s, 300ns") == (1.5e12, pytest.approx(3e-7)) and read_link("2GiB/s,1ms") == (2**31, 1e-3)
    assert [show_seconds(x) for x in (4210.0, 0.999, 1.5e-5)] == ["4,210 s", "999 ms", "15 us"]


def test_a_floor_reads_states_and_scales() -> None:
    model = made("states")
    kept = costs.cache_bytes(model, 50, 1, scale_bytes=4) + costs.state_bytes(model)
    assert costs.state_bytes(model) > 0
    for floor in costs.floors(model, 50, 1, scale_bytes=4):
        assert floor.bytes == costs.weight_bytes_read(model, floor.batch) + floor.batch * kept


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_on_one_rank_a_model_costs_what_it_costs(name: str) -> None:
    """To the last operation and byte, as the plan of one machine counts them; there is nothing to send."""
    for tokens, batch in ((1, 1), (37, 3)):
        alone = plan.of(MODELS[name], context=tokens, batch=batch)
        one, cost = (
            plan.over(MODELS[name], "50GB/s,2us", tokens=tokens, batch=batch, flops=1.0).cost,
            alone.contexts[0],
        )
        assert one.prefill.compute == cost.prefill.total and one.prefill.link == 0.0
        assert one.weight_bytes == alone.model.stored_bytes()
        assert one.cache_bytes == cost.cache_bytes + cost.state_bytes
        assert (one.decode is None) == (cost.decode is None)
        if one.decode is not None and cost.decode is not None:
            assert one.decode.compute == cost.decode.total and one.decode.link == 0.0


def test_what_one_layer_needs_at_once() -> None:
    """The stream and what is added to it, queries with outputs and keys with values, and what travels.

    In a ring three messages of both heads, or of what a window needs of others; in a gather two heads of all keys; in
    an all-to-all a share of all.
    """
    queries, keys, width, each = 6 * (10 + 10), 2 * (10 + 10), 48, 10 + 10

    def numbers(tokens: int, extra: int) -> int:
        return 2 * tokens * width + tokens * (queries + keys) + extra

    def of(name: str, ranks: int, batch: int = 1) -> dict[str, dict[str, int]]:
        layers = mesh_cost(model_of(MODELS[name]), Grid(1, ranks, SLOW), 64, batch=batch).layers
        return {layer.kind: layer.activations for layer in layers}

    for batch in (1, 3):
        byte = 2 * batch
        expected = {"ring": 3 * 2 * each * 16, "gather": 2 * each * 64, "ulysses": (queries + keys) * 64 // 4}
        many = of("plain", 4, batch)["causal"]
        assert many == {layout: byte * numbers(16, extra) for layout, extra in expected.items()}
        assert set(of("plain", 1, batch)["causal"].values()) == {byte * numbers(64, 0)}
        assert of("windows", 4, batch)["window 13"]["ring"] == byte * numbers(16, 3 * 2 * each * 12)
    wide = model_of({**LLAMA, "intermediate_size": 990})  # feed-forward layers that need more than attention
    [layer] = mesh_cost(wide, Grid(1, 4, SLOW), 64).layers
    assert set(layer.activations.values()) == {2 * (2 * 16 * width + 16 * 2 * 990)}
