"""The reference: softmax(scale * Q K^T) V in plain PyTorch. All backends are tested against it.

Memory is quadratic; any dtype up to float64 (half dtypes are computed in float32); differentiable twice.
Order: scale, softcap, bias, mask, sinks, softmax, dropout, values, gate.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ..shapes import compute_dtype
from .masks.mask import Mask
from .nonfinite import clean, show


def reference_weights(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> tuple[Float[Tensor, "B H T S"], Float[Tensor, "B H T"]]:
    """Return the attention weights and the log of their denominator (lse), in float32 or float64.

    A row that may attend to no key has weights 0 and lse -inf. With `sinks` the weights of a row sum to less than 1.

    >>> q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2)
    >>> reference_weights(q, k)[0].flatten().tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    dtype = compute_dtype(query)
    (T, D), (K, S) = query.shape[2:], key.shape[1:3]
    mask = None if mask is None else mask.computed_in(dtype)
    allowed = None if mask is None else mask.allowed(T, S, device=query.device)
    if allowed is None:
        allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=query.device)
    q_BHTD = query.to(dtype)
    k_BHSD = key.to(dtype).repeat_interleave(query.shape[1] // K, dim=1)  # query head h uses key-value head h // G

    scores_BHTS = q_BHTD @ k_BHSD.mT * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        # Masked scores are set to 0: if their product overflows, the gradient of tanh would be 0 * NaN.
        scores_BHTS = scores_BHTS.masked_fill(~allowed, 0.0)
        scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    added = None if mask is None else mask.added(T, S, device=query.device)
    if added is not None:
        scores_BHTS = scores_BHTS + added.to(dtype)

    empty = ~allowed.any(-1, keepdim=True)
    # An empty row gets finite scores and is zeroed below: -inf minus -inf would be NaN, also in the gradient.
    scores_BHTS = scores_BHTS.masked_fill(~allowed, -torch.inf).masked_fill(empty, 0.0)

    if S == 0:
        return scores_BHTS, scores_BHTS.new_full(scores_BHTS.shape[:3], -torch.inf)
    logits = scores_BHTS if sinks is None else torch.cat([scores_BHTS, _column(sinks, scores_BHTS)], dim=-1)
    top = logits.detach().amax(-1, keepdim=True)
    exps = torch.exp(logits - top)  # not torch.softmax: its backward's bits depend on the thread count
    total = exps.sum(-1, keepdim=True)
    weights_BHTS = (exps / total)[..., :S].masked_fill(~allowed, 0.0)
    lse_BHT = (top + total.log()).masked_fill(empty, -torch.inf)[..., 0]
    return weights_BHTS, lse_BHT


def reference(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    kept: Tensor | None = None,
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]:
    """Compute (out, lse), which every backend must match. `kept`, bool (B, H, T, S): the dropout mask, if given.

    A key that a row may not attend to cannot change that row: NaN and Inf are set to 0 first, because 0 * NaN is NaN.
    A row that may attend to a NaN or Inf, or has one in its query, is NaN.

    >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
    >>> reference(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), v)[0].item()
    2.0
    """
    (B, H, T), (K, S) = query.shape[:3], key.shape[1:3]
    bad_BKS = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    bad_BHT = ~query.isfinite().all(-1)
    mask = None if mask is None else mask.computed_in(compute_dtype(query))
    seen = None if mask is None else mask.allowed(T, S, device=query.device)
    met = bad_BKS.repeat_interleave(H // K, dim=1)[:, :, None, :].expand(B, H, T, S)
    met = (met if seen is None else met & seen).any(-1)
    alive = torch.ones((), dtype=torch.bool, device=query.device) if seen is None else seen.any(-1)

    query, key, value = clean(query, bad_BHT), clean(key, bad_BKS), clean(value, bad_BKS)
    weights_BHTS, lse_BHT = reference_weights(query, key, mask=mask, scale=scale, softcap=softcap, sinks=sinks)
    if kept is not None:
        weights_BHTS = weights_BHTS * kept / (1 - dropout)
    elif dropout > 0:
        weights_BHTS = torch.dropout(weights_BHTS, dropout, train=True)
    out_BHTV = weights_BHTS @ value.to(weights_BHTS.dtype).repeat_interleave(H // K, dim=1)
    out_BHTV = out_BHTV.masked_fill(~alive[..., None], 0.0)  # already 0; this makes the gradient 0, too

    shown_BHT = met | (bad_BHT & alive)
    return show(out_BHTV, shown_BHT[..., None]).to(query.dtype), show(lse_BHT, shown_BHT)


def _column(sinks: Tensor, scores_BHTS: Tensor) -> Tensor:
    """Return the sink logits as one more key: a (B, H, T, 1) column of the scores."""
    B, H, T, _ = scores_BHTS.shape
    return sinks.to(scores_BHTS.dtype).view(1, H, 1, 1).expand(B, H, T, 1)
