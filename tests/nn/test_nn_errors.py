"""The errors of MultiHeadAttention: each names the rule, the values met, and a way out."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise import plan
from headwise.cache import StaticCache
from headwise.nn import Head, MultiHeadAttention

H, K, D, V, M = 6, 3, 7, 11, 13


def head_of(width: int = M, size: int = D, **biases: Tensor) -> Head:
    return Head(*torch.randn(3, width, size), torch.randn(size, width), **biases)


WRONG_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "no split": (
        {"d_model": 13, "num_heads": 4},
        "d_model must be a multiple of num_heads: 13 = 4 x 3 + 1; give head_dim to choose the size of a head",
    ),
    "groups": (
        {"d_model": 12, "num_heads": 6, "num_kv_heads": 4},
        "num_heads must be a multiple of num_kv_heads: H = 6, K = 4 leave 2 over; query head h reads key-value head "
        "h // (H / K)",
    ),
    "more keys": ({"d_model": 12, "num_heads": 2, "num_kv_heads": 4}, "H = 2, K = 4 leave 2 over"),
    "zero": ({"d_model": 12, "num_heads": 0}, "num_heads is at least 1; got 0"),
    "negative": ({"d_model": 12, "num_heads": 2, "value_dim": -3}, "value_dim is at least 1; got -3"),
    "bias": (
        {"d_model": 12, "num_heads": 2, "bias": "all"},
        "bias is False, True (all four projections) or \"qkv\" (all but o_proj); got 'all'",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", WRONG_SIZES)
def test_wrong_sizes_are_named_and_the_plan_says_the_same(case: str) -> None:
    sizes, text = WRONG_SIZES[case]
    for function in (MultiHeadAttention, plan.parameter_count, plan.AttentionShape.of):
        with pytest.raises(ValueError) as caught:
            function(**sizes)
        assert text in str(caught.value)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_heads": 2.0}, TypeError, "num_heads is an int; got 2.0"),
        ({"num_heads": True}, TypeError, "num_heads is an int; got True"),
        ({"memory_dim": 0}, ValueError, "memory_dim is at least 1; got 0"),
        ({"memory_dim": (3, None)}, ValueError, "memory_dim is one width, or a pair (of the keys, of the values)"),
        ({"memory_dim": (3, 4, 5)}, ValueError, "got (3, 4, 5)"),
        ({"qk_norm": torch.nn.RMSNorm(6)}, TypeError, "got a RMSNorm that is made already; pass the class, or lambda"),
        (
            {"inner": 3},
            TypeError,
            "inner is a callable (query, key, value, *, mask) such as headwise.nn.InnerAttention",
        ),
        (
            {"inner": functools.partial(headwise.attention, mask=None)},
            ValueError,
            "inner=partial(headwise.attention, ...) may fix scale, softcap, sinks, dropout, backend; it fixes mask; "
            "give mask and gate to the module's call instead",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        MultiHeadAttention(**{"d_model": 12, "num_heads": 2, **arguments})
    assert text in str(caught.value)


X, CROSS = torch.zeros(2, 5, 12), {"memory_dim": 7}


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("built", "called", "error", "text"),
    [
        ({}, (X.numpy(),), TypeError, "x is a tensor (B, T, d_model); got ndarray"),
        ({}, (X[0],), ValueError, "x is (B, T, d_model), batch first; got float32 (5, 12) on cpu; a single sequence "),
        ({}, (X[..., :11],), ValueError, "x is (B, T, d_model) with d_model = 12; got float32 (2, 5, 11) on cpu"),
        (CROSS, (X,), ValueError, "so it attends to a memory (B, S, 7) and never to x; call it as mha(x, memory)"),
        (CROSS, (X, X), ValueError, "the memory of the keys is (B, S, 7); got float32 (2, 5, 12) on cpu; memory_dim "),
        ({}, (X, X[..., :7]), ValueError, "the memory of the keys is (B, S, 12); got float32 (2, 5, 7) on cpu"),
        ({"memory_dim": (12, 7)}, (X, X), ValueError, "the memory of the values is (B, S, 7); got float32 (2, 5, 12)"),
        ({}, (X, X[:1]), ValueError, "x and memory share the batch size: x B = 2, memory B = 1"),
        ({}, (X, (X, X[:, :3])), ValueError, "keys and values come from memories of one length: got S = 5 and 3"),
        ({}, (X, (X, X, X)), TypeError, "memory is one tensor (B, S, width), or a pair of them"),
    ],
)
def test_wrong_inputs(built: dict[str, Any], called: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        MultiHeadAttention(12, 2, **built)(*called)
    assert text in str(caught.value)


@pytest.mark.unchecked
def test_positions_without_a_rotary_part_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positions are for the rotary part and this module has none; build it with"):
        MultiHeadAttention(12, 2)(X, positions=torch.arange(5))


@pytest.mark.unchecked
def test_wrong_heads() -> None:
    mha = MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, value_dim=V)
    for index in (-1, H):
        with pytest.raises(ValueError, match=rf"(index is at least 0|head index must be 0 to 5); got {index}"):
            mha.head(index)
    heads = [mha.head(i) for i in range(H)]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "from_heads needs at least one Head; got none"),
        ([mha], {}, "from_heads takes headwise.nn.Head objects; item 0 is MultiHeadAttention"),
        ([*heads, head_of()], {}, "heads of one module have equal shapes and biases; head 0 is Head(W_Q=(13, 7)"),
        (heads, {"num_kv_heads": 2}, "heads 0 to 2 share W_K and W_V, but head 2 differs from the first"),
        (heads, {"num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads: H = 6, K = 4"),
        ([Head(*torch.randn(4, M, D))], {}, "a head has W_Q (M, D), W_K (N, D), W_V (N, V), W_O (V, M), "),
    ]
    twins = head_of(b_K=torch.zeros(D)), head_of(b_K=torch.ones(D))
    twins = twins[0], Head(*(getattr(twins[0], n) for n in ("W_Q", "W_K", "W_V", "W_O")), b_K=twins[1].b_K)
    cases.append((twins, {"num_kv_heads": 1}, "heads that share W_K and W_V share b_K and b_V too; head 1 differs"))
    of_values = [Head(*(getattr(twins[0], n) for n in ("W_Q", "W_K", "W_V", "W_O")), b_V=b) for b in torch.eye(2, D)]
    cases.append((of_values, {"num_kv_heads": 1}, "heads that share W_K and W_V share b_K and b_V too; head 1 differs"))
    for argument, options, text in cases:
        with pytest.raises((ValueError, TypeError)) as caught:
            MultiHeadAttention.from_heads(argument, **options)
        assert text in str(caught.value)


def narrowed(module: torch.nn.Module, name: str) -> torch.nn.Module:
    """The module with one projection as tensor parallelism leaves it on each of two devices: half its columns."""
    whole = getattr(module, name)
    setattr(module, name, torch.nn.Linear(whole.in_features, whole.out_features // 2, bias=False))
    return module


SPLIT = "where it is split over devices, give each whole heads: a module of its own (MultiHeadAttention.from_heads)"


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_of_half_the_columns_is_refused(name: str) -> None:
    """Its numbers would be taken for more heads, each of half the size, and nobody would see that they are wrong."""
    x, heads, size = torch.zeros(2, 5, M), H if name == "q_proj" else 2, V if name == "v_proj" else 6
    mha = narrowed(MultiHeadAttention(M, H, num_kv_heads=2, head_dim=6, value_dim=V), name)
    cache = StaticCache(2, 2, 6, V, capacity=5)
    text = (
        f"a projection gives (B, T, heads * size) with {heads} x {size} = {heads * size} numbers a token; got float32 "
        f"(2, 5, {heads * size // 2}) on cpu; {SPLIT}"
    )
    for call in (lambda: mha(x), lambda: mha(x, cache=cache), lambda: headwise.trace(mha, x)):  # type: ignore[arg-type]
        with pytest.raises(ValueError) as caught:
            call()
        assert text in str(caught.value)
    assert cache.lengths == [0, 0]


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["q_proj", "kv_b_proj", "kv_a_proj_with_mqa"])
def test_a_latent_projection_of_half_the_columns_is_refused(name: str) -> None:
    mla = narrowed(headwise.LatentAttention(12, 4, kv_lora_rank=8, nope_dim=6, rope_dim=4, value_dim=6), name)
    with pytest.raises(ValueError, match=r"a projection gives .* give each whole heads"):
        mla(torch.zeros(2, 5, 12))


def test_whole_heads_on_each_device_add_up() -> None:
    """The way out that the refusal names."""
    mha, x = MultiHeadAttention(M, H, num_kv_heads=K, head_dim=D, value_dim=V), torch.randn(2, 5, M)
    halves = [range(0, 4), range(4, 6)]
    parts = [MultiHeadAttention.from_heads([mha.head(h) for h in half], num_kv_heads=len(half) // 2) for half in halves]
    torch.testing.assert_close(sum(part(x) for part in parts), mha(x), rtol=1e-5, atol=1e-6)
