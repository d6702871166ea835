"""Heads pruned in memory: the module's output is that of the module with a gate on its heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from hf_models import inputs, logits
from reshape_models import FAMILIES
from torch import Tensor, nn

import headwise
from headwise import hf
from headwise.nn import AttentionCall, probe
from headwise.reshape import prune_module
from headwise.testing import assert_close_like_torch

Heads = Mapping[int | str, Iterable[int]]
UNEVEN: Heads = {0: [1, 2], 1: [3]}
PAIRS: Heads = {"encoder.0": [0], 0: [1, 2], 1: [3], "cross.1": [0, 1, 2]}
GROUPS: Heads = {0: [1, 2], 1: [0, 1]}  # one of each of two groups; a whole group
HEADS: dict[str, Heads] = {
    "t5": {"encoder.0": [1], "encoder.1": [1], 0: [2], 1: [2], "cross.0": [0], "cross.1": [1]},
    "phi3": {0: [1, 2], 1: [0, 3]},
    "gpt_bigcode": UNEVEN,
    "gemma3": GROUPS,
}


def heads_of(family: str) -> Heads:
    row = FAMILIES[family]
    default = PAIRS if row.kind in ("seq2seq", "speech") else UNEVEN
    return HEADS.get(family, GROUPS if "num_key_value_heads" in row.sizes and family != "deepseek_v3" else default)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "olmo2"])
def test_a_model_computes_what_it_did_with_gates(family: str) -> None:
    row, heads = FAMILIES[family], heads_of(family)
    model, arguments = row.build(), inputs(FAMILIES[family], "none", masked=FAMILIES[family].kind != "vision")
    pairs = row.kind in ("seq2seq", "speech")
    order = ["encoder.0", "encoder.1", "0", "cross.0", "1", "cross.1"] if pairs else ["0", "1"]
    gone = {str(layer): set(some) for layer, some in heads.items()}

    def each(call: AttentionCall) -> Tensor:
        gate = torch.tensor([float(head not in gone.get(order[call.order], ())) for head in range(4)])
        return call.attend() * gate[:, None, None]

    with probe(model, each):
        expected = logits(model, arguments)
    ungated, size = logits(model, arguments), sum(weight.numel() for weight in model.parameters())
    assert prune_module(model, heads, layouts=hf.layouts()) is model
    allowed = 1e-5 * max(1.0, float(expected.abs().max()))
    assert (logits(model, arguments) - expected).abs().max() <= allowed
    assert (expected - ungated).abs().max() > 1000 * allowed
    assert sum(weight.numel() for weight in model.parameters()) < size


def test_where_all_layers_lose_as_many_the_config_says_so_and_it_can_be_done_again() -> None:
    model = FAMILIES["mistral"].build()
    prune_module(model, "0.1,0.2,1.0,1.3", layouts=hf.layouts())
    assert (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim) == (2, 2, 6)
    prune_module(model, "0.1,1.0", layouts=hf.layouts())
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (1, 1)
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.o_proj.in_features, attention.num_key_value_groups) == (6, 6, 1)


def test_uneven_layers_leave_the_config_and_are_not_pruned_twice() -> None:
    model = FAMILIES["mistral"].build()
    prune_module(model, {0: [1, 2]}, layouts=hf.layouts())
    assert model.config.num_attention_heads == 4
    with pytest.raises(ValueError, match="not of the 4 heads in the model's config"):
        prune_module(model, {1: [1, 2]}, layouts=hf.layouts())


@pytest.mark.parametrize(
    ("family", "heads", "text"),
    [
        ("olmo2", {0: [0, 1]}, "run over all heads together"),
        ("t5", {0: [1]}, "name the same heads in each"),
        ("phi3", {0: [0, 1]}, "lose as many in every one"),
        ("mistral", {0: [1]}, "read by equally many"),
        ("mistral", {0: [0, 1, 2, 3]}, "would lose all its 4 heads"),
        ("mistral", {0: [4]}, "has the heads 0 to 3"),
        ("mistral", {2: [0]}, "no layer '2'; the layers are 0 to 1"),
    ],
)
def test_heads_that_cannot_go_alone_are_refused_and_nothing_changes(family: str, heads: Heads, text: str) -> None:
    model = FAMILIES[family].build()
    before = {name: weight.shape for name, weight in model.named_parameters()}
    with pytest.raises(ValueError, match=text):
        prune_module(model, heads, layouts=hf.layouts())
    assert {name: weight.shape for name, weight in model.named_parameters()} == before


# --- headwise's own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [[1, 2, 5], [0, 1], [0, 1, 3, 4]], ids=["one of each group", "a group", "four of six"])
def test_our_module_computes_what_it_did_with_a_gate(gone: list[int]) -> None:
    torch.manual_seed(3)
    kv_heads = 6 if gone == [0, 1, 3, 4] else 3
    mha = headwise.MultiHeadAttention(
        13,
        6,
        num_kv_heads=kv_heads,
        head_dim=4,
        value_dim=7,
        bias=True,
        rotary=headwise.nn.Rotary(4),
        qk_norm=nn.RMSNorm,
        inner=headwise.nn.InnerAttention(sinks=torch.randn(6), softcap=5.0),
    )
    x = torch.randn(2, 11, 13)
    gate = torch.tensor([float(head not in gone) for head in range(6)])
    with torch.no_grad():
        expected, exact = mha(x, gate=gate), mha.double()(x.double(), gate=gate.double())
        assert_close_like_torch(prune_module(mha.float(), gone)(x), exact, expected)
    assert (mha.num_heads, mha.q_proj.out_features, mha.o_proj.in_features) == (
        6 - len(gone),
        4 * (6 - len(gone)),
        7 * (6 - len(gone)),
    )
    assert mha.num_kv_heads * 4 == mha.k_proj.out_features


def test_an_inner_part_of_ones_own_has_nothing_to_lose() -> None:
    class Doubled(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: headwise.Mask | None) -> Tensor:
            return 2 * headwise.attention(query, key, value, mask=mask)

    mha, plain = (headwise.MultiHeadAttention(12, 3, inner=inner) for inner in (Doubled(), None))
    plain.load_state_dict(mha.state_dict())
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(prune_module(mha, [1])(x), 2 * prune_module(plain, [1])(x))


def test_modules_inside_a_model_are_pruned_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (headwise.MultiHeadAttention(12, 3) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x, gate=self.gate))

        gate = torch.tensor([1.0, 0.0, 1.0])

    torch.manual_seed(5)
    model, x = Two(), torch.randn(2, 7, 12)
    expected = model(x)
    prune_module(model, {"first": [1]})
    model.gate = torch.ones(2)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(ValueError, match="no attention module 'third'; there are 'first', 'second'"):
        prune_module(model, {"third": [0]})


@pytest.mark.parametrize(
    ("make", "heads", "error", "text"),
    [
        (lambda: headwise.MultiHeadAttention(12, 3), {"0": [1]}, TypeError, "a list of heads goes"),
        (lambda: headwise.MultiHeadAttention(12, 3), [3], ValueError, "has the heads 0 to 2; got 3"),
        (lambda: headwise.MultiHeadAttention(12, 3), [0, 1, 2], ValueError, "would lose all its 3 heads; leave one"),
        (
            lambda: headwise.MultiHeadAttention(12, 6, num_kv_heads=3),
            [0],
            ValueError,
            "1, 2, 2 query heads of its 3 groups",
        ),
        (lambda: nn.Linear(2, 3), [0], TypeError, "holds no headwise.MultiHeadAttention; for a transformers model add"),
        (lambda: nn.Sequential(headwise.MultiHeadAttention(12, 3)), [0], TypeError, r"heads of a model are \{'0'"),
        (lambda: headwise.MultiHeadAttention(12, 3, inner=Weighted()), [0], ValueError, "weights of its own"),
    ],
)
def test_what_is_no_module_or_no_head_is_refused(
    make: object, heads: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        prune_module(make(), heads)  # type: ignore[operator, arg-type]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: object = None) -> Tensor:
        return value * self.scale[:, None, None]


def test_layouts_are_for_models_with_a_config() -> None:
    with pytest.raises(TypeError, match="layouts are for a model with a config"):
        prune_module(nn.Linear(2, 3), [0], layouts=hf.layouts())
