"""The attention function's contract: what it takes, what it refuses, and the text of each refusal."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_measure import exact_attention
from hf_models import BY_NAME, VOCAB, B, inputs, logits, token_ids
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from headwise.hf import ModelError
from headwise.hf.attention.function import HARMLESS, headwise_attention
from headwise.hf.attention.mask import StructuralMask, headwise_mask
from headwise.hf.returned import attentions_are_collected
from headwise.ops.masks import causal, segments


class SomeAttention(nn.Module):
    is_causal = True


class SomeCrossAttention(nn.Module):
    """It does not say whether it is causal."""


H, K, S, D, V = 4, 2, 7, 6, 5


def qkv(T: int = 5, B: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, D), torch.randn(B, K, S, D), torch.randn(B, K, S, V)


def call(*args: Any, module: nn.Module | None = None, **kwargs: Any) -> Tensor:
    return headwise_attention(module or SomeAttention(), *args, **kwargs)[0]


def test_it_is_registered_under_its_name() -> None:
    assert AttentionInterface()["headwise"] is headwise_attention
    assert AttentionMaskInterface()["headwise"] is headwise_mask


def test_the_parameters_are_named_as_transformers_calls_them() -> None:
    names = list(inspect.signature(headwise_attention).parameters)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"dropout", "scaling", "is_causal", "softcap", "s_aux", "position_bias", "kwargs"} < set(names)
    q, k, v = qkv()
    out = headwise_attention(SomeAttention(), query=q, key=k, value=v, attention_mask=None)[0]
    assert torch.equal(out, call(q, k, v, None))


def test_the_result_is_laid_out_as_transformers_wants_it() -> None:
    q, k, v = qkv()
    out, weights = headwise_attention(SomeAttention(), q, k, v, None, is_causal=False)
    assert out.shape == (3, 5, H, V) and out.is_contiguous() and weights is None


@pytest.mark.parametrize("T", [1, 5])
def test_every_option_against_the_definition(T: int) -> None:
    q, k, v = qkv(T)
    seen = torch.rand(3, 1, T, S) < 0.7
    seen[..., 0] = True
    options = dict(scaling=0.3, softcap=1.5, s_aux=torch.randn(H), position_bias=torch.randn(1, H, T, S))
    for dropped in (None, *options):
        arguments = {name: x for name, x in options.items() if name != dropped}
        ours, weights = headwise_attention(SomeAttention(), q, k, v, seen, output_attentions=True, **arguments)
        exact, exact_weights = exact_attention(SomeAttention(), q, k, v, seen, **arguments)
        torch.testing.assert_close(ours, exact.float(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(weights, exact_weights.float(), atol=1e-5, rtol=1e-5)


def test_without_a_mask_is_causal_says_what_is_seen() -> None:
    q, k, v = qkv(S)
    full, causal = call(q, k, v, None, is_causal=False), call(q, k, v, None, is_causal=True)
    assert not torch.allclose(full, causal)
    module = SomeAttention()
    module.is_causal = False
    assert torch.equal(call(q, k, v, None, module=module), full)
    assert torch.equal(call(q, k, v, None, module=nn.Module()), causal), "a module that does not say is causal"
    assert torch.equal(call(q, k, v, None, module=SomeCrossAttention()), full), "but for cross-attention"
    assert torch.equal(call(q[:, :, -1:], k, v, None, is_causal=True), call(q[:, :, -1:], k, v, None, is_causal=False))


def test_a_position_bias_is_cut_with_the_unused_room_of_a_cache() -> None:
    q, k, v = qkv(5)
    bias = torch.randn(1, H, 5, S)
    out = call(q, k, v, None, position_bias=bias)
    torch.testing.assert_close(out, call(q, k[:, :, :5], v[:, :, :5], None, position_bias=bias[..., :5]))


def test_sliding_window_is_not_read() -> None:
    """The mask says it all; the number counts in two ways among the models, and one layer may pass it for another."""
    q, k, v = qkv(S)
    assert torch.equal(call(q, k, v, None, sliding_window=2), call(q, k, v, None))


def test_a_batch_of_one_serves_all() -> None:
    q, k, v = qkv()
    out = call(q[:1], k, v, None)
    assert torch.equal(out, call(q[:1].expand(3, -1, -1, -1), k, v, None))
    assert torch.equal(call(q, k[:1], v[:1], None)[1:2], call(q[1:2], k[:1], v[:1], None))


def test_a_model_may_repeat_its_keys_for_all_heads() -> None:
    """It passes as many key-value heads as query heads although its config has groups; nothing else may be uneven."""
    module = SomeAttention()
    module.num_key_value_groups, module.config = H // K, SimpleNamespace(num_attention_heads=H)  # type: ignore[assignment]
    q, k, v = qkv()
    mask = torch.rand(3, 1, 5, S) > 0.3
    repeated = (x.repeat_interleave(H // K, 1) for x in (k, v))
    torch.testing.assert_close(call(q, *repeated, mask, module=module), call(q, k, v, mask, module=module))
    with pytest.raises(ModelError, match="passes 2 query heads and 2 key-value heads, and the model has 2 query heads"):
        call(q[:, :2], k, v, mask, module=module)


def test_attentions_have_a_column_for_every_key() -> None:
    """Also for the unused room of a static cache, which a causal call without a mask does not see."""
    q, k, v = qkv(3)
    out, weights = headwise_attention(SomeAttention(), q, k, v, None, output_attentions=True)
    assert weights.shape == (3, H, 3, S) and not weights[..., 3:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, H, 3))
    assert torch.equal(out, call(q, k[:, :, :3], v[:, :, :3], None))


def test_a_row_that_may_attend_nothing_is_zero() -> None:
    q, k, v = qkv()
    lowest = torch.finfo(torch.float32).min
    for nothing in (False, lowest, -torch.inf):
        dtype = torch.bool if nothing is False else torch.float32
        mask = torch.ones(3, 1, 5, S, dtype=dtype) if dtype == torch.bool else torch.zeros(3, 1, 5, S)
        mask[1, :, 2] = nothing
        out = call(q, k, v, mask)
        assert not out[1, 2].any() and out[1, 3].all() and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_lowest_number_of_any_dtype_hides_a_key(dtype: torch.dtype) -> None:
    """Models add it in the dtype of their scores; a row of it alone gives 0, as one of False does."""
    q, k, v = (x.to(dtype) for x in qkv())
    seen = torch.rand(3, 1, 5, S, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[1, :, 2] = False
    added = torch.zeros(3, 1, 5, S, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    out = call(q, k, v, added)
    assert torch.equal(out, call(q, k, v, seen)) and not out[1, 2].any() and out[1, 3].any()


def test_packed_sequences_by_their_ends_or_numbers() -> None:
    """cu_seq_lens_*, as flash attention takes them, and seq_idx: honoured, where eager silently ignores them."""
    q, k, v = torch.randn(1, H, S, D), torch.randn(1, K, S, D), torch.randn(1, K, S, V)
    ends = torch.tensor([0, 3, S], dtype=torch.int32)
    apart = torch.cat([call(*(x[:, :, i:j] for x in (q, k, v)), None) for i, j in ((0, 3), (3, S))], 1)
    packed = call(q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=4, max_length_k=4)
    torch.testing.assert_close(packed, apart)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    torch.testing.assert_close(call(q, k, v, None, seq_idx=numbers), apart)
    with pytest.raises(ValueError, match=r"SomeAttention passes cu_seq_lens_q with query \(3, .* come as one row"):
        call(*qkv(), None, cu_seq_lens_q=ends)


def test_sequence_numbers_count_in_every_row() -> None:
    """Beside a mask of sequences the numbers change nothing, if in each row a sequence of the mask begins with each."""
    q, k, v = (x[:2] for x in qkv(S))
    masked = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2]])
    mask = StructuralMask(causal() & segments(masked), (2, 1, S, S))
    coarser = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]])
    for numbers in (masked, coarser):
        torch.testing.assert_close(call(q, k, v, mask, seq_idx=numbers), call(q, k, v, mask))
    for row in range(2):
        other = masked.clone()
        other[row] = torch.tensor([0, 1, 1, 1, 1, 1, 1])
        with pytest.raises(ValueError, match="do not end where these do"):
            call(q, k, v, mask, seq_idx=other)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "head_mask", "anything_new"])
def test_an_argument_that_may_change_the_result_is_refused(name: str) -> None:
    text = (
        f"SomeAttention passes '{name}' to its attention function, which headwise does not know and which may change "
        'the result; run this model with model.set_attn_implementation("eager"), or leave the argument out if it '
        "came from your own call"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        call(*qkv(), None, **{name: torch.ones(1)})
    call(*qkv(), None, **{name: None})


def test_harmless_arguments_change_nothing() -> None:
    q, k, v = qkv()
    assert torch.equal(call(q, k, v, None, **dict.fromkeys(HARMLESS, 3)), call(q, k, v, None))


def test_the_refusal_reaches_who_calls_the_model() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    with pytest.raises(ValueError, match="LlamaAttention passes 'indices'"):
        model(token_ids(), indices=torch.ones(1))


@pytest.mark.unchecked
def test_masks_of_another_form_are_refused() -> None:
    q, k, v = qkv(S)
    with pytest.raises(ValueError, match=r"SomeAttention passes an attention mask \(3, 7\); headwise takes what it"):
        call(q, k, v, torch.ones(3, S, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"SomeAttention passes an attention mask list; headwise takes"):
        call(q, k, v, [1])
    with pytest.raises(ValueError, match=r"4-D attention mask of torch.int64; .* convert it with .bool\(\)"):
        call(q, k, v, torch.ones(3, 1, S, S, dtype=torch.long))


def test_without_the_private_collector_the_argument_alone_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.utils.output_capturing._active_collector")
    assert attentions_are_collected() is False


def test_dropout_is_passed_on() -> None:
    q, k, v = qkv()
    assert not torch.equal(call(q, k, v, None, dropout=0.5), call(q, k, v, None))


# -- in a model -------------------------------------------------------------------------------------------------------


def test_dense_masks_of_one_head_each_and_of_windows() -> None:
    """A vision model with shifted windows passes float masks of its own making, and learned biases in them."""
    import transformers

    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4, drop_path_rate=0.0
    )
    model = transformers.SwinModel(config).eval()
    pixels = dict(pixel_values=torch.randn(2, 3, 16, 16))
    outputs = {}
    for name in ("eager", "headwise"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs[name] = model(**pixels).last_hidden_state
    torch.testing.assert_close(outputs["headwise"], outputs["eager"], atol=1e-5, rtol=1e-5)


def test_two_models_do_not_disturb_each_other() -> None:
    one, other = BY_NAME["Llama GQA"].build(), BY_NAME["BERT"].build()
    one.set_attn_implementation("headwise")
    assert other.config._attn_implementation == "eager"
    assert logits(one, inputs(BY_NAME["Llama GQA"])).shape == (B, 11, VOCAB)
