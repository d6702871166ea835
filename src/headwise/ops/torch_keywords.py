"""Attention options of other libraries, and their equivalents in `headwise.attention`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OTHERS = {
    "alibi_slopes": "use mask=headwise.alibi(slopes)",
    "attention_mask": "use mask=attention_mask.bool()[:, None, None, :] for one of shape (B, S) with 1 = attend",
    "attn_mask": "use mask=...: a bool tensor (True = attend), or a float one that is added",
    "block_mask": "use mask=headwise.rule(mask_mod)",
    "causal": "use mask=headwise.causal()",
    "dropout_p": "use dropout=",
    "enable_gqa": "leave it out: query head h reads key-value head h // (H / K)",
    "is_causal": "use mask=headwise.causal(), which aligns the last query with the last key; where T and S differ, "
    "torch's is_causal is headwise.causal_top_left()",
    "key_padding_mask": "use mask=headwise.lengths(n), or mask=~padding[:, None, None, :], because True = attend here",
    "need_weights": "headwise.weights(query, key, mask=...) computes the weights",
    "return_weights": "headwise.weights(query, key, mask=...) computes the weights",
    "score_mod": "use mask=headwise.bias(tensor), alibi(slopes) or relative(table) to add to scores, "
    "softcap= to bound them",
    "softmax_scale": "use scale=",
    "window_size": "use mask=headwise.window(left + 1, right), which counts the query's own key",
}
"""The options of torch's SDPA, FlexAttention and MultiheadAttention, and of flash attention."""


def refuse(caller: str, others: Iterable[str], instead: Mapping[str, str], options: str) -> None:
    """Raise TypeError for an option that the caller does not have, with its equivalent or the available options."""
    for name in others:
        raise TypeError(f"{caller} has no option {name!r}; {instead.get(name, f'it has {options}')}")


def refuse_others(others: Iterable[str]) -> None:
    """Raise TypeError for an option that `attention` does not have."""
    refuse("attention", others, OTHERS, "mask, scale, softcap, sinks, dropout, gate, return_lse and backend")
