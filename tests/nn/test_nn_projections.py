"""Whatever answers for a projection (adapter, hook, subclass, parametrization) is used everywhere, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from latent_cases import B, H, M, Sealed, T, make
from projection_cases import ANSWERS, BIASED, answered, linear_like, no_change
from torch import Tensor, nn

import headwise
from headwise import LatentAttention, MultiHeadAttention, reshape
from headwise.cache import RollingCache, StaticCache
from headwise.nn import output_projections, to_torch
from headwise.reshape.repair.linear_matrix import Matrix
from headwise.testing import assert_same_bits

ALL = ANSWERS | BIASED
WEIGHT_TELLS = ("parametrization",)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def close(one: Tensor, other: Tensor) -> bool:
    """Two forms of one function in float32: within 64 ulps of the largest number (measured: at most 9)."""
    return bool((one - other).abs().max() <= 64 * torch.finfo(one.dtype).eps * other.abs().max())


def cache_of(mla: LatentAttention, rows: int = B) -> StaticCache:
    return StaticCache(rows, 1, mla.kv_lora_rank + mla.rope_dim, mla.kv_lora_rank, capacity=64, shared=True)


def stepped(mla: LatentAttention, x: Tensor, cache: Any, first: int = 7) -> Tensor:
    """A prompt of 7 tokens, a chunk, and single tokens."""
    pieces = [x[:, :first], x[:, first : first + 3], *x[:, first + 3 :].split(1, dim=1)]
    return torch.cat([mla(piece, cache=cache)[0] for piece in pieces], dim=1)


# --- latent attention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ALL)
@torch.no_grad()
def test_decoding_of_latent_attention_is_the_model_that_reads_the_prompt(answer: str) -> None:
    for low in ({}, {"q_lora_rank": 13}):
        for name in ("kv_b_proj", "kv_a_proj_with_mqa", "q_b_proj" if low else "q_proj", "o_proj"):
            if answer == "bias" and name != "kv_b_proj":
                continue
            plain = make(**low).eval()
            mla, x = answered(plain, name, ALL[answer]), torch.randn(B, T, M)
            full = mla(x, mask=headwise.causal(), form="expanded")
            assert not close(full, plain(x, mask=headwise.causal(), form="expanded")), f"{name} answers nothing"
            assert close(mla(x, mask=headwise.causal()), full), name
            assert close(stepped(mla, x, cache_of(mla)), full), f"decoding with {name} answered for"


@pytest.mark.parametrize("answer", ALL)
@torch.no_grad()
def test_the_absorbed_form_is_right_or_refused(answer: str) -> None:
    mla, x = answered(make(), "kv_b_proj", ALL[answer]), torch.randn(B, T, M)
    caches: list[Callable[[], Any]] = [
        lambda: None,
        lambda: cache_of(mla),
        lambda: Sealed.of(make(), B),
        lambda: RollingCache(B, 1, mla.kv_lora_rank + mla.rope_dim, mla.kv_lora_rank, window=50, shared=True),
    ]
    full = mla(x, mask=headwise.causal(), form="expanded")
    for made in caches:
        cache, form = made(), "auto" if made in caches[2:] else "absorbed"
        run: Callable[[], Any] = lambda cache=cache, form=form: mla(  # noqa: E731
            x, mask=headwise.causal(), cache=cache, form=form
        )
        if answer in WEIGHT_TELLS:
            out = run()
            assert close(out if cache is None else out[0], full)
            continue
        with pytest.raises(TypeError, match=r"multiplies by the weight of kv_b_proj.* got .*merge adapters"):
            run()
        assert cache is None or not any(cache.lengths), "refused before the cache has changed"
    for read in (mla.up_matrices, lambda: mla._to_latent(torch.randn(B, H, T, mla.nope_dim))):
        if answer not in WEIGHT_TELLS:
            with pytest.raises(TypeError, match="the absorbed form multiplies by the weight of kv_b_proj"):
                read()
    assert mla.form(1, held=[500]) == ("absorbed" if answer in WEIGHT_TELLS else "expanded")


@pytest.mark.parametrize("answer", ALL)
@torch.no_grad()
def test_some_heads_of_an_expansion_are_those_of_all(answer: str) -> None:
    mla = answered(make(), "kv_b_proj", ALL[answer])
    key = torch.randn(B, 1, T, mla.kv_lora_rank + mla.rope_dim)
    keys, values = mla.expand(key)
    for first, last in ((0, 1), (1, H), (0, H), (1, 2)):
        some = mla.expand(key, (first, last))
        assert close(some[0], keys[:, first:last]) and close(some[1], values[:, first:last])


def test_hooks_of_a_profiler_change_no_form() -> None:
    """They are registered for all modules at once, and only listen."""
    mla, x = make().eval(), torch.randn(1, T, M)
    with torch.no_grad():
        expected = stepped(mla, x, cache_of(mla, 1))
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
        try:
            seen = stepped(mla, x, cache_of(mla, 1))
            assert mla.form(1, held=[500]) == "absorbed"
        finally:
            handle.remove()
    assert close(seen, expected)


# --- multi-head attention ---------------------------------------------------------------------------------------------


def module(bias: bool = True) -> MultiHeadAttention:
    mha = MultiHeadAttention(12, 6, num_kv_heads=3, bias=bias)
    for parameter in mha.parameters():
        nn.init.normal_(parameter, std=0.4)
    return mha.eval()


def summed(mha: MultiHeadAttention, x: Tensor) -> Tensor:
    """The textbook's sum over heads, by the matrices of `head`."""
    heads = [mha.head(i) for i in range(mha.num_heads)]
    out = torch.zeros_like(x)
    for one in heads:
        assert one.b_Q is not None and one.b_K is not None and one.b_V is not None
        q, k, v = x @ one.W_Q + one.b_Q, x @ one.W_K + one.b_K, x @ one.W_V + one.b_V
        out = out + torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v @ one.W_O
    bias: Any = mha.o_proj.bias
    return out + bias


READERS: dict[str, Callable[[MultiHeadAttention, Tensor], Tensor]] = {
    "head": summed,
    "to_torch": lambda mha, x: to_torch(mha)(x, x, x)[0],
    "prune": lambda mha, x: reshape.prune_module(mha, [0, 1])(x),
}
"""Read the weights of a module, and give what they make of x."""


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("answer", ANSWERS)
@torch.no_grad()
def test_readers_of_a_module_are_right_or_refuse(answer: str, projection: str) -> None:
    x = torch.randn(2, 5, 12)
    mha = answered(module(), projection, ANSWERS[answer])
    expected = {"head": mha(x), "to_torch": mha(x), "prune": mha(x, gate=torch.tensor([0, 0, 1.0, 1, 1, 1]))}
    for name, read in READERS.items():
        assert close(read(module_of_calls(mha), x), expected[name]), f"{name} of a plain module"
        if answer in WEIGHT_TELLS and name != "prune":
            assert close(read(mha, x), expected[name]), name
            continue
        rule = rf"{name}.* {projection}.*(got .*may compute something else|computed from others)"
        with no_change(mha), pytest.raises(TypeError, match=rule):
            read(mha, x)


def module_of_calls(mha: MultiHeadAttention) -> MultiHeadAttention:
    """The same module of plain linear layers, made of what the calls of its projections give."""
    plain = module()
    for name in PROJECTIONS:
        setattr(plain, name, linear_like(getattr(mha, name), 12))
    return plain


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_trace_is_the_modules_own_call(answer: str, projection: str) -> None:
    x = torch.randn(2, 5, 12)
    mha = answered(module(), projection, ANSWERS[answer])
    trace = headwise.trace(mha, x)
    assert_same_bits(trace["output"].tensor, mha(x))
    assert (trace.mixing is None) == (projection == "o_proj" and answer not in WEIGHT_TELLS)
    stage = trace["output" if projection == "o_proj" else projection]
    assert (f"{projection}(" in stage.formula) == (answer not in WEIGHT_TELLS)
    assert ("o_proj is no plain linear layer" in str(trace)) == (trace.mixing is None)
    if trace.mixing is not None and projection == "o_proj":
        again = headwise.trace(module_of_calls(mha), x).mixing
        assert again is not None
        assert torch.tensor(trace.mixing.share) == pytest.approx(torch.tensor(again.share), abs=1e-4)


@pytest.mark.parametrize("answer", ANSWERS)
@torch.no_grad()
def test_the_output_projection_is_what_answers(answer: str) -> None:
    x = torch.randn(1, 5, 12)
    mha = answered(module(), "o_proj", ANSWERS[answer])
    names = output_projections(mha, lambda model: model(x))
    assert names == {"": "o_proj"}
    wrapped = nn.Sequential(mha, nn.Linear(12, 12))
    assert output_projections(wrapped, lambda model: model(x)) == {"0": "0.o_proj"}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_matrix_is_solved_only_where_its_weight_is_all(answer: str) -> None:
    for sizes in ((5, 7), (7, 7)):
        plain = nn.Linear(*sizes)
        assert Matrix.of(plain, "o").by_rows
        changed = ANSWERS[answer](copy.deepcopy(plain))
        if answer.startswith("hook"):  # headwise's own hooks read the module while it is solved
            assert Matrix.of(changed, "o").W.shape == sizes
            continue
        with pytest.raises(TypeError, match=r"merge adapters|computed from others"):
            Matrix.of(changed, "o")


# --- quantised layers -------------------------------------------------------------------------------------------------


class Quantised(nn.Module):
    """As torch's quantised linear layers: weight and bias are methods, and there are no parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        assert linear.bias is not None
        scale = float(linear.weight.detach().abs().max()) / 127
        numbers = (linear.weight.detach() / scale).round().to(torch.int8)
        self.scale, self.numbers, self.added = scale, numbers, linear.bias.detach().clone()

    def weight(self) -> Tensor:
        return self.numbers.float() * self.scale

    def bias(self) -> Tensor:
        return self.added

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight(), self.added)


@pytest.mark.parametrize("projection", PROJECTIONS)
@torch.no_grad()
def test_quantised_projections_run_and_what_reads_them_says_so(projection: str) -> None:
    x = torch.randn(2, 5, 12)
    mha = answered(module(), projection, Quantised)
    assert close(mha(x, mask=headwise.causal()), module_of_calls(mha)(x, mask=headwise.causal()))
    cache = StaticCache(2, 3, 2, capacity=9)
    steps = torch.cat([mha(x[:, i : i + 1], cache=cache)[0] for i in range(5)], dim=1)
    assert close(steps, mha(x, mask=headwise.causal()))
    for read in (*READERS.values(), headwise.trace):
        with pytest.raises(TypeError, match=rf"{projection}.*Quantised.*quanti") as caught:
            read(mha, x)
        assert "\n" not in str(caught.value)
    assert output_projections(mha, lambda model: model(x)) == {"": "o_proj"}


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*:UserWarning")
@torch.no_grad()
def test_torchs_dynamic_quantisation() -> None:
    quantize = torch.ao.quantization.quantize_dynamic
    x = torch.randn(2, 5, 12)
    mha = quantize(module(), {nn.Linear}, dtype=torch.qint8)
    exact = module_of_calls(mha)(x)
    assert (mha(x) - exact).abs().max() < 0.05 * exact.abs().max()  # its activations are rounded to 8 bits, too
    for read in (mha.head, lambda _: to_torch(mha), lambda _: headwise.trace(mha, x)):
        with pytest.raises(TypeError, match=r"_proj.*Linear.*quantis") as caught:
            read(0)
        assert "\n" not in str(caught.value)
    mla, x = quantize(make(), {nn.Linear}, dtype=torch.qint8), torch.randn(B, T, M)
    full = mla(x, mask=headwise.causal())
    # What is rounded depends on the tokens of a call, so pieces are the whole up to that.
    assert (stepped(mla, x, cache_of(mla)) - full).abs().max() < 0.2 * full.abs().max()
