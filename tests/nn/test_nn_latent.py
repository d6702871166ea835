"""LatentAttention: both forms against the definition, with and without a cache, and what it says when misused."""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from latent_cases import FORMS, KINDS, SIZES, B, H, Held, M, T, make, rms, textbook
from torch import Tensor, nn

import headwise
from headwise import LatentAttention
from headwise.nn import Rotary, probe
from headwise.nn.latent_costs import FormCosts, latent_layer
from headwise.testing import assert_same_bits

C, N, R, V = (SIZES[name] for name in ("kv_lora_rank", "nope_dim", "rope_dim", "value_dim"))

ALLOWED = {
    "all": (None, None),
    "causal": (headwise.causal(), torch.ones(T, T, dtype=torch.bool).tril()),
    "window": (headwise.window(5), torch.ones(T, T, dtype=torch.bool).tril().triu(-4)),
}


# --- the two forms are one function -----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", ALLOWED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_either_form_is_the_definition(kind: str, form: Any, masked: str) -> None:
    mla, x = make(**KINDS[kind]), torch.randn(B, T, M)
    mask, allowed = ALLOWED[masked]
    wide = copy.deepcopy(mla).double()
    exact = textbook(wide, x.double(), allowed)
    # torch's RMSNorm of float64 has the definition's own rounding, and so has everything else
    assert torch.allclose(wide(x.double(), mask=mask, form=form), exact, rtol=1e-12, atol=1e-12)
    assert rms(mla(x, mask=mask, form=form), exact) <= 2 * rms(textbook(mla, x, allowed), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_as_exact_as_the_definition_in_it(form: Any, dtype: torch.dtype) -> None:
    mla, x = make(q_lora_rank=13).to(dtype), torch.randn(B, T, M).to(dtype)
    mask, allowed = ALLOWED["causal"]
    exact = textbook(copy.deepcopy(mla).double(), x.double(), allowed)
    out = mla(x, mask=mask, form=form)
    assert out.dtype == dtype
    assert rms(out, exact) <= 2 * rms(textbook(mla, x, allowed), exact)


@pytest.mark.parametrize("form", FORMS)
def test_the_scale_is_that_of_the_expanded_head_in_both_forms(form: Any) -> None:
    mla = make()
    assert mla.scale == mla.inner.scale == (N + R) ** -0.5
    with probe(mla) as seen:
        mla(torch.randn(B, T, M), form=form)
    assert seen.calls[0].scale == (N + R) ** -0.5


def test_what_each_form_attends_to() -> None:
    """Expanded: H heads of N + R, V. Absorbed: one key head of C + R; its first C columns, uncopied, are the values."""
    mla, x = make(), torch.randn(B, T, M)
    with probe(mla) as seen:
        mla(x, form="expanded")
        mla(x, form="absorbed")
    expanded, absorbed = seen.calls
    assert expanded.value is not None and absorbed.value is not None
    assert (expanded.query.shape, expanded.key.shape) == ((B, H, T, N + R), (B, H, T, N + R))
    assert expanded.value.shape == (B, H, T, V)
    assert (absorbed.query.shape, absorbed.key.shape) == ((B, H, T, C + R), (B, 1, T, C + R))
    assert absorbed.value.shape == (B, 1, T, C) and absorbed.value.data_ptr() == absorbed.key.data_ptr()
    assert absorbed.value.stride() == absorbed.key.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_some_heads_are_those_of_all(kind: str) -> None:
    mla, key = make(**KINDS[kind]).double(), torch.randn(B, 1, T, KINDS[kind]["kv_lora_rank"] + R).double()
    for heads in ((0, H), (0, 1), (1, H), (1, 2)):
        some = mla.expand(key, heads=heads)
        for part, whole in zip(some, mla.expand(key), strict=True):
            wanted = whole[:, slice(*heads)]
            assert part.shape == wanted.shape, heads
            assert torch.allclose(part, wanted, rtol=1e-13, atol=1e-13), heads


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_either_form_are_those_of_the_definition(kind: str, form: Any) -> None:
    mla, x = make(**KINDS[kind]).double(), torch.randn(B, T, M, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(B, T, M, dtype=torch.float64)
    mask, allowed = ALLOWED["causal"]
    wanted = dict(mla.named_parameters())

    def gradients(out: Tensor) -> dict[str, Tensor]:
        return dict(zip([*wanted, "x"], torch.autograd.grad((out * weight).sum(), [*wanted.values(), x]), strict=True))

    ours = gradients(mla(x, mask=mask, form=form))
    # state_dict detaches; the definition must see the parameters themselves
    mla.state_dict = lambda: dict(mla.named_parameters())  # type: ignore[assignment]
    for name, exact in gradients(textbook(mla, x, allowed)).items():
        assert torch.allclose(ours[name], exact, rtol=1e-11, atol=1e-11 * float(exact.abs().max())), name
        assert bool(exact.abs().max() > 0)


@pytest.mark.parametrize("form", FORMS)
def test_float32_gradients_are_close_to_those_in_float64(form: Any) -> None:
    """Through the kernel of the device, whose values are a view of its keys in the absorbed form."""
    mla, x = make(q_lora_rank=13), torch.randn(B, T, M)
    wide = copy.deepcopy(mla).double()
    mla(x, mask=headwise.causal(), form=form).square().sum().backward()
    wide(x.double(), mask=headwise.causal(), form=form).square().sum().backward()
    for (name, ours), exact in zip(mla.named_parameters(), wide.parameters(), strict=True):
        assert ours.grad is not None and exact.grad is not None
        size = float(exact.grad.square().mean().sqrt())
        assert rms(ours.grad, exact.grad) < 1e-5 * size, name  # measured: 1e-7 to 1e-6


# --- which form -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SIZES, SIZES | {"kv_lora_rank": 5}, SIZES | {"kv_lora_rank": 200}], ids=str)
def test_the_costs_are_what_the_products_multiply(sizes: dict[str, int]) -> None:
    C, N, R, V = (sizes[name] for name in ("kv_lora_rank", "nope_dim", "rope_dim", "value_dim"))
    costs = FormCosts.of(latent_layer(M, H, q_lora_rank=None, **sizes))
    for new in (1, 2, 5, 40):
        for past in (0, 1, 7, 100):
            pairs = sum(past + 1 + i for i in range(new))
            expanded = H * ((past + new) * C * (N + V) + pairs * (N + R + V))
            absorbed = H * (new * C * N + new * C * V + pairs * (C + R + C))
            assert costs.macs(new, past + new) == {"expanded": expanded, "absorbed": absorbed}
            cheaper = "absorbed" if absorbed < expanded else "expanded"
            assert costs.cheaper(new, [past]) == cheaper
            assert LatentAttention(M, H, **sizes).form(new, [past]) == cheaper


def test_rows_of_many_lengths_share_the_form_that_is_cheaper_in_sum() -> None:
    costs = make(kv_lora_rank=40).costs
    assert (costs.cheaper(9, [0]), costs.cheaper(9, [500])) == ("expanded", "absorbed")
    assert (costs.cheaper(9, [0] * 2 + [3]), costs.cheaper(9, [0] * 2 + [500])) == ("expanded", "absorbed")
    assert costs.cheaper(1, []) == "expanded"


@pytest.mark.parametrize(("kind", "form"), [("direct", "expanded"), ("small rank", "absorbed")])
def test_without_a_cache_the_smaller_pair_wins_at_every_length(kind: str, form: str) -> None:
    mla = make(**KINDS[kind])
    assert mla.form(1) == mla.form(100) == form
    macs = mla.costs.macs(100, 100)
    assert min(macs, key=lambda name: macs[name]) == form
    x = torch.randn(B, T, M)
    assert_same_bits(mla(x), mla(x, form=form))


def test_the_planner_counts_the_same_parameters() -> None:
    for rank in (None, 13):
        layer, mla = latent_layer(M, H, q_lora_rank=rank, **SIZES), LatentAttention(M, H, q_lora_rank=rank, **SIZES)
        assert sum(p.numel() for p in mla.parameters()) == layer.parameter_count()
        assert layer.cached_numbers() == C + R


# --- positions, masks, parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_positions_are_those_given(form: Any) -> None:
    mla, x = make().double(), torch.randn(B, T, M).double()
    positions = torch.stack([torch.arange(T) * 3, torch.randperm(T)])
    exact = torch.cat([textbook(mla, x[b : b + 1], positions=positions[b]) for b in range(B)])
    assert torch.allclose(mla(x, positions=positions, form=form), exact, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mla(x, form=form), exact, atol=1e-2)
    out, _ = mla(x, positions=positions, cache=Held.of(mla, B), form=form)
    assert torch.allclose(out, mla(x, positions=positions, mask=headwise.causal()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_padding_cannot_influence(form: Any) -> None:
    mla, x, lengths = make(), torch.randn(B, T, M), torch.tensor([T, 8])
    mask = headwise.causal() & headwise.lengths(lengths)
    clean = mla(x, mask=mask, form=form)
    for poison in (torch.nan, torch.inf, 1e4):
        spoilt = x.clone()
        spoilt[1, 8:] = poison
        out = mla(spoilt, mask=mask, form=form)
        assert_same_bits(out[0], clean[0])
        assert_same_bits(out[1, :8], clean[1, :8])
    seen = x.clone()
    seen[1, 3] = torch.nan
    assert bool(mla(seen, mask=mask, form=form)[1, 3:].isnan().all())


def test_another_rotary_part_plugs_in() -> None:
    x = torch.randn(B, T, M)
    halves = make(rotary=Rotary(R, base=500.0))
    assert torch.allclose(halves(x), halves(x, form="absorbed"), atol=1e-5)
    neighbours = make()
    neighbours.load_state_dict(halves.state_dict())
    assert not torch.allclose(halves(x), neighbours(x), atol=1e-2)


def test_dropout_is_on_in_training_only() -> None:
    mla, x = make(dropout=0.5), torch.randn(B, T, M)
    assert not torch.allclose(mla(x), mla(x), atol=1e-3)
    mla.eval()
    assert_same_bits(mla(x), mla(x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (3, 0), (1, 1)])
def test_shape_in_equals_shape_out(batch: int, length: int, form: Any) -> None:
    assert make()(torch.randn(batch, length, M), form=form).shape == (batch, length, M)


def test_a_copy_and_a_pickle_are_the_same_module() -> None:
    mla, x = make(q_lora_rank=13, rotary=Rotary(R, frequencies=(1.0, 0.3, 0.01))), torch.randn(B, T, M)
    assert_same_bits(copy.deepcopy(mla)(x), mla(x))
    assert_same_bits(pickle.loads(pickle.dumps(mla))(x), mla(x))


# torch's RMSNorm says that float32 weights and bfloat16 input, which is what autocast makes, run unfused.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("form", FORMS)
def test_autocast_runs_in_the_lower_precision_and_gives_close_numbers(form: Any) -> None:
    mla, x = make(q_lora_rank=13), torch.randn(B, T, M)
    exact = mla(x, mask=headwise.causal())
    with torch.autocast("cpu", torch.bfloat16):
        out = mla(x, mask=headwise.causal(), form=form)
    assert out.dtype == torch.bfloat16
    assert rms(out, exact) < 0.05 * rms(exact, torch.zeros_like(exact))


def test_the_module_says_its_sizes() -> None:
    text = repr(make(q_lora_rank=13))
    assert "23, 3, q_lora_rank=13, kv_lora_rank=17, nope_dim=7, rope_dim=6, value_dim=11" in text
    assert "q_lora_rank" not in repr(make())


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank is at least 1; got 0"),
        ({"q_lora_rank": -1}, ValueError, "q_lora_rank is at least 1; got -1"),
        ({"nope_dim": 2.0}, TypeError, "nope_dim is an int; got 2.0"),
        ({"value_dim": None}, TypeError, "value_dim is an int; got None"),
        ({"rope_dim": 7}, ValueError, "rotary positions turn pairs"),
    ],
)
def test_wrong_sizes_are_named(sizes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        LatentAttention(M, H, **SIZES | sizes)


@pytest.mark.unchecked
def test_wrong_calls_are_named_and_leave_the_cache_alone() -> None:
    mla, x = make(), torch.randn(B, T, M)
    cache, across = Held.of(mla, B), Held.of(mla, B)
    across.causal = False
    for arguments, error, text in (
        ({"form": "folded"}, ValueError, 'form is "auto", "expanded" or "absorbed"; got \'folded\''),
        ({"lengths": [3, 4]}, ValueError, "lengths needs cache="),
        ({"cache": across}, ValueError, "latent attention attends to its own past, so its cache is causal"),
        ({"cache": object()}, TypeError, "object has no lengths, append, attend"),
        ({"cache": Held.of(mla, 3)}, ValueError, "x B = 2, the cache has 3 rows"),
        ({"positions": torch.arange(3), "cache": cache}, ValueError, "positions are (T,) or (B, T)"),
    ):
        with pytest.raises(error, match=re.escape(text)):
            mla(x, **arguments)
    with pytest.raises(ValueError, match=r"x is \(B, T, d_model\) with d_model = 23"):
        mla(torch.randn(B, T, M + 1), cache=cache)
    assert cache.lengths == [0, 0]


@pytest.mark.unchecked
def test_a_cache_whose_values_have_another_size_is_named() -> None:
    mla, cache = make(), Held(B, 64, C + R, value_dim=C + 1)
    with pytest.raises(ValueError, match=rf"it gave values of {C + 1}; make it with value_dim={C}"):
        mla(torch.randn(B, 1, M), cache=cache, form="absorbed")


def test_the_probe_says_that_it_cannot_see_into_a_cache() -> None:
    mla = make()
    with pytest.raises(RuntimeError, match="was called with a cache"), probe(nn.Sequential(mla)):
        mla(torch.randn(B, T, M), cache=Held.of(mla, B))
    mla(torch.randn(B, T, M), cache=Held.of(mla, B))  # and is gone again
