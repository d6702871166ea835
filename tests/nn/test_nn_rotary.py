"""Rotary positions: the rotation against its definition, what it does to scores, and its errors."""

import cmath
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.nn import MultiHeadAttention, Rotary, rotate
from headwise.testing import assert_same_bits

B, H, K, T, D = 2, 6, 3, 5, 14


def by_definition(x: Tensor, positions: list[float], base: float, turned: int, interleaved: bool) -> Tensor:
    """Each pair as a complex number times exp(i angle), one by one in Python's float64; x is (T, D)."""
    out = x.double().clone()
    for t, position in enumerate(positions):
        for n in range(turned // 2):
            first, second = (2 * n, 2 * n + 1) if interleaved else (n, n + turned // 2)
            z = complex(out[t, first], out[t, second]) * cmath.exp(1j * position * base ** (-2 * n / turned))
            out[t, first], out[t, second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("turned", [2, 6, 14])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_rotation_is_a_product_of_complex_numbers(dtype: torch.dtype, turned: int, interleaved: bool) -> None:
    query, key = torch.randn(B, H, T, D).to(dtype), torch.randn(B, K, T, D).to(dtype)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 100, 0, 31]])
    part = Rotary(D, base=500.0, rotary_dim=turned, interleaved=interleaved)
    for x, ours in zip((query, key), part(query, key, positions), strict=True):
        assert ours.dtype == dtype
        for b in range(B):
            exact = by_definition(x[b, 1], positions[b].tolist(), 500.0, turned, interleaved)
            # Rounded once; before that, float32 angles of at most 100 are off by up to half an ulp of 100.
            slack = 1e-13 if dtype == torch.float64 else 1.5e-5
            assert bool(((ours[b, 1].double() - exact).abs() <= slack + torch.finfo(dtype).eps * exact.abs()).all())
        assert_same_bits(ours[..., turned:], x[..., turned:])


def test_scores_depend_on_the_difference_of_positions_only() -> None:
    query, key = torch.randn(B, H, T, D).double(), torch.randn(B, K, T, D).double()
    part = Rotary(D)

    def scores(shift: int) -> Tensor:
        q, k = part(query, key, torch.arange(T) + shift)
        return headwise.weights(q, k, stage="raw")

    assert torch.allclose(scores(0), scores(1000), atol=1e-10)
    assert not torch.allclose(scores(0), headwise.weights(query, key, stage="raw"), atol=1e-2)


def test_the_default_positions_count_from_zero() -> None:
    query, key = torch.randn(B, H, T, D), torch.randn(B, K, T, D)
    part = Rotary(D)
    for positions in (
        torch.arange(T),
        torch.arange(T).expand(1, T),
        torch.arange(T).expand(B, T).int(),
        torch.arange(5.0),
    ):
        for ours, default in zip(part(query, key, positions), part(query, key), strict=True):
            assert_same_bits(ours, default)


def test_queries_and_keys_can_have_positions_of_their_own() -> None:
    """Decoding: one query at position 4 against five keys is the last row of all queries."""
    query, key = torch.randn(B, H, T, D), torch.randn(B, K, T, D)
    part = Rotary(D)
    whole_q, whole_k = part(query, key)
    q, k = part(query[:, :, 4:], key, (torch.tensor([4]), torch.arange(T)))
    assert_same_bits(q, whole_q[:, :, 4:])
    assert_same_bits(k, whole_k)


def test_angles_survive_a_cast_of_the_module() -> None:
    """A table of angles rounded to bfloat16 is off by whole turns at position 1000; there is no table here."""
    query, key = torch.randn(1, H, 1, D).bfloat16(), torch.randn(1, K, 1, D).bfloat16()
    at = torch.tensor([1000])
    for ours, plain in zip(Rotary(D).bfloat16()(query, key, at), Rotary(D)(query, key, at), strict=True):
        assert_same_bits(ours, plain)
    assert not Rotary(D).state_dict()


def test_the_gradient_is_the_rotation_back() -> None:
    x = torch.randn(1, 2, T, D, dtype=torch.float64, requires_grad=True)
    cos, sin = Rotary(D).angles(torch.arange(T), torch.float64)
    for interleaved in (False, True):
        (grad,) = torch.autograd.grad(rotate(x, cos, sin, interleaved=interleaved).sum(), x)
        assert torch.allclose(grad, rotate(torch.ones_like(x), cos, -sin, interleaved=interleaved))


def test_a_module_with_rotary_positions() -> None:
    mha, x = MultiHeadAttention(12, 3, rotary=Rotary(4)), torch.randn(B, T, 12)
    shifted = mha(x, positions=torch.arange(T) + 50)
    assert torch.allclose(shifted, mha(x), atol=1e-5)
    assert not torch.allclose(mha(x, positions=2 * torch.arange(T)), mha(x), atol=1e-3)
    memory = torch.randn(B, 7, 12)
    assert mha(x, memory, positions=(torch.arange(T), torch.arange(7))).shape == x.shape


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"head_dim": 7},
            "turn pairs, so rotary_dim is even with 2 <= rotary_dim <= head_dim; got rotary_dim 7, head_dim 7",
        ),
        ({"head_dim": 8, "rotary_dim": 3}, "got rotary_dim 3, head_dim 8; give an even rotary_dim to turn a part"),
        ({"head_dim": 8, "rotary_dim": 10}, "got rotary_dim 10, head_dim 8"),
        ({"head_dim": 8, "rotary_dim": 0}, "got rotary_dim 0, head_dim 8"),
        ({"head_dim": 8, "base": 0.0}, "so base > 0; got 0.0"),
        ({"head_dim": 8, "base": float("nan")}, "base is a finite number; got nan"),
    ],
)
def test_wrong_sizes(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Rotary(**arguments)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("sizes", "positions", "text"),
    [
        ((5, 5, 6), None, "Rotary(8) turns heads of 8 numbers; got query (2, 6, 5, 6), key (2, 3, 5, 6)"),
        ((5, 7, 8), None, "got T = 5, S = 7; pass positions=(query_positions, key_positions)"),
        ((5, 7, 8), torch.arange(5), "one for each key: (B, T) = (2, 7); got (5,)"),
        ((5, 5, 8), torch.arange(4), "one for each query: (B, T) = (2, 5); got (4,)"),
        ((5, 5, 8), torch.zeros(3, 5), "one for each query: (B, T) = (2, 5); got (3, 5)"),
    ],
)
def test_wrong_inputs(sizes: tuple[int, int, int], positions: Tensor | None, text: str) -> None:
    T, S, D = sizes
    with pytest.raises(ValueError, match=re.escape(text)):
        Rotary(8)(torch.zeros(2, 6, T, D), torch.zeros(2, 3, S, D), positions)


@pytest.mark.unchecked
def test_rotate_refuses_more_angles_than_numbers() -> None:
    x, angles = torch.zeros(5, 4), torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"turn 2R of its D numbers; got cos \(5, 3\), sin \(5, 3\), x \(5, 4\)"):
        rotate(x, angles, angles)
    with pytest.raises(ValueError, match=r"cos and sin share one shape"):
        rotate(x, angles[:, :2], angles[:, :1])


def test_given_frequencies_take_the_place_of_those_of_the_base() -> None:
    query, key = torch.randn(B, H, T, D), torch.randn(B, K, T, D)
    pairs = [0.25 * n for n in range(D // 2)]
    cos, sin = Rotary(D, frequencies=pairs).angles(torch.tensor([0, 3]))
    assert torch.equal(
        cos, torch.tensor([[0.75 * 0 * n for n in range(D // 2)], [0.75 * n for n in range(D // 2)]]).cos()
    )
    assert torch.equal(sin[1], torch.tensor([0.75 * n for n in range(D // 2)]).sin())
    same = [500.0 ** (-2 * n / D) for n in range(D // 2)]
    explicit, based = Rotary(D, frequencies=same)(query, key)[0], Rotary(D, base=500.0)(query, key)[0]
    assert torch.allclose(explicit, based, atol=1e-6)
    assert "frequencies=..." in repr(Rotary(D, frequencies=same))


@pytest.mark.unchecked
def test_frequencies_are_one_a_pair() -> None:
    with pytest.raises(ValueError, match=r"one number a pair, rotary_dim / 2 = 3; got 7"):
        Rotary(D, rotary_dim=6, frequencies=[1.0] * 7)
    for bad in ([1.0, True, 1.0], [1.0, "1", 1.0], [1.0, float("nan"), 1.0], [1.0, 1j, 1.0], [1.0, 10**400, 1.0]):
        with pytest.raises(ValueError, match="frequencies are finite numbers: a sequence, or a tensor of"):
            Rotary(6, frequencies=bad)
    given = [0.25, 1.75, 0.5]
    both = [Rotary(6, frequencies=x).angles(torch.tensor([0, 3])) for x in (torch.tensor(given), given)]  # type: ignore
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
    for wrong in (torch.ones(1, 3), torch.ones(3, dtype=torch.bool), torch.ones(3, device="meta")):
        with pytest.raises(TypeError, match="frequencies are finite numbers: a sequence, or a tensor of one axis"):
            Rotary(6, frequencies=wrong)  # type: ignore[arg-type]


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore")  # torch's own, of a tracer that is no longer developed
def test_what_torch_jit_trace_makes_of_it() -> None:
    """Rotation is traced, for any length; attention that counts with ints says what else to use."""
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    traced = torch.jit.trace(Rotary(8), (query, key))
    longer = torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    for got, want in zip(traced(*longer), Rotary(8)(*longer), strict=True):
        assert_same_bits(got, want)
    headwise.attention(query, query, query)  # the native kernel is there, if there is one
    for options in ({"backend": "reference"}, {}, {"mask": headwise.causal()}, {"mask": headwise.window(2)}):
        with pytest.raises(TypeError, match=r"torch\.jit\.trace and .* have tensors for sizes: use torch\.export,"):
            torch.jit.trace(lambda q, k, o=options: headwise.attention(q, k, k, **o), (query, key))
