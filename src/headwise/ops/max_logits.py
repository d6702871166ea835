"""The largest attention logit of each head, from the pass that computes the output: what QK-clip bounds."""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from .attention import _checked, _choose, _run
from .autocast import in_autocast_dtype, without_autocast
from .backends.wrappers import gated
from .call import Call
from .native import library as native_library
from .native.backend import dropout_of
from .native.mask_arguments import lowered
from .native.picked_keys import is_picked
from .nonfinite import mask_nonfinite, show
from .options import AttentionKeywords
from .row_blocks import row_blocks, score_block
from .sharding.dtensor_attention import any_dtensor
from .torch_keywords import refuse_others

LEAST_SCALE = 1e-30
"""Up to this scale the native kernel scales scores before its softmax."""


def attention_max_logits(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionKeywords],
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, " H"]]:
    """Compute `attention`, and the largest logit that each head has in the whole batch.

    The logit of a query and a key is what the softmax gets: `query . key * scale`, after the softcap, with the biases
    of the mask. Without softcap and biases it is the number that QK-clip bounds (Kimi K2, arXiv 2507.20534, section
    2.1: ``S_max`` of a head, the maximum pre-softmax logit over the batch). Only pairs count that the mask allows;
    sinks are no keys, and dropout comes later.

    On the CPU the native kernel has this number from the softmax of its only pass, with or without a gradient, and also
    under `torch.compile`. Other backends take a second pass over the scores.

    The arguments are those of `attention`; query, key and value are plain tensors.

    Returns:
        out (B, H, T, V), that of `attention` in training, with its gradient; and the logits (H,), float32 (float64 for
        float64), without one. A head none of whose rows may attend a key has -inf; a NaN or Inf that a row meets makes
        its head NaN.

    Raises:
        TypeError, ValueError: as for `attention`; also for a cache, int8, pages and DTensors.

    Example:
        >>> q = k = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> out, logits = attention_max_logits(q, k, k, scale=1.0)
        >>> logits
        tensor([9.])
    """
    refuse_others(name for name in options if name not in AttentionKeywords.__optional_keys__)
    if any_dtensor(query, key, value):
        raise ValueError(
            "attention_max_logits takes plain tensors; got DTensors: call it on each rank's part, and take the maximum "
            "over the ranks"
        )
    query, key, value = in_autocast_dtype(query, key, value)
    call = _checked(query, key, value, **options)
    with without_autocast(call.device_type):
        if _choose(call, backend)[0] == "native" and not is_picked(call.options.mask):
            out, logits_BHT = gated(_by_kernel)(call)
        else:
            out, logits_BHT = _run(call, backend)[0], _by_blocks(call)
    assert logits_BHT is not None
    none = logits_BHT.new_full((logits_BHT.shape[1], 1), -torch.inf)  # a batch may be empty
    return out, torch.cat([logits_BHT.transpose(0, 1).flatten(1), none], 1).amax(1)


def _by_kernel(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output, with its gradient, and the largest logit of each row, (B, H, T), without one."""
    rules = lowered(call.options, *call.sizes[3:])
    tracing = torch.compiler.is_compiling()
    attend = torch.ops.headwise.attend_ends if tracing else native_library.attend_ends
    out, _, ends = attend(call.query, call.key, call.value, *rules, *dropout_of(call))
    largest, weight = ends.detach()
    # In these cases the kernel keeps a row's largest score with the scale in it (`scales_first` in csrc).
    biased = rules.alibi or rules.relative or any(x.is_floating_point() for x in rules.dense or ())
    scale = 1.0 if biased or rules.softcap > 0 or not rules.scale > LEAST_SCALE else rules.scale
    return out, (largest * scale).masked_fill(weight.isnan(), torch.nan)


def _by_blocks(call: Call) -> Tensor:
    """Return the largest logit of each row, (B, H, T), from a pass of its own over blocks of scores."""
    pieces: list[Tensor] = []
    with torch.no_grad():
        query, key, _, bad_BHT = mask_nonfinite(call.query, call.key, call.value, call.options.mask)
        for rows in row_blocks(query.shape[2], key.shape[2], query.device.type):
            scores = score_block(query, key, call.options, rows).scores_BHRC
            none = scores.new_full((*scores.shape[:3], 1), -torch.inf)
            largest = torch.cat([scores, none], -1).amax(-1)
            pieces.append(largest.masked_fill(largest == torch.inf, torch.nan))  # a product overflowed
    return show(torch.cat(pieces, 2), bad_BHT) if pieces else query.new_empty(*query.shape[:2], 0)
