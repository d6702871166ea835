"""Keywords of `torch.nn.MultiheadAttention` that ours lacks: each is refused with what stands for it here."""

import inspect
import re

import pytest
import torch

import headwise
from headwise.nn import MultiHeadAttention

M = 13
OTHER_OPTIONS = {
    "add_bias_kv": "InnerAttention(sinks=...)",
    "add_zero_attn": "InnerAttention(sinks=torch.zeros(H))",
    "batch_first": "leave it out: x is always (B, T, d_model)",
    "device": "then .to(device)",
    "dropout": "inner=headwise.nn.InnerAttention(dropout=...)",
    "dtype": "then .to(dtype)",
    "kdim": "memory_dim=(kdim, vdim)",
    "vdim": "memory_dim=(kdim, vdim)",
    "n_kv": "it has num_kv_heads, head_dim,",
}
OTHER_INPUTS = {
    "attn_mask": "use mask=... (True = attend): headwise.nn.mask_from_torch(",
    "average_attn_weights": "gives its output alone",
    "is_causal": "mask=headwise.causal()",
    "key": "memory=(key, value)",
    "key_padding_mask": "headwise.nn.mask_from_torch(key_padding_mask=",
    "need_weights": "headwise.trace(module, x)['weights']",
    "value": "memory=(key, value)",
    "masks": "it has memory, mask, positions, gate, cache and lengths",
}


@pytest.mark.unchecked
def test_what_torchs_module_has_is_refused_with_what_stands_for_it() -> None:
    shared = {"bias", "num_heads", "embed_dim"}  # mean the same, or Python names ours, which is missing then
    theirs = inspect.signature(torch.nn.MultiheadAttention).parameters.keys()
    assert theirs - shared - OTHER_OPTIONS.keys() == set()
    assert inspect.signature(torch.nn.MultiheadAttention.forward).parameters.keys() - OTHER_INPUTS.keys() == {
        "self",
        "query",
    }
    mha, x = MultiHeadAttention(M, 1), torch.randn(2, 5, M)
    for name, text in OTHER_OPTIONS.items():
        with pytest.raises(TypeError, match=re.escape(text)) as error:
            MultiHeadAttention(M, 1, **{name: None})
        assert str(error.value).startswith(f"MultiHeadAttention has no option {name!r}; ")
    for name, text in OTHER_INPUTS.items():
        with pytest.raises(TypeError, match=re.escape(text)) as error:
            mha(x, **{name: None})
        assert str(error.value).startswith(f"a call of MultiHeadAttention has no option {name!r}; ")
    with pytest.raises(TypeError, match=re.escape("module(query, key, value) is mha(query, (key, value))")):
        mha(x, x, x)


def test_zeros_as_a_key_and_a_value_are_sinks_of_zero() -> None:
    """What the error says of add_zero_attn."""
    theirs = torch.nn.MultiheadAttention(12, 3, add_zero_attn=True, batch_first=True)
    inner = headwise.nn.InnerAttention(sinks=torch.zeros(3))
    ours, x = MultiHeadAttention(12, 3, bias=True, inner=inner), torch.randn(2, 5, 12)
    with torch.no_grad():
        for part, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.in_proj_weight.chunk(3), strict=True):
            part.weight.copy_(weight)
            part.bias.zero_()
        ours.o_proj.load_state_dict(theirs.out_proj.state_dict())
        torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=0, atol=1e-6)  # a few roundings of numbers near 1
