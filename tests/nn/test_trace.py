"""The trace: every stage by name, the last one being the module's output; the table; what W_O changes."""

import functools
import json
from typing import Any

import pytest
import textbook
import torch
from torch import Tensor, nn

import headwise
from headwise import plan
from headwise.nn import InnerAttention, MultiHeadAttention, Rotary, trace, trace_shape
from headwise.testing import assert_same_bits

B, T, S, H, K, D, V, M = 2, 5, 19, 6, 3, 7, 11, 13
PROJECTIONS = [f"{letter}_{step}" for letter in "qkv" for step in ("proj", "split", "heads")]


def make(**arguments: Any) -> MultiHeadAttention:
    return MultiHeadAttention(M, H, **{"num_kv_heads": K, "head_dim": D, "value_dim": V, "bias": True} | arguments)


def names(result: headwise.nn.Trace) -> list[str]:
    return [stage.name for stage in result.stages]


def test_a_plain_trace_has_the_stages_a_learner_expects() -> None:
    result = trace(make(), torch.randn(B, T, M))
    assert names(result) == ["x", *PROJECTIONS, "scores", "weights", "heads", "concatenation", "output"]
    assert [list(stage.shape) for stage in result.stages] == [
        [B, T, M],
        [B, T, H * D], [B, T, H, D], [B, H, T, D],
        [B, T, K * D], [B, T, K, D], [B, K, T, D],
        [B, T, K * V], [B, T, K, V], [B, K, T, V],
        [B, H, T, T], [B, H, T, T], [B, H, T, V], [B, T, H * V], [B, T, M],
    ]  # fmt: skip


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "masked": ({}, {"mask": headwise.causal()}),
    "cross": ({"memory_dim": 23}, {"memory": (B, S, 23)}),
    "a pair": ({"memory_dim": (23, 29)}, {"memory": ((B, S, 23), (B, S, 29)), "mask": headwise.causal()}),
    "all parts": (
        {"rotary": Rotary(D, rotary_dim=4), "qk_norm": nn.RMSNorm, "inner": InnerAttention(softcap=2.0, scale=0.5)},
        {"positions": torch.arange(T) + 3, "mask": headwise.window(3)},
    ),
    "sinks": ({"inner": InnerAttention(sinks=torch.ones(H))}, {}),
    "a function": ({"inner": lambda q, k, v, *, mask: headwise.attention(q, k, v, mask=mask, softcap=1.0)}, {}),
}


def called(kind: str) -> tuple[MultiHeadAttention, tuple[Any, ...], dict[str, Any]]:
    built, arguments = CALLS[kind]
    memory = arguments.get("memory")
    if memory is not None:
        memory = torch.randn(memory) if isinstance(memory[0], int) else tuple(torch.randn(shape) for shape in memory)
    options = {name: value for name, value in arguments.items() if name != "memory"}
    return make(**built), (torch.randn(B, T, M), memory), options


@pytest.mark.parametrize("kind", CALLS)
def test_the_last_stage_is_the_output_and_each_stage_follows_from_the_one_before(kind: str) -> None:
    mha, inputs, options = called(kind)
    result = trace(mha, *inputs, **options)
    assert_same_bits(result.stages[-1].tensor, mha(*inputs, **options))
    stages = {stage.name: stage.tensor for stage in result.stages}
    assert list(stages) == names(result)  # no name twice
    assert_same_bits(stages["concatenation"], torch.cat(list(stages["heads"].unbind(1)), dim=-1))
    if "weights" in stages:
        values = stages["v_heads"].repeat_interleave(H // K, dim=1)
        assert torch.allclose(stages["weights"] @ values, stages["heads"], atol=1e-5)
        last = stages.get("masked", stages.get("softcapped", stages["scores"]))
        if kind != "sinks":
            assert torch.allclose(torch.softmax(last, -1), stages["weights"], atol=1e-6)
    key = stages.get("k_rotary", stages["k_heads"]).repeat_interleave(H // K, dim=1)
    if "scores" in stages:
        scale = 0.5 if kind == "all parts" else D**-0.5
        product = stages.get("q_rotary", stages["q_heads"]) @ key.mT * scale
        assert torch.allclose(product, stages["scores"], atol=1e-5)


def test_parts_add_their_stages_and_a_function_hides_its_own() -> None:
    def of(kind: str) -> list[str]:
        mha, inputs, options = called(kind)
        return names(trace(mha, *inputs, **options))

    assert of("all parts") == [
        "x", *PROJECTIONS, "q_norm", "k_norm", "q_rotary", "k_rotary", "scores", "softcapped", "masked", "weights",
        "heads", "concatenation", "output",
    ]  # fmt: skip
    assert of("cross")[:2] == ["x", "memory"]
    assert of("a pair")[:3] == ["x", "memory_keys", "memory_values"]
    assert of("a function") == ["x", *PROJECTIONS, "heads", "concatenation", "output"]
    mha, inputs, _ = called("a function")
    assert "InnerFunction does not show its scores and weights" in trace(mha, *inputs)["heads"].note
    mha, inputs, _ = called("sinks")
    weights = trace(mha, *inputs)["weights"]
    assert bool((weights.tensor.sum(-1) < 1).all()) and "sink" in weights.note


def test_formulas_name_what_is_there() -> None:
    def of(kind: str, *stages: str) -> list[str]:
        mha, inputs, options = called(kind)
        result = trace(mha, *inputs, **options)
        return [result[stage].formula for stage in stages]

    projections = ("q_proj", "k_proj", "v_proj")
    assert of("plain", *projections) == ["Q = X W_Q + b_Q", "K = X W_K + b_K", "V = X W_V + b_V"]
    assert of("cross", *projections) == ["Q = X W_Q + b_Q", "K = M W_K + b_K", "V = M W_V + b_V"]
    assert of("a pair", *projections) == ["Q = X W_Q + b_Q", "K = M W_K + b_K", "V = N W_V + b_V"]
    assert of("all parts", "scores", "softcapped") == ["S_i = 0.5 Q_i K_i^T", "2 tanh(S_i / 2)"]
    assert of("plain", "output") == ["Concat(head_1 .. head_h) W_O + b_O"]


@pytest.mark.unchecked
def test_a_wrong_input_is_refused_as_by_the_module() -> None:
    mha = make()
    with pytest.raises(ValueError, match="d_model = 13; got float32"):
        trace(mha, torch.zeros(B, T, 12))
    with pytest.raises(ValueError, match="positions are for the rotary part"):
        trace(mha, torch.zeros(B, T, M), positions=torch.arange(T))
    with pytest.raises(KeyError, match=r"no stage 'weight'; there are x, q_proj, .*, weights, heads"):
        trace(mha, torch.zeros(B, T, M))["weight"]


# --- what W_O changes -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_shares_sum_to_one_and_follow_the_contributions() -> None:
    mha, x = make(), torch.randn(B, T, M)
    mixing = trace(mha, x).mixing
    assert mixing is not None and sum(mixing.share) == pytest.approx(1, abs=1e-5) and mixing.cosine is None
    parts = torch.stack([head @ mha.head(i).W_O for i, head in enumerate(textbook.head_outputs(mha, x))])
    total = parts.sum(0)
    assert mixing.share == pytest.approx([float((p * total).sum() / total.square().sum()) for p in parts], abs=1e-5)
    slices = [s.square().sum((1, 2, 3)) for s in parts.tensor_split(H, dim=-1)]  # (slice) of (head,)
    assert mixing.own == pytest.approx([float(s[i] / s.sum()) for i, s in enumerate(slices)], abs=1e-5)


@torch.no_grad()
def test_the_cosine_is_that_of_each_token() -> None:
    """Heads as wide as the model: the mean over tokens, not over columns."""
    mha, x = MultiHeadAttention(12, 3), torch.randn(B, T, 12)
    joined = torch.cat(textbook.head_outputs(mha, x), -1)
    total = joined @ mha.o_proj.weight.T
    cosines = (joined * total).sum(-1) / (joined.norm(dim=-1) * total.norm(dim=-1))
    mixing = trace(mha, x).mixing
    assert mixing is not None and mixing.cosine == pytest.approx(float(cosines.mean()), abs=1e-5)
    columns = (joined * total).sum(1) / (joined.norm(dim=1) * total.norm(dim=1))
    assert abs(float(columns.mean() - cosines.mean())) > 1e-3


def test_without_mixing_each_slice_is_its_heads_own() -> None:
    """With W_O = 1 the output is the concatenation: own share 1 in each slice, cosine 1; a silent head has none."""
    mha = MultiHeadAttention(12, 3)
    with torch.no_grad():
        mha.o_proj.weight.copy_(torch.eye(12))
    mixing = trace(mha, torch.randn(B, T, 12)).mixing
    assert mixing is not None
    assert mixing.own == pytest.approx([1, 1, 1]) and mixing.cosine == pytest.approx(1)
    with torch.no_grad():
        mha.head(1).W_O.zero_()
    mixing = trace(mha, torch.randn(B, T, 12)).mixing
    assert mixing is not None and mixing.share[1] == 0 and mixing.own == pytest.approx([1, 0, 1])
    with torch.no_grad():
        mha.o_proj.weight.zero_()
    mixing = trace(mha, torch.randn(B, T, 12)).mixing
    assert mixing is not None and mixing.share == (0, 0, 0)  # and no NaN, which JSON has not


def test_a_random_W_O_mixes_the_heads_evenly() -> None:
    mixing = trace_shape(512, 4, batch=4).mixing
    assert mixing is not None
    assert mixing.own == pytest.approx([0.25] * 4, abs=0.03) and mixing.share == pytest.approx([0.25] * 4, abs=0.05)
    assert mixing.cosine == pytest.approx(0, abs=0.05)


# --- trace_shape and what it prints -----------------------------------------------------------------------------------

TABLE = """\
stage x X [4, 16, 512]
stage q_proj Q = X W_Q [4, 16, 512]
stage q_split 4 heads of 128 [4, 16, 4, 128]
stage q_heads Q_i [4, 4, 16, 128]
stage k_heads K_i [4, 4, 16, 128]
stage v_heads V_i [4, 4, 16, 128]
stage scores S_i = Q_i K_i^T / sqrt(d_k) [4, 4, 16, 16]
stage masked S_i + mask [4, 4, 16, 16]
stage weights P_i = softmax(S_i) [4, 4, 16, 16]
stage heads head_i = P_i V_i [4, 4, 16, 128]
stage concatenation Concat(head_1 .. head_h) [4, 16, 512]
stage output Concat(head_1 .. head_h) W_O [4, 16, 512]"""


def test_the_table_a_learner_expects() -> None:
    text = str(trace_shape(512, 4, batch=4, length=16, causal=True))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    printed = [" ".join(["stage", *row[:3]]) for row in rows]
    assert [line for line in TABLE.splitlines() if line not in printed] == []
    assert (
        "parameters: 1,048,576 = q_proj 262,144 + k_proj 262,144 + v_proj 262,144 + o_proj 262,144 = 4 d_model^2"
        in text
    )
    assert "what W_O changes (measured on this input)" in text and "(sums to 1)" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_same_sizes_give_the_same_numbers_and_leave_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    one = trace_shape(M * H, H, num_kv_heads=K, causal=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    other = trace_shape(M * H, H, num_kv_heads=K, causal=True)
    for a, b in zip(one.stages, other.stages, strict=True):
        assert_same_bits(a.tensor, b.tensor)
    weights = one["weights"].tensor
    assert torch.equal(weights, weights.tril())


@pytest.mark.parametrize("bias", [False, True, "qkv"])
def test_parameters_are_those_of_the_plan(bias: Any) -> None:
    sizes = {"num_kv_heads": K, "head_dim": D, "value_dim": V, "bias": bias}
    result = trace_shape(M, H, **sizes)
    assert result.parameters == plan.parameter_counts(M, H, **sizes)
    assert result.parameter_count == plan.parameter_count(M, H, **sizes)


def test_parts_with_parameters_are_counted_too() -> None:
    mha = make(qk_norm=nn.RMSNorm, inner=functools.partial(headwise.attention, sinks=torch.zeros(H)))
    result = trace(mha, torch.randn(B, T, M))
    assert result.parameters["q_norm"] == D and result.parameters["inner"] == H
    assert result.parameter_count == sum(p.numel() for p in mha.parameters())


def test_sizes_too_large_to_compute_are_traced_without_numbers() -> None:
    result = trace_shape(16384, 128, num_kv_heads=8, causal=True, length=8192)
    assert all(stage.tensor.is_meta for stage in result.stages) and result.mixing is None
    assert result["weights"].shape == (1, 128, 8192, 8192)
    assert "not measured" in str(result) and result.to_dict()["mixing"] is None


def test_to_dict_is_plain_json() -> None:
    result = trace_shape(12, 3, length=2)
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["stages"][3] == {
        "name": "q_heads",
        "formula": "Q_i",
        "shape": [1, 3, 2, 4],
        "note": "heads before tokens",
    }
    assert data["parameter_count"] == 4 * 12**2 == sum(data["parameters"].values())
    assert len(data["mixing"]["share"]) == len(data["mixing"]["own"]) == 3 and abs(data["mixing"]["cosine"]) <= 1


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"d_model": 13, "num_heads": 4}, ValueError, "d_model must be a multiple of num_heads"),
        ({"d_model": 12, "num_heads": 4, "batch": 0}, ValueError, "batch is at least 1; got 0"),
        ({"d_model": 12, "num_heads": 4, "length": 1.5}, TypeError, "length is an int; got 1.5"),
    ],
)
def test_wrong_sizes(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trace_shape(**arguments)


def test_hostile_names_are_text_to_the_table() -> None:
    stage = headwise.nn.Stage("[red]name[/red]", "[link=x]f[/link]", Tensor([1.0]), "[bold]")
    text = str(headwise.nn.Trace((stage,), {}))
    assert "[red]name[/red]" in text and "[link=x]f[/link]" in text and "[bold]" in text


def test_the_heads_of_a_trace_with_dropout_are_some_of_the_weights_and_pass_their_gradient_on() -> None:
    """With at least as many value dimensions as tokens, the weights that were used are known from the heads."""
    mha = MultiHeadAttention(M, H, head_dim=D, value_dim=V, inner=InnerAttention(dropout=0.5)).double().train()
    result = trace(mha, torch.randn(B, T, M, dtype=torch.float64))
    weights, heads, value = (result[name].tensor for name in ("weights", "heads", "v_heads"))
    used = (heads @ torch.linalg.pinv(value)).detach() / weights.detach()
    nothing, twice = used.abs() < 1e-6, (used - 2).abs() < 1e-6
    assert bool((nothing | twice).all()) and 0.3 < nothing.double().mean() < 0.7
    [grad] = torch.autograd.grad(heads.sum(), weights)
    wanted = 2 * twice * value.sum(-1)[:, :, None]
    torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-9)


def test_a_stage_tells_its_shape_and_not_its_numbers() -> None:
    [stage] = [stage for stage in trace(make(), torch.randn(B, T, M)).stages if stage.name == "weights"]
    assert repr(stage) == f"Stage('weights', {stage.formula!r}, shape=[{B}, {H}, {T}, {T}])"


@pytest.mark.unchecked
def test_sizes_that_no_trace_can_count_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most [\d,]+ numbers together; .*length 1000000000 make more: .*smaller"):
        trace_shape(4096, 32, batch=10**9, length=10**9)
