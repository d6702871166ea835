"""Tools for testing an attention implementation: inputs, references, error budgets, poison and memory layouts.

headwise tests its own kernels with this module: `make_qkv` and `strided` make inputs, also with unusual layouts;
`oracle` (float64, reads only unmasked keys) and `naive` (plain PyTorch in the inputs' dtype) are references;
`assert_close_like_torch` and `assert_same_bits` compare; `poison` and `largest_tensor` detect forbidden reads and large
tensors. `headwise.testing.constructed` builds models in which the job of each head is known.

>>> from headwise.testing import assert_close_like_torch, make_qkv, naive, oracle
>>> q, k, v = make_qkv(2, 3, 3, 5, 7, 11, 13)
>>> ours = torch.nn.functional.scaled_dot_product_attention(q, k, v)
>>> seen = assert_close_like_torch(ours, oracle(q, k, v)[0], naive(q, k, v), values=v)
>>> print(seen)   # doctest: +ELLIPSIS
ours ..., naive ..., rounding floor ...; budget ... (with 1 ulp = 2.384e-07); worst at (...)
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.ops.masks import Mask, as_mask
from headwise.shapes import DTYPES, INTEGERS, check_attention, check_gate, check_options, describe
from headwise.shapes.arguments import (
    check_counts,
    check_device,
    check_dtype,
    check_flags,
    check_numbers,
    check_tensor,
    shown,
)

from .compare import Accuracy, accuracy, assert_close_like_torch, assert_same_bits, ulp

__all__ = [
    "KINDS",
    "POISONS",
    "STRIDES",
    "Accuracy",
    "accuracy",
    "assert_close_like_torch",
    "assert_same_bits",
    "largest_tensor",
    "make_qkv",
    "naive",
    "oracle",
    "poison",
    "strided",
    "ulp",
]

KINDS = ("normal", "outlier", "sink", "duplicates")


def make_qkv(
    B: int,
    H: int,
    K: int,
    T: int,
    S: int,
    D: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    kind: str = "normal",
    scale: float = 1.0,
    device: torch.device | str = "cpu",
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (B, H, T, D), key (B, K, S, D), value (B, K, S, V), the same on every machine for the same seed.

    Some errors occur with real activations but not with Gaussian inputs, so `kind` is one of

    - "normal": independent standard normal entries;
    - "outlier": one channel of the keys is 50 times as large, as in trained decoders;
    - "sink": all queries are similar to key 0, which gets most of the weight and has a small value;
    - "duplicates": keys are near-copies (1e-3) of three vectors, so that many scores are almost equal.

    `scale` multiplies queries and keys: logits grow with its square. Raises ValueError for an unknown kind.

    >>> q, k, v = make_qkv(2, 6, 3, 5, 7, 11, 13, kind="sink")
    >>> q.shape, k.shape, v.shape
    (torch.Size([2, 6, 5, 11]), torch.Size([2, 3, 7, 11]), torch.Size([2, 3, 7, 13]))
    """
    check_counts(B=B, H=H, K=K, T=T, S=S, D=D, V=V)
    check_counts(-(2**62), 2**62, seed=seed)
    check_dtype(dtype)
    check_device(device)
    check_numbers(scale=scale)
    check_flags(requires_grad=requires_grad)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, got {shown(kind)}")
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")

    query, key, value = normal(B, H, T, D), normal(B, K, S, D), normal(B, K, S, V)
    if kind == "outlier":
        key[..., D // 2 : D // 2 + 1] *= 50
    elif kind == "sink":
        towards = normal(1, 1, 1, D)
        towards = towards / towards.norm()
        query = query + 3 * towards
        key[:, :, :1] = 3 * math.sqrt(D) * towards  # a logit of about 9 against 0 +- 1
        value[:, :, :1] *= 0.01
    elif kind == "duplicates":
        key = key[:, :, torch.arange(S, device="cpu") % 3 % max(S, 1)] + 1e-3 * normal(B, K, S, D)
    q, k, v = (x.to(device, dtype).requires_grad_(requires_grad) for x in (scale * query, scale * key, value))
    return q, k, v


# Memory orders: "0213" keeps dimension 3 innermost and swaps 1 and 2, the layout after a fused projection.
_ORDERS = tuple("".join(order) for order in itertools.permutations("0123"))[1:]
STRIDES = (
    *(f"order {order}" for order in _ORDERS),
    *(f"step {step} in {dim}" for dim, step in enumerate((2, 2, 2, 3))),
    *(f"expanded {dim}" for dim in range(3)),
    "rows padded by 3",
    "odd offset",
    "overlapping rows",
)


def strided(tensor: Shaped[Tensor, "A B C D"], pattern: str, *, slack: float = math.nan) -> Shaped[Tensor, "A B C D"]:
    """Return the same values with memory layout `pattern` (one of STRIDES) and `slack` in all gaps and around the data.

    Two patterns change the values, as several entries share memory: "expanded n" repeats index 0 along dimension
    n with stride 0, and in "overlapping rows" each row starts one entry after the previous one. So compare with
    `strided(x, pattern).contiguous()`. Raises ValueError for an unknown pattern.

    >>> [strided(torch.zeros(1, 2, 3, 4), pattern).stride() for pattern in ("order 0213", "step 2 in 2")]
    [(24, 4, 8, 1), (48, 24, 8, 1)]
    """
    check_tensor("tensor", tensor, "a tensor of four axes")
    if tensor.ndim != 4 or tensor.dtype not in (*DTYPES, *INTEGERS, torch.bool):
        raise ValueError(f"tensor has four axes, and numbers of a common kind; got {describe(tensor)}")
    _check_filling("slack", slack, torch.float64)
    if not isinstance(pattern, str) or pattern not in STRIDES:
        raise ValueError(f"pattern is one of headwise.testing.STRIDES ({len(STRIDES)} of them), got {shown(pattern)}")
    tensor = tensor.detach()
    kind, *words = pattern.split()
    if kind == "expanded":
        dim = int(words[0])
        return strided(tensor.narrow(dim, 0, min(1, tensor.shape[dim])), "odd offset", slack=slack).expand(tensor.shape)
    order = [int(d) for d in words[0]] if kind == "order" else [0, 1, 2, 3]
    step = {int(words[2]): int(words[0])} if kind == "step" else {}
    strides, stride = [0] * 4, 1
    for dim in reversed(order):
        stride *= step.get(dim, 1)
        strides[dim] = stride
        stride *= max(1, tensor.shape[dim])
        if kind == "rows" and dim == 3:
            stride += 3
    if kind == "overlapping":
        strides[2] = 1
    offset = 7 if kind == "odd" else 16
    length = offset + 1 + sum(max(0, n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    memory = torch.full((length + 16,), slack, dtype=torch.float64, device="cpu").to(
        device=tensor.device, dtype=tensor.dtype
    )
    view = memory.as_strided(tensor.shape, strides, offset)
    if kind == "overlapping":  # entry d of row i and entry d - 1 of row i + 1 share memory, so fill the memory
        memory[offset:length].copy_(torch.arange(length - offset, device="cpu").mul(7).remainder(11).sub(5).div(4))
        return view
    return view.copy_(tensor)


def _check_filling(name: str, number: float, dtype: torch.dtype) -> None:
    """Check that a number is representable in the dtype; NaN, infinity and 1e30 (which is clamped) are accepted."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"{name} is a number; got {shown(number)}")
    most = max(torch.finfo(dtype).max, 1e30)
    if most < abs(number) < math.inf:
        raise ValueError(f"{name} is a number of {dtype}, NaN or infinity; got {shown(number)}")


POISONS = (math.nan, math.inf, -math.inf, 1e30)


def poison(tensor: Shaped[Tensor, "..."], where: Shaped[Tensor, "..."], what: float = math.nan) -> Tensor:
    """Return a copy with `what` wherever `where` (bool, right-aligned broadcastable to the tensor's shape) is True.

    1e30 is clamped to the largest number of the dtype. Raises TypeError or ValueError for invalid arguments.

    >>> poison(torch.zeros(2, 3), torch.tensor([False, False, True]), 1e30)[:, 1:]
    tensor([[0.0000e+00, 1.0000e+30],
            [0.0000e+00, 1.0000e+30]])
    """
    check_tensor("tensor", tensor, "a float tensor")
    check_tensor("where", where, "a bool tensor")
    try:
        fits = torch.broadcast_shapes(tensor.shape, where.shape) == tensor.shape and where.device == tensor.device
    except RuntimeError:
        fits = False
    if not fits or tensor.dtype not in DTYPES or where.dtype != torch.bool:
        raise ValueError(
            f"poison takes a float tensor and where, bool, that broadcasts to its shape; got {describe(tensor)}, where "
            f"{describe(where)}"
        )
    _check_filling("what", what, tensor.dtype)
    what = what if abs(what) != 1e30 else math.copysign(min(1e30, torch.finfo(tensor.dtype).max), what)
    copy = tensor.detach().masked_fill(where, what)
    return copy.requires_grad_(tensor.requires_grad)


class _Largest(TorchDispatchMode):
    """The element count and shape of the largest tensor that an operation returned."""

    numel: int = 0
    shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            numel = x.untyped_storage().nbytes() // max(1, x.element_size()) if isinstance(x, Tensor) else 0
            if numel > self.numel:
                self.numel, self.shape = numel, tuple(x.shape)
        return result


@contextmanager
def largest_tensor() -> Iterator[_Largest]:
    """Record `.numel` and `.shape` of the largest tensor returned by an operation in the block, in backward passes too.

    Elements in memory are counted: an expanded view of one row counts as one row. Tensors inside a fused kernel are not
    counted.

    >>> with largest_tensor() as seen:
    ...     _ = torch.ones(3, 5) @ torch.ones(5, 7)
    >>> seen.numel
    35
    """
    with _Largest() as seen:
        yield seen


def oracle(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention by its definition in float64, row by row: out (B, H, T, V) and lse (B, H, T).

    Independent of `headwise.ops`, so that it can verify it. For each row it gathers the unmasked keys and computes with
    those only, so masked entries have no effect on outputs and gradients. Slow (0.1 ms per row), differentiable. A
    tensor mask is bool, True = attend; or a bias, where -inf means masked. Arguments and their errors are those of
    `headwise.attention`.

    >>> q, k, v = make_qkv(1, 1, 1, 1, 1, 4, 4)
    >>> torch.equal(oracle(q, k, v)[0], v.double())   # one key: its weight is 1
    True
    """
    _check(query, key, value, mask, scale, softcap, sinks, gate)
    (B, H, T, D), S, V = query.shape, key.shape[2], value.shape[3]
    group = H // key.shape[1]
    scale = D**-0.5 if scale is None else scale
    allowed, added = _dense(mask, (B, H, T, S), query.device)
    q, k, v = query.double(), key.double(), value.double()
    outs, lses = [], []
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        j = allowed[b, h, i].nonzero()[:, 0]
        scores = scale * (k[b, h // group, j] @ q[b, h, i])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + added[b, h, i, j]
        logits = scores if sinks is None else torch.cat([scores, sinks.double()[h : h + 1]])
        total = torch.logsumexp(logits, 0) if len(j) else scores.new_tensor(-math.inf)
        outs.append((scores - total).exp() @ v[b, h // group, j])
        lses.append(total)
    none = q.sum(-1)  # (B, H, T), for empty outputs, to stay differentiable
    out = torch.stack(outs).view(B, H, T, V) if outs else none[..., None].expand(B, H, T, V)
    lse = torch.stack(lses).view(B, H, T) if lses else none
    return (out if gate is None else out * _as_BHTV(gate.double())), lse


def naive(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute attention in plain PyTorch, in the inputs' dtype: the reference error of `assert_close_like_torch`.

    Arguments and their errors are those of `headwise.attention`. Returns three outputs (B, H, T, V), as the error of
    one is noisy: with the scale applied to the scores, to the queries, and as a square root to both (as in torch).

    >>> [out.dtype for out in naive(*make_qkv(1, 2, 1, 3, 5, 4, 6, dtype=torch.bfloat16))]
    [torch.bfloat16, torch.bfloat16, torch.bfloat16]
    """
    _check(query, key, value, mask, scale, softcap, sinks, gate)
    (B, H, T, D), S = query.shape, key.shape[2]
    allowed, added = _dense(mask, (B, H, T, S), query.device)
    k, v = (x.repeat_interleave(H // key.shape[1], 1) for x in (key, value))
    scale = D**-0.5 if scale is None else scale
    half, sign = abs(scale) ** 0.5, math.copysign(1, scale)
    outs = []
    for scores in ((query @ k.mT) * scale, (query * scale) @ k.mT, (query * half * sign) @ (k * half).mT):
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = (scores + added.to(query.dtype)).masked_fill(~allowed, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(query.dtype).view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        out = torch.softmax(scores, -1)[..., :S].masked_fill(~allowed.any(-1, keepdim=True), 0) @ v
        outs.append(out if gate is None else out * _as_BHTV(gate.to(query.dtype)))
    return tuple(outs)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    gate: Tensor | None,
) -> None:
    """Check the arguments of `oracle` and `naive` with the checks of `headwise.attention`."""
    check_attention(query, key, value)
    check_options(query, scale, softcap, sinks, 0.0)
    B, H, T, _ = query.shape
    as_mask(mask).check(B, H, T, key.shape[2], query.device)
    if gate is not None:
        check_gate(gate, (*query.shape[:3], value.shape[3]), query.device)


def _dense(mask: Mask | Tensor | None, full: tuple[int, int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bool mask and the bias (float64, with 0 instead of -inf), both (B, H, T, S)."""
    parts: tuple[Tensor | None, Tensor | None] = None, None
    if isinstance(mask, Tensor):
        parts = (mask, None) if mask.dtype == torch.bool else (mask != -math.inf, mask)
    elif mask is not None:
        mask = mask.computed_in(torch.float64)
        parts = mask.allowed(*full[2:], device=device), mask.added(*full[2:], device=device)
    allowed = torch.ones(1, dtype=torch.bool, device=device) if parts[0] is None else parts[0]
    added = torch.zeros(1, dtype=torch.float64, device=device) if parts[1] is None else parts[1].double()
    return allowed.expand(full), added.masked_fill(added == -math.inf, 0).expand(full)


def _as_BHTV(gate: Tensor) -> Tensor:
    """Reshape a gate (H,), (B, H), (B, H, T) or (B, H, T, V) to multiply (B, H, T, V)."""
    gate = gate[None] if gate.ndim == 1 else gate
    return gate[(...,) + (None,) * (4 - gate.ndim)]
