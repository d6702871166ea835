"""Checks of the modules' arguments, with the error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..ops.masks.mask import as_mask
from ..plan.shape import AttentionShape, memory_widths
from ..shapes import DTYPES, describe
from ..shapes.arguments import check_counts, check_tensor, shown, whole_numbers
from .decode.cache_protocol import is_causal, rows_of
from .hooks.projections import is_intercepted
from .latent_costs import Choice


def check_sizes(
    memory: int | tuple[int, int] | None, d_model: int, num_heads: int, **sizes: Any
) -> tuple[AttentionShape, tuple[int, int]]:
    """Return a module's shape with defaults filled in, and the widths of the inputs for keys and values.

    Raises TypeError for a size that is not an int, and ValueError for sizes that do not fit.
    """
    shape = AttentionShape.of(d_model, num_heads, **sizes)
    widest = {"num_heads * head_dim": num_heads * shape.head_dim, "num_heads * value_dim": num_heads * shape.value_dim}
    check_counts(1, d_model=d_model, **widest)
    widths = memory_widths(memory, d_model)
    check_counts(1, memory_dim=max(widths))
    return shape, widths


def check_part(name: str, part: Any, what: str) -> None:
    """Check that a part of a module is callable or None."""
    if part is not None and not callable(part):
        raise TypeError(f"{name} is {what}, or None; got {shown(part)}")


def check_norm(factory: Any) -> None:
    """Check that `qk_norm` is a factory that makes a norm from the head size, and not a module."""
    check_part("qk_norm", factory, "a factory head_dim -> module, such as torch.nn.RMSNorm")
    if isinstance(factory, nn.Module):
        raise TypeError(
            f"qk_norm is a factory head_dim -> module, which makes a norm for queries and one for keys; got a "
            f"{type(factory).__name__} that is made already; pass the class, or lambda head_dim: ..."
        )


def check_input(x: Tensor, d_model: int, projection: nn.Module) -> None:
    """Check that the input of a module is (B, T, M), with the dtype and device of its first projection."""
    check_tensor("x", x, "a tensor (B, T, d_model)")
    if x.ndim != 3:
        raise ValueError(
            f"x is (B, T, d_model), batch first; got {describe(x)}; a single sequence becomes one by x[None]"
        )
    if x.shape[2] != d_model:
        raise ValueError(f"x is (B, T, d_model) with d_model = {d_model}; got {describe(x)}")
    check_taken("x", x, projection)


def check_taken(name: str, x: Tensor, projection: nn.Module) -> None:
    """Check the dtype and device of an input of a plain linear layer, or the device of an input of a plain norm.

    Other kinds of module are not checked. Neither is the device if a hook or a replaced forward may first move the
    input or load the weight, as accelerate does in a model that is offloaded or spread over devices.
    """
    weight = projection.weight if type(projection) in (nn.Linear, nn.RMSNorm, nn.LayerNorm) else None
    if not isinstance(weight, Tensor):
        return
    device = x.device.type
    lowers = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    alike = (
        type(projection) is not nn.Linear
        or x.dtype == weight.dtype
        or (lowers and x.dtype in DTYPES and torch.float64 not in (x.dtype, weight.dtype))
    )
    if not alike or (x.device != weight.device and not is_intercepted(projection)):
        raise ValueError(
            f"{name} and the module's weights share one dtype and device: the weights are {describe(weight)}; got "
            f"{describe(x)}; move one of them with .to()"
        )


def check_vectors(name: str, x: Any, heads: int | None = None, size: int | None = None) -> None:
    """Check that a tensor is float with shape (B, heads, T, size)."""
    form = f"(B, {'H' if heads is None else heads}, T, {'n' if size is None else size})"
    check_tensor(name, x, f"a float tensor {form}")
    if x.ndim != 4 or x.dtype not in DTYPES or heads not in (None, x.shape[1]) or size not in (None, x.shape[3]):
        raise ValueError(f"{name} is a float tensor {form}; got {describe(x)}")


def check_width(fused: Any, heads: int, size: int) -> None:
    """Check that the output of a projection is (B, T, heads * size)."""
    check_tensor("what a projection gives", fused)
    if fused.ndim != 3 or fused.shape[2] != heads * size or fused.dtype not in DTYPES:
        raise ValueError(
            f"a projection gives (B, T, heads * size) with {heads} x {size} = {heads * size} numbers a token; got "
            f"{describe(fused)}; where it is split over devices, give each whole heads: a module of its own "
            "(MultiHeadAttention.from_heads), and add up the outputs; headwise.parallel.tensor_parallel(module, mesh) "
            "does this, also for a module that torch's parallelize_module has split"
        )


def check_memory(
    x: Tensor,
    memory: Tensor | Sequence[Tensor] | None,
    widths: tuple[int, int],
    projections: tuple[nn.Module, nn.Module],
    *,
    required: bool,
) -> tuple[Tensor, Tensor]:
    """Return the inputs for keys and values: `memory`, a pair of memories, or `x` if no memory is required."""
    if memory is None:
        if required:
            raise ValueError(
                f"this module was built with memory_dim, so it attends to a memory (B, S, {widths[0]}) and never to x; "
                "call it as mha(x, memory)"
            )
        return x, x
    pair = memory if isinstance(memory, (tuple, list)) else (memory, memory)
    if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
        raise TypeError(
            "memory is one tensor (B, S, width), or a pair of them: (for the keys, for the values); got "
            f"{shown(memory)}; give a mask or a cache by name, as mask=... or cache=..."
        )
    for part, name, width, projection in zip(pair, ("keys", "values"), widths, projections, strict=True):
        check_tensor(f"the memory of the {name}", part)
        if part.ndim != 3 or part.shape[2] != width:
            raise ValueError(
                f"the memory of the {name} is (B, S, {width}); got {describe(part)}; memory_dim sets its width"
            )
        if part.shape[0] != x.shape[0]:
            raise ValueError(f"x and memory share the batch size: x B = {x.shape[0]}, memory B = {part.shape[0]}")
        check_taken(f"the memory of the {name}", part, projection)
    if pair[0].shape[1] != pair[1].shape[1]:
        raise ValueError(
            f"keys and values come from memories of one length: got S = {pair[0].shape[1]} and {pair[1].shape[1]}"
        )
    return pair[0], pair[1]


def check_cache(x: Tensor, cache: Any, lengths: Any) -> list[int] | None:
    """Check a cache before it changes, and return the number of tokens to append for each row, or None for all."""
    if cache is None:
        if lengths is not None:
            raise ValueError(
                "lengths needs cache=. To mask padding without a cache, pass mask=headwise.lengths(n) (add "
                "`& headwise.causal()` for a decoder)"
            )
        return None
    # With torch.compile, `lengths` must not be read if the cache has `positions`, as the caches of `headwise.cache` do.
    needed = ("append", "attend") if hasattr(cache, "positions") else ("lengths", "append", "attend")
    missing = [name for name in needed if not hasattr(cache, name)]
    if missing:
        raise TypeError(
            "cache is one of headwise.cache, or another with lengths, append() and attend(); "
            f"{type(cache).__name__} has no {', '.join(missing)}"
        )
    if rows_of(cache) != x.shape[0]:
        raise ValueError(
            f"x and the cache share the batch size: x B = {x.shape[0]}, the cache has {rows_of(cache)} rows"
        )
    if lengths is None:
        return None
    counts = whole_numbers("lengths", lengths)
    if len(counts) != x.shape[0] or any(not 0 <= n <= x.shape[1] for n in counts):
        raise ValueError(f"lengths are (B,) = ({x.shape[0]},) numbers from 0 to T = {x.shape[1]}; got {counts}")
    return counts


def check_latent_call(x: Tensor, cache: Any, lengths: Any, form: str, mask: Any) -> list[int] | None:
    """Check the cache, form and mask of a `LatentAttention` call before the cache changes; see `check_cache`."""
    if not isinstance(form, str) or form not in get_args(Choice):
        raise ValueError(f'form is "auto", "expanded" or "absorbed"; got {shown(form)}; "auto" takes the cheaper one')
    as_mask(mask)
    if cache is not None and not is_causal(cache):
        raise ValueError("latent attention attends to its own past, so its cache is causal; got one with causal=False")
    return check_cache(x, cache, lengths)


def check_latent_values(width: int | None, rank: int) -> None:
    """Check that the values of a latent cache are the first `rank` columns of its keys; `width` None is not checked."""
    if width not in (None, rank):
        raise ValueError(
            f"the cache's values are the first kv_lora_rank = {rank} columns of its keys; it gave values of {width}; "
            f"make it with value_dim={rank}"
        )
