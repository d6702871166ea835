"""One layer's weights, head by head: what may stand together, and what selecting heads leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwise.reshape.layout.head_weights import HeadWeights, RotaryLayout

H, K, D, V, M, N, OUT = 6, 3, 4, 5, 7, 11, 13


def parts(**changed: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "query": torch.randn(H, D, M),
        "key": torch.randn(K, D, N),
        "value": torch.randn(K, V, N),
        "output": torch.randn(OUT, H, V),
        "query_bias": torch.randn(H, D),
        "key_bias": torch.randn(K, D),
        "value_bias": torch.randn(K, V),
        "output_bias": torch.randn(OUT),
        "sinks": torch.randn(H),
        "query_norm": torch.randn(D),
        "key_norm": torch.randn(K, D),
        "per_head": {"slopes": torch.randn(H, 2)},
    }
    return {**made, **changed}


def test_select_takes_all_that_belongs_to_a_head() -> None:
    weights = HeadWeights(**parts())
    kept = weights.select([4, 5, 1, 0])
    assert (kept.num_heads, kept.num_kv_heads, kept.group) == (4, 2, 2)
    for name in ("query", "query_bias", "sinks"):
        assert torch.equal(getattr(kept, name), getattr(weights, name)[[4, 5, 1, 0]]), name
    for name in ("key", "value", "key_bias", "value_bias", "key_norm"):
        assert torch.equal(getattr(kept, name), getattr(weights, name)[[2, 0]]), name
    assert torch.equal(kept.output, weights.output[:, [4, 5, 1, 0]])
    assert torch.equal(kept.per_head["slopes"], weights.per_head["slopes"][[4, 5, 1, 0]])
    assert kept.output_bias is weights.output_bias
    assert kept.query_norm is weights.query_norm


def test_select_one_query_head_of_each_group_and_named_kv_heads() -> None:
    weights = HeadWeights(**parts())
    assert weights.select([1, 2, 5]).num_kv_heads == 3
    regrouped = weights.select(range(H), [2])
    assert regrouped.group == H and torch.equal(regrouped.key, weights.key[2:])


def test_expanded_gives_each_query_head_its_own_keys_and_values() -> None:
    weights = HeadWeights(**parts())
    each = weights.expanded()
    assert each.num_kv_heads == H
    for name in ("key", "value", "key_bias", "value_bias", "key_norm"):
        whole, shared = getattr(each, name), getattr(weights, name)
        assert all(torch.equal(whole[h], shared[h // 2]) for h in range(H)), name


def test_to_converts_every_tensor() -> None:
    assert {part.dtype for _, part in HeadWeights(**parts()).to(torch.float64).tensors()} == {torch.float64}


def test_pairs_are_those_of_the_rotary_module() -> None:
    assert [x.tolist() for x in RotaryLayout(6).pairs()] == [[0, 1, 2], [3, 4, 5]]
    assert [x.tolist() for x in RotaryLayout(6, interleaved=True).pairs()] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"query": None}, TypeError, "query is a float tensor of three axes; got NoneType"),
        ({"key": torch.randn(K, D)}, ValueError, r"got key float32 \(3, 4\) on cpu; split the heads with .unflatten"),
        ({"key": torch.randn(4, D, N)}, ValueError, "num_heads must be a multiple of|value is|key is"),
        ({"value": torch.randn(4, V, N)}, ValueError, "H = 6, K = 4 leave 2 over"),
        ({"output": torch.randn(OUT, V, H)}, ValueError, r"output is \(13, 6, 5\) in a layer of H = 6, K = 3"),
        ({"query_bias": torch.randn(K, D)}, ValueError, r"query_bias is \(6, 4\) in a layer"),
        ({"key_norm": torch.randn(H, D)}, ValueError, r"key_norm is \(4,\) or \(3, 4\) in a layer"),
        ({"sinks": torch.randn(H).double()}, ValueError, r"one dtype and device; .* sinks float64 \(6,\) on cpu"),
        ({"per_head": {"slopes": torch.randn(K)}}, ValueError, "slopes has a row for each of the 6 query heads"),
        ({"per_head": {"slopes": [1.0]}}, TypeError, "slopes is a float tensor; got list"),
        ({"norm": "batch"}, ValueError, "norm is one of rms, layer, across; got 'batch'"),
        ({"rotary": RotaryLayout(6)}, ValueError, "rotary_dim is at most D = 4; got 6"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        HeadWeights(**parts(**changed))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([0, 0],), ValueError, r"heads are some of the 6, 0 to 5, each once; got \[0, 0\]"),
        (([6],), ValueError, "heads are some of the 6, 0 to 5"),
        (([],), ValueError, "heads are some of the 6"),
        ((["a"],), TypeError, "heads are whole numbers"),
        (([0, 2, 3],), ValueError, "groups of 2 read .0, 1, 1.; choose equally many of each group"),
        (([0, 2, 1, 3],), ValueError, "one after the other"),
        (([0, 1, 2], [0, 1]), ValueError, "H = 3, K = 2 leave 1 over"),
    ],
)
def test_heads_that_cannot_be_selected(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        HeadWeights(**parts()).select(*arguments)


@pytest.mark.unchecked
def test_turns_are_pairs() -> None:
    with pytest.raises(ValueError, match="numbers turn in pairs, so rotary_dim is even; got 5"):
        RotaryLayout(5)
