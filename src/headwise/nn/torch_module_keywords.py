"""The keywords of `torch.nn.MultiheadAttention` and their counterparts in `headwise.MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ops.torch_keywords import refuse

OPTIONS = {
    "add_bias_kv": "no learned key is added; inner=headwise.nn.InnerAttention(sinks=...) comes closest",
    "add_zero_attn": "zeros as key and value are sinks of 0: inner=headwise.nn.InnerAttention(sinks=torch.zeros(H))",
    "batch_first": "leave it out: x is always (B, T, d_model); (T, B, d_model) becomes that by x.transpose(0, 1)",
    "device": "build the module, then .to(device), or build it within `with torch.device(...):`",
    "dropout": "inner=headwise.nn.InnerAttention(dropout=...)",
    "dtype": "build the module, then .to(dtype)",
    "kdim": "memory_dim=(kdim, vdim)",
    "vdim": "memory_dim=(kdim, vdim)",
}
"""The keywords of the class."""
INPUTS = {
    "attn_mask": "use mask=... (True = attend): headwise.nn.mask_from_torch(attn_mask, num_heads=H) makes it",
    "average_attn_weights": "leave it out: the module gives its output alone",
    "is_causal": "mask=headwise.causal()",
    "key": "memory=(key, value), or nothing where they are x itself",
    "key_padding_mask": "mask=headwise.nn.mask_from_torch(key_padding_mask=..., num_heads=H), or headwise.lengths(n)",
    "need_weights": "leave it out: the module gives its output alone; headwise.trace(module, x)['weights'] has them",
    "value": "memory=(key, value), or nothing where they are x itself",
}
"""The keywords of a call."""


def refuse_options(others: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown option of the class."""
    has = "num_kv_heads, head_dim, value_dim, memory_dim, bias, rotary, qk_norm and inner"
    refuse("MultiHeadAttention", others, OPTIONS, has)


def refuse_inputs(more: Sequence[object], others: Mapping[str, object]) -> None:
    """Raise TypeError for a third positional argument or an unknown keyword in a call of the module."""
    refuse("a call of MultiHeadAttention", others, INPUTS, "memory, mask, positions, gate, cache and lengths")
    if more:
        raise TypeError(
            f"MultiHeadAttention is called as mha(x) or mha(x, memory); got {2 + len(more)} arguments by position; "
            "torch's module(query, key, value) is mha(query, (key, value)), or mha(query) where all are the same"
        )
