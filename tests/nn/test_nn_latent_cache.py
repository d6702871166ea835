"""LatentAttention with a cache: chunks, rows of uneven length, padding, masks, caches that round or hide their keys."""

import copy
from typing import Any

import pytest
import torch
from latent_cases import FORMS, SIZES, B, H, Held, M, Sealed, T, make, rms, textbook
from torch import Tensor

import headwise
from headwise import LatentAttention
from headwise.cache import RollingCache, StaticCache
from headwise.nn import InnerAttention
from headwise.nn.inner_attention import InnerFunction
from headwise.testing import assert_same_bits

C, R = SIZES["kv_lora_rank"], SIZES["rope_dim"]
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def fed(mla: LatentAttention, x: Tensor, chunks: list[int], **how: Any) -> tuple[Tensor, Held]:
    """The outputs of a text fed in chunks to an empty cache."""
    cache, outs = Held.of(mla, x.shape[0]), []
    for chunk in x.split(chunks, dim=1):
        out, returned = mla(chunk, cache=cache, **how)
        assert returned is cache
        outs.append(out)
    return torch.cat(outs, dim=1), cache


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("chunks", [[19], [1] * 19, [11, 1, 1, 6], [4, 15], [7, 1, 11]], ids=str)
def test_a_text_in_chunks_is_the_text_at_once(chunks: list[int], form: Any) -> None:
    mla, x = make(q_lora_rank=13), torch.randn(B, T, M)
    exact = textbook(copy.deepcopy(mla).double(), x.double(), CAUSAL)
    out, cache = fed(mla, x, chunks, form=form)
    assert rms(out, exact) <= 2 * rms(textbook(mla, x, CAUSAL), exact)
    assert cache.lengths == [T] * B
    assert cache.appended == [(B, 1, chunk, C + R) for chunk in chunks]


def test_the_cache_is_the_same_whatever_the_form() -> None:
    mla, x = make(), torch.randn(B, T, M)
    one, other = (fed(mla, x, [11, 8], form=form)[1] for form in FORMS)
    assert_same_bits(one.keys, other.keys)


@pytest.mark.parametrize("step", [1, 4], ids=["token", "chunk"])
@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_each_row_goes_on_from_its_own_length(form: Any, step: int) -> None:
    """A batch of padded prompts, then further tokens behind each row's real end; every row as if it were alone."""
    mla, lengths = make(q_lora_rank=13), [9, 4, 1]
    prompt, more = torch.randn(3, 9, M), torch.randn(3, 2 * step, M)
    cache = Held.of(mla, 3)
    for row, length in enumerate(lengths):
        prompt[row, length:] = torch.nan  # padding
    first, _ = mla(prompt, cache=cache, form="expanded")
    cache.keep(lengths)
    outs = [mla(chunk, cache=cache, form=form)[0] for chunk in more.split(step, dim=1)]
    assert cache.lengths == [length + 2 * step for length in lengths]
    for row, length in enumerate(lengths):
        text = torch.cat((prompt[row, :length], more[row]))[None]
        causal = torch.ones(len(text[0]), len(text[0]), dtype=torch.bool).tril()
        exact = textbook(copy.deepcopy(mla).double(), text.double(), causal)
        ours = torch.cat([first[row, :length], *(out[row] for out in outs)])[None]
        assert rms(ours, exact) <= 2 * rms(textbook(mla, text, causal), exact) + 1e-7


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_padding_behind_a_prompt_or_a_chunk_is_not_held(form: Any) -> None:
    """`lengths` say what is real: the rest, NaN even, is neither kept nor seen, and gives 0, whatever the form."""
    mla, x, cache = make(), torch.randn(3, T, M), Held.of(make(), 3)
    pieces, ends = [(0, [9, 4, 1]), (9, [2, 6, 3])], [0, 0, 0]
    for at, counts in pieces:
        chunk = x[:, at : at + 9].clone()
        for row, count in enumerate(counts):
            chunk[row, count:] = torch.nan
        out, _ = mla(chunk, cache=cache, lengths=counts, form=form)
        for row, count in enumerate(counts):
            text = torch.cat([x[row, a : a + c[row]] for a, c in pieces[: 1 + (at > 0)]])[None]
            alone = mla(text, mask=headwise.causal())[0, ends[row] :]
            assert torch.allclose(out[row, :count], alone, atol=1e-5)
            assert bool((out[row, count:] == 0).all())
            ends[row] += count
    assert cache.lengths == ends == [11, 10, 4]


@pytest.mark.parametrize("form", ["auto", *FORMS])
def test_a_mask_narrows_what_a_cache_lets_be_seen(form: Any) -> None:
    mla, x, mask = make(), torch.randn(B, T, M), headwise.window(4)
    whole = mla(x, mask=mask)
    out, _ = fed(mla, x, [9, 1, 9], form=form, mask=mask)
    assert torch.allclose(out, whole, atol=1e-5)
    assert not torch.allclose(whole, mla(x, mask=headwise.causal()), atol=1e-2)


@pytest.mark.unchecked
def test_a_mask_over_uneven_rows_is_left_to_the_cache() -> None:
    mla, cache, x, mask = make(), Held.of(make(), B), torch.randn(B, T, M), headwise.window(4)
    mla(x, cache=cache, lengths=[3, 9])
    masks: list[Any] = []
    cache.attend = lambda query, mask=None, **options: masks.append(mask) or query[..., :C]  # type: ignore
    mla(x, cache=cache, mask=mask)
    assert len(masks) == 1 and masks[0] is mask
    with pytest.raises(ValueError, match=r"a mask has its place in every row alike, while the rows hold \[22, 28\]"):
        mla(x, cache=cache, mask=mask, form="expanded")
    assert cache.lengths == [22, 28]


def test_a_cache_that_hides_its_keys_is_attended_to_absorbed() -> None:
    mla, x = make(), torch.randn(B, T, M)
    cache, plain = Sealed.of(mla, B), Held.of(mla, B)
    assert mla.form(1, [0] * B) == mla.form(T - 1, [1] * B) == "expanded"  # what auto would rather take
    for chunk in x.split([1, T - 1], dim=1):
        assert_same_bits(mla(chunk, cache=cache)[0], mla(chunk, cache=plain, form="absorbed")[0])
    for sealed in (cache, Sealed.of(mla, B)):  # an empty one too: what it may let be seen is not known
        lengths = list(sealed.lengths)
        with pytest.raises(ValueError, match=r'Sealed has no keys to read; form="absorbed" leaves that'):
            mla(x, cache=sealed, form="expanded")
        assert sealed.lengths == lengths  # an error leaves the cache as it was


@torch.no_grad()
@pytest.mark.unchecked
def test_a_cache_without_all_keys_is_not_expanded() -> None:
    mla, x = make(), torch.randn(B, T, M)
    dropping = StaticCache(B, 1, C + R, C, capacity=T, shared=True)
    mla(x[:, :9], cache=dropping)
    dropping.keep([0, 3, 8])
    chunked: Any = Held.of(mla, B)
    chunked.chunk = 4
    for cache, new, why in (
        (dropping, x[:, 9:11], "StaticCache has dropped tokens"),
        (chunked, x[:, :5], "Held takes 4 tokens at a time"),
    ):
        lengths = cache.lengths
        with pytest.raises(ValueError, match=why + r'; form="absorbed"'):
            mla(new, cache=cache, form="expanded")
        assert cache.lengths == lengths
    assert mla(x[:, :4], cache=chunked, form="expanded")[1].lengths == [4] * B


@torch.no_grad()
def test_a_prompt_longer_than_a_cache_takes_at_once_goes_in_piece_by_piece() -> None:
    mla, x = make(), torch.randn(B, T, M)
    cache = RollingCache(B, 1, C + R, C, window=5, chunk=4, shared=True)
    out = torch.cat([mla(x[:, :1], cache=cache)[0], mla(x[:, 1:], cache=cache, lengths=[T - 1, 6])[0]], dim=1)
    whole = mla(x, mask=headwise.window(5))
    torch.testing.assert_close(out[0], whole[0], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(out[1, :7], whole[1, :7], rtol=2e-5, atol=2e-6)
    assert cache.lengths == [T, 7]


def test_a_prompt_is_attended_to_as_it_is_before_a_cache_rounds_it() -> None:
    mla, x, cache = make(), torch.randn(B, T, M), Held.of(make(), B)
    append = cache.append
    cache.append = lambda key, **how: append(key.bfloat16().float(), **how)  # type: ignore[method-assign]
    assert_same_bits(mla(x[:, :9], cache=cache)[0], mla(x[:, :9], mask=headwise.causal()))
    rounded, exact = mla(x[:, 9:], cache=cache, form="expanded")[0], mla(x, mask=headwise.causal())[:, 9:]
    assert not torch.allclose(rounded, exact, atol=1e-4)  # further tokens see what is held
    assert torch.allclose(rounded, exact, atol=0.2)


@pytest.mark.parametrize("form", FORMS)
def test_the_options_in_use_reach_the_cache(form: Any) -> None:
    mla, x = make(scale=0.2), torch.randn(B, T, M)
    mla.inner = InnerAttention(scale=0.2, softcap=1.5, sinks=torch.randn(H))
    out, _ = fed(mla, x, [12, 7], form=form)
    assert torch.allclose(out, mla(x, mask=headwise.causal()), atol=1e-5)
    mla.inner = InnerAttention(scale=0.2)
    assert not torch.allclose(out, mla(x, mask=headwise.causal()), atol=1e-2)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_scale_of_a_replaced_inner_part_is_that_of_both_forms(scale: float | None) -> None:
    """Without one of its own it takes that of a key's size, which is the expanded key's whatever the form."""
    mla, x = make(), torch.randn(B, T, M)
    mla.inner = InnerAttention(scale=scale)
    exact = mla.double()(x.double(), mask=headwise.causal(), form="expanded").float()
    mla = mla.float()
    outs = [mla(x, mask=headwise.causal(), form=form) for form in FORMS] + [fed(mla, x, [11, 8], form="absorbed")[0]]
    with torch.no_grad():
        cache = StaticCache(B, num_kv_heads=1, head_dim=C + R, value_dim=C, shared=True, capacity=T)
        first, _ = mla(x[:, :-1], cache=cache)
        outs.append(torch.cat((first, mla(x[:, -1:], cache=cache, form="absorbed")[0]), dim=1))
    for out in outs:
        assert torch.allclose(out, exact, atol=1e-5)


@torch.no_grad()
def test_steps_after_an_exchange_of_the_expansion_use_the_new_weight() -> None:
    """A step keeps views of kv_b_proj; another parameter in its place, or other numbers in it, must be seen."""
    mla, other, x = make(), make(), torch.randn(B, T, M)

    def stepped() -> Tensor:
        cache = StaticCache(B, num_kv_heads=1, head_dim=C + R, value_dim=C, shared=True, capacity=T)
        first, _ = mla(x[:, :-2], cache=cache)
        return torch.cat([first, *(mla(token, cache=cache, form="absorbed")[0] for token in x[:, -2:].split(1, 1))], 1)

    before = stepped()
    mla.kv_b_proj.weight = torch.nn.Parameter(other.kv_b_proj.weight.clone())
    exchanged = stepped()
    exact = textbook(copy.deepcopy(mla).double(), x.double(), CAUSAL)
    assert (before - exact).abs().max() > 0.1 and torch.allclose(exchanged.double(), exact, atol=1e-4)
    mla.kv_b_proj.weight.mul_(-0.5)
    assert torch.allclose(stepped().double(), textbook(copy.deepcopy(mla).double(), x.double(), CAUSAL), atol=1e-4)


@pytest.mark.unchecked
def test_the_absorbed_form_needs_an_inner_part_that_says_its_scale() -> None:
    mla, x = make(), torch.randn(B, T, M)
    mla.uncached = "absorbed"  # as where the rank is small
    assert not torch.equal(mla(x), mla(x, form="expanded"))
    mla.inner = InnerFunction(headwise.attention)
    assert torch.equal(mla(x), mla(x, form="expanded"))
    mla.inner = Plain()
    assert torch.equal(mla(x), mla(x, form="expanded"))
    with pytest.raises(NotImplementedError, match=r'Plain does not say what it computes; .* form="expanded"'):
        mla(x, form="absorbed")


class Plain(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Any = None) -> Tensor:
        return headwise.attention(query, key, value, mask=mask)
