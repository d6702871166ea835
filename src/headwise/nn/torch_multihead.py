"""Conversion from `torch.nn.MultiheadAttention` and back: weights, dropout, and masks.

In torch's module, True in a mask means hide; in headwise it means attend. torch's module takes (T, B, M) by default;
headwise is always batch first. For a query whose keys are all hidden, torch returns NaN on some of its code paths;
headwise returns 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..ops.masks.constructors import bias, keep
from ..ops.masks.mask import Mask
from ..shapes import MASK_RULE, describe
from ..shapes.arguments import check_counts, check_tensor
from .gated import GatedMultiHeadAttention
from .hooks.projections import has_hooks, weight_of
from .inner_attention import InnerAttention
from .multihead import MultiHeadAttention

FORWARDS: set[Any] = {nn.MultiheadAttention.forward}
"""The forward methods that compute the same function of the parameters as torch's class."""


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Convert a `torch.nn.MultiheadAttention` to a `MultiHeadAttention` with copies of its weights.

    Outputs are equal in train and eval mode. Call the result as ``mha(query)`` for self-attention, or
    ``mha(query, (key, value))``; convert masks with `mask_from_torch`. The inner part takes over the dropout.

    Raises:
        TypeError: `module` is not a `torch.nn.MultiheadAttention`, or it has hooks or its own forward.
        ValueError: `module` has ``add_bias_kv`` or ``add_zero_attn``, or takes (T, B, M), not ``batch_first``.

    Example:
        >>> import torch
        >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        >>> ours = from_torch(theirs)
        >>> x = torch.randn(2, 5, 12)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
        True
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"from_torch takes a torch.nn.MultiheadAttention; got {type(module).__name__}")
    check_unmodified(module, "from_torch")
    if not module.batch_first:
        raise ValueError(
            "this torch.nn.MultiheadAttention was built with batch_first=False and takes (T, B, M), while "
            "headwise.MultiHeadAttention takes (B, T, M): the same input would give other numbers; "
            "set module.batch_first = True first, and transpose what you call the result with"
        )
    for name, used in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if used:
            raise ValueError(
                f"this torch.nn.MultiheadAttention was built with {name}=True, which adds a key and a value to every "
                "sequence; headwise has no such row; rebuild it without (sinks come closest to what it does)"
            )
    same_width = module.kdim == module.vdim == module.embed_dim
    mha = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        memory_dim=None if same_width else (module.kdim, module.vdim),
        bias=module.in_proj_bias is not None,
        inner=InnerAttention(dropout=module.dropout),
    )
    projections = (mha.q_proj, mha.k_proj, mha.v_proj)
    mha.to(module.out_proj.weight).train(module.training)
    with torch.no_grad():
        for projection, weight in zip(projections, in_weights(module), strict=True):
            projection.weight.copy_(weight)
        mha.o_proj.weight.copy_(module.out_proj.weight)
        if module.in_proj_bias is not None:
            for projection, part in zip(projections, module.in_proj_bias.chunk(3), strict=True):
                projection.bias.copy_(part)
            mha.o_proj.bias.copy_(module.out_proj.bias)
    for ours, theirs in _pairs(mha, module):
        ours.requires_grad_(theirs.requires_grad)
    return mha


def check_unmodified(module: nn.MultiheadAttention, what: str) -> None:
    """Check that the module has neither hooks nor its own forward, so that it computes the same as torch's class."""
    kind: Any = type(module)
    forward = "forward" in vars(module) or kind.forward not in FORWARDS
    if forward or has_hooks(module):
        how = "has a forward of its own" if forward else "has hooks"
        raise TypeError(
            f"{what} takes a torch.nn.MultiheadAttention as it is; this {kind.__name__} {how}, which may compute "
            "something else and would be lost; convert first, and register hooks and adapters on the result"
        )


def to_torch(mha: MultiHeadAttention) -> nn.MultiheadAttention:
    """Convert to a `torch.nn.MultiheadAttention` with ``batch_first=True`` and copies of the weights.

    Shared keys and values (GQA, MQA) are repeated for each query head, and a missing bias of o_proj becomes 0.

    Raises:
        TypeError: `mha` is not a `headwise.MultiHeadAttention`, or a projection is not a plain linear layer.
        ValueError: torch's module lacks a feature of `mha`: a rotary part, norms, heads with ``H * D != d_model``,
            another value dim, softcap, sinks, a custom scale, or an inner part that is not an `InnerAttention`.

    Example:
        >>> import torch
        >>> ours = MultiHeadAttention(12, 6, num_kv_heads=2)
        >>> x = torch.randn(2, 5, 12)
        >>> torch.allclose(to_torch(ours)(x, x, x)[0], ours(x), atol=1e-6)
        True
    """
    if not isinstance(mha, MultiHeadAttention):
        raise TypeError(f"to_torch takes a headwise.MultiHeadAttention; got {type(mha).__name__}")
    _check_fits_torch(mha)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight_of(name, getattr(mha, name), "to_torch")
    inner = cast(InnerAttention, mha.inner)
    key_width, value_width = mha.memory_widths
    biased = mha.q_proj.bias is not None
    module = nn.MultiheadAttention(
        mha.d_model, mha.num_heads, inner.dropout, bias=biased, kdim=key_width, vdim=value_width, batch_first=True
    )
    module.to(mha.o_proj.weight).train(mha.training)
    group = mha.num_heads // mha.num_kv_heads
    with torch.no_grad():
        shared = [_repeat(part.weight, mha.num_kv_heads, group) for part in (mha.k_proj, mha.v_proj)]
        for target, weight in zip(in_weights(module), (mha.q_proj.weight, *shared), strict=True):
            target.copy_(weight)
        module.out_proj.weight.copy_(mha.o_proj.weight)
        if biased:
            shared = [_repeat(part.bias, mha.num_kv_heads, group) for part in (mha.k_proj, mha.v_proj)]
            module.in_proj_bias.copy_(torch.cat([mha.q_proj.bias, *shared]))
            module.out_proj.bias.zero_() if mha.o_proj.bias is None else module.out_proj.bias.copy_(mha.o_proj.bias)
    pairs = list(_pairs(mha, module))
    for _, theirs in pairs:  # a stacked weight is trained if any of its parts is
        theirs.requires_grad_(any(ours.requires_grad for ours, holder in pairs if holder is theirs))
    return module


def mask_from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, num_heads: int
) -> Mask | None:
    """Convert the masks of `torch.nn.MultiheadAttention`, where True means *hide*; float masks are added.

    Args:
        attn_mask: (T, S), or (B * H, T, S); bool with True = hide, or float with -inf = hide.
        key_padding_mask: (B, S), or (S,), with the same dtypes.
        num_heads: H, to split the first axis of (B * H, T, S).

    Returns:
        One mask for both; None if both are None.

    Raises:
        TypeError: a mask is neither bool nor float.
        ValueError: a mask has another shape.

    Example:
        >>> hide = nn.Transformer.generate_square_subsequent_mask(3)
        >>> padded = torch.tensor([[False, False, True]])
        >>> mask = mask_from_torch(hide == -torch.inf, padded, num_heads=4)
        >>> print(mask.draw(3, 3))
        ■ · ·
        ■ ■ ·
        ■ ■ ·
    """
    masks = []
    check_counts(1, num_heads=num_heads)
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None:
            check_tensor(name, mask, "a bool tensor (True = hide) or a float one (added)")
    if attn_mask is not None:
        if attn_mask.ndim == 3 and attn_mask.shape[0] % num_heads == 0:
            attn_mask = attn_mask.unflatten(0, (-1, num_heads))
        elif attn_mask.ndim != 2:
            raise ValueError(
                f"attn_mask is (T, S) or (B * H, T, S) with H = {num_heads}; got {describe(attn_mask)}; "
                "headwise.keep takes a mask of any other shape, True = attend"
            )
        masks.append(_shown("attn_mask", attn_mask))
    if key_padding_mask is not None:
        if key_padding_mask.ndim not in (1, 2):
            raise ValueError(f"key_padding_mask is (B, S) or (S,); got {describe(key_padding_mask)}")
        per_row = key_padding_mask if key_padding_mask.ndim == 1 else key_padding_mask[:, None, None, :]
        masks.append(_shown("key_padding_mask", per_row))
    if len(masks) == 2:
        return masks[0] & masks[1]
    return masks[0] if masks else None


def mask_to_torch(mask: Mask, T: int, S: int, *, batch: int = 1, num_heads: int = 1) -> Tensor:
    """Convert a mask to the `attn_mask` of `torch.nn.MultiheadAttention`: True = hide, or float if it has a bias.

    Returns:
        (T, S) if the mask is the same for all heads and batch rows, else (batch * num_heads, T, S).

    Raises:
        TypeError: `mask` is not a `Mask`.
        ValueError: the mask is made for other numbers of heads or rows than `num_heads` and `batch`.

    Example:
        >>> from headwise.ops.masks import causal
        >>> mask_to_torch(causal(), 2, 2)
        tensor([[False,  True],
                [False, False]])
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"{MASK_RULE}; mask_to_torch takes a Mask; got {type(mask).__name__}; keep() makes one")
    check_counts(1, batch=batch, num_heads=num_heads)
    dense = mask.dense(T, S)
    theirs = ~dense if dense.dtype == torch.bool else dense
    rows, heads = theirs.shape[:2]
    if rows == heads == 1:
        return theirs[0, 0]
    if rows not in (1, batch) or heads not in (1, num_heads):
        raise ValueError(
            f"this mask is made for {rows} batch rows and {heads} heads (1 = any); got batch={batch}, "
            f"num_heads={num_heads}; pass those of the call"
        )
    return theirs.expand(batch, num_heads, T, S).reshape(batch * num_heads, T, S)


def _shown(name: str, hide: Tensor) -> Mask:
    """Convert a mask with True = hide to one with True = attend."""
    if hide.dtype == torch.bool:
        return keep(~hide)
    if hide.is_floating_point():
        return bias(hide)
    raise TypeError(f"{name} is bool (True = hide) or float (added); got {describe(hide)}")


def in_weights(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights for queries, keys and values; torch stores them as one stacked matrix or as three."""
    if module.in_proj_weight is not None:
        query, key, value = module.in_proj_weight.chunk(3)
        return query, key, value
    return cast(tuple[Tensor, Tensor, Tensor], (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight))


def _pairs(mha: MultiHeadAttention, module: nn.MultiheadAttention) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each headwise parameter with the torch parameter that contains its numbers."""
    for letter, part in zip("qkv", (mha.q_proj, mha.k_proj, mha.v_proj), strict=True):
        stacked = module.in_proj_weight
        yield part.weight, getattr(module, f"{letter}_proj_weight") if stacked is None else stacked
        if part.bias is not None:
            yield part.bias, module.in_proj_bias
    yield mha.o_proj.weight, module.out_proj.weight
    if module.out_proj.bias is not None:  # zeros if o_proj has no bias
        yield mha.o_proj.weight if mha.o_proj.bias is None else mha.o_proj.bias, module.out_proj.bias


def _repeat(fused: Tensor, num_kv_heads: int, group: int) -> Tensor:
    """Repeat the rows of each key-value head for every query head of its group."""
    return fused.unflatten(0, (num_kv_heads, -1)).repeat_interleave(group, dim=0).flatten(0, 1)


def _check_fits_torch(mha: MultiHeadAttention) -> None:
    inner = mha.inner if isinstance(mha.inner, InnerAttention) else InnerAttention()
    H, D = mha.num_heads, mha.head_dim
    lacks = {
        "a rotary part": mha.rotary is not None,
        "q_norm and k_norm": mha.q_norm is not None,
        "an output gate": isinstance(mha, GatedMultiHeadAttention),
        f"heads with H * D = {H * D} != d_model = {mha.d_model}": mha.d_model != H * D,
        f"value_dim = {mha.value_dim} != head_dim = {D}": mha.value_dim != D,
        f"the inner part {type(mha.inner).__name__}": not isinstance(mha.inner, InnerAttention),
        f"softcap = {inner.softcap}": inner.softcap is not None,
        f"scale = {inner.scale}": inner.scale is not None,
        "sinks": inner.sinks is not None,
    }
    lacking = [what for what, there in lacks.items() if there]
    if lacking:
        raise ValueError(
            f"torch.nn.MultiheadAttention has no place for what this module has: {', '.join(lacking)}; "
            "keep headwise.MultiHeadAttention, or drop them first"
        )
