"""The public operator: check the arguments, choose a backend, run it. `explain` returns the choice and its reasons."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ..shapes import check_attention
from ..shapes.arguments import check_flags, shown
from .autocast import in_autocast_dtype, without_autocast
from .backends import blocks, flex, sdpa
from .backends.wrappers import aligned, dense_keys, fenced, gated
from .call import Call, Limit, Result, Run, refusal
from .masks.mask import Mask
from .native import backend as native
from .options import AttentionKeywords, ScoreOptions
from .reference import reference
from .sharding.dtensor_attention import any_dtensor, attend_parts
from .storage.layout import Cache, StorageLayout, parts_of
from .storage.paged import Paged
from .storage.quantized import Quantized
from .torch_keywords import refuse_others
from .triton import triton_backend as triton

Query: TypeAlias = Float[Tensor, "B H T D"]
Keys: TypeAlias = Float[Tensor, "B K S D"] | Quantized | Paged | Cache
Values: TypeAlias = Float[Tensor, "B K S V"] | Quantized | Paged | None
Out: TypeAlias = Float[Tensor, "B H T V"]
Lse: TypeAlias = Float[Tensor, "B H T"]
ONLY_NATIVE_DROPOUT = (
    "over processes dropout needs headwise's own kernel, which draws it by the position among all heads and tokens"
)


@overload
def attention(
    query: Query,
    key: Keys,
    value: Values = None,
    *,
    return_lse: Literal[False] = False,
    backend: str = "auto",
    **options: Unpack[AttentionKeywords],
) -> Out: ...
@overload
def attention(
    query: Query,
    key: Keys,
    value: Values = None,
    *,
    return_lse: Literal[True],
    backend: str = "auto",
    **options: Unpack[AttentionKeywords],
) -> tuple[Out, Lse]: ...
@overload
def attention(
    query: Query,
    key: Keys,
    value: Values = None,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[AttentionKeywords],
) -> Out | tuple[Out, Lse]: ...
def attention(
    query: Query,
    key: Keys,
    value: Values = None,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    gate: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **others: Any,
) -> Out | tuple[Out, Lse]:
    """Compute scaled dot-product attention: `softmax(scale * Q K^T) V` (Vaswani et al. 2017, arXiv 1706.03762).

    Query head h uses key-value head h // (H / K): K = H is MHA, 1 < K < H is GQA, K = 1 is MQA.

    Args:
        query: (B, H, T, D), float32, bfloat16, float16 or float64; any strides. Query, key and value have one dtype and
            one device. All three may be DTensors sharded by batch or by head; replicated keys and values are possible.
        key: (B, K, S, D).
        value: (B, K, S, V). Key and value may both be `headwise.cache.Quantized` (int8 with one scale per token and
            head). They are used without a copy, and the result is that of keys and values dequantised to float32. Or
            `key` is a cache of `headwise.cache` and `value` is omitted: the queries then belong to its last tokens.
        mask: the keys that each query may attend to: `causal()`, `window(4)`, `lengths(n)`, `bias(t)`, ..., joined with
            `&`; or a bool tensor (True = attend) or a float tensor (added to the scores) that broadcasts to
            (B, H, T, S).
        scale: factor of the scores; D ** -0.5 by default. 0, or an absolute value from 2**-100 to 2**100, because the
            scores are float32.
        softcap: bounds the scores by `softcap * tanh(score / softcap)`; from 2**-100 to 2**100.
        sinks: (H,) logits that are added to the softmax's denominator and have no value.
        dropout: probability of zeroing a weight; always active, so pass 0 outside of training.
        gate: (H,), (B, H), (B, H, T) or (B, H, T, V); multiplies the output.
        return_lse: also return the log of the softmax's denominator (sink included), float32 (B, H, T).
        backend: `auto`, or a backend's name: `native`, `triton`, `sdpa`, `flex`, `blocks`, `reference`.
        **others: an error; the message names the equivalent of another library's option.

    Returns:
        out (B, H, T, V) in the query's dtype; with `return_lse`, (out, lse).
        A row that may attend to no key has output 0, lse -inf and gradient 0.

    Raises:
        ValueError: shapes, dtypes, devices or values do not fit, or the named backend does not support an argument;
            the message gives the reason and the remedy.
        TypeError: an argument has a wrong type.

    >>> from headwise.ops.masks import causal, window
    >>> q, k, v = torch.randn(2, 8, 5, 16), torch.randn(2, 2, 7, 16), torch.randn(2, 2, 7, 16)
    >>> attention(q, k, v, mask=causal() & window(4)).shape
    torch.Size([2, 8, 5, 16])
    """
    if others:
        refuse_others(others)
    if value is None:
        options = {"mask": mask, "scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout, "gate": gate}
        return _of_cache(key).attend(query, return_lse=return_lse, backend=backend, **options)
    # There are three ways, tried in this order. The fast path checks and runs plain calls of the native kernel in one
    # step, because the checks below take longer than a decode step. It returns None for all other calls and for
    # mistakes, which the checks then report. DTensors are split into their local parts, and each part comes back here.
    # All else is checked, becomes a `Call`, and runs on the backend that is named, or else on the first one of
    # `_PREFERENCES` that supports it.
    k, v, layout = parts_of(key, value)
    if type(backend) is str and backend in ("auto", "native") and not torch.compiler.is_compiling():
        result = native.fast_path(query, k, v, mask, scale, softcap, sinks, dropout, gate, return_lse, layout)
        if result is not None:
            return result
    if any_dtensor(query, k, v):
        rest = {"scale": scale, "softcap": softcap, "dropout": dropout, "return_lse": return_lse, "backend": backend}
        return attend_parts(attention_of_part, (query, k, v), mask, sinks, gate, **rest)
    query, k, v = in_autocast_dtype(query, k, v)
    call = _checked(query, k, v, mask, scale, softcap, sinks, dropout, gate, return_lse, layout)
    with without_autocast(call.device_type):
        out, lse = _run(call, backend)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attention_of_part(query: Tensor, key: Any, value: Any, *, seed: Tensor | None = None, **options: Any) -> Any:
    """Run `attention` on a part of a call (rows, heads, tokens), with the dropout of the whole call.

    The arguments and errors are those of `attention`, and `seed` is the dropout seed from `seed_of_part`, None without
    dropout. With dropout, a call that the native kernel does not support raises ValueError, because no other backend
    can reproduce the dropout of a part.
    """
    if seed is None or query.numel() == 0:
        return attention(query, key, value, **options)
    backend, with_lse = options.pop("backend", "auto"), options.pop("return_lse", False)
    if value is None:
        raise ValueError(f"{ONLY_NATIVE_DROPOUT}; caches have no dropout; pass dropout=0")
    k, v, layout = parts_of(key, value)
    query, k, v = in_autocast_dtype(query, k, v)
    call = _checked(query, k, v, return_lse=with_lse, layout=layout, **options)
    why_not = refusal(native.LIMITS, call) if backend in ("auto", "native") else f"backend {shown(backend)} does not"
    if why_not is not None:
        raise ValueError(f"{ONLY_NATIVE_DROPOUT}; it does not support this call: {why_not}; pass dropout=0")
    with without_autocast(call.device_type):
        out, lse = native.run(replace(call, seed=seed))
    return (out, lse) if with_lse else out


def _of_cache(key: Any) -> Any:
    if hasattr(key, "attend"):  # isinstance with a protocol takes longer than a decode step
        return key
    raise TypeError(
        "attention takes query, key and value; value may be left out where key is a cache of headwise.cache; got "
        f"{type(key).__name__}"
    )


@dataclass(frozen=True)
class Explanation:
    """The backend that runs a call, the reason, and the reason against each other backend. Prints as text.

    Attributes:
        backend: the name of the backend that runs.
        why: the reason, in one line.
        others: backend name -> reason why it does not run.

    >>> explained = explain(*torch.randn(3, 1, 1, 1, 4), backend="reference")
    >>> explained.backend, explained.why
    ('reference', 'requested by name')
    >>> len({explained, explain(*torch.randn(3, 1, 1, 1, 4), backend="reference")})
    1
    """

    backend: str
    why: str
    others: dict[str, str] = field(hash=False)

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.why}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.others.items()])


def explain(
    query: Query,
    key: Keys,
    value: Values = None,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[AttentionKeywords],
) -> Explanation:
    """Explain which backend `attention` would run with these arguments. Nothing is computed.

    The arguments and errors are those of `attention`. If a gradient is needed, the reason also names the method that
    computes it.

    >>> q = torch.randn(1, 4, 9, 16, dtype=torch.float64)
    >>> print(explain(q, q, q, softcap=30.0))  # doctest: +ELLIPSIS
    reference: float64 is computed by the reference
      not native: headwise's own kernel has no float64
      not triton: ...
      not sdpa: torch's SDPA has no softcap
      not flex: FlexAttention has no float64
      not blocks: supports the call, but is slower than a fused kernel
    """
    refuse_others(name for name in options if name not in AttentionKeywords.__optional_keys__)
    k, v, layout = parts_of(key, value)
    query, k, v = in_autocast_dtype(query, k, v)
    call = _checked(query, k, v, return_lse=return_lse, layout=layout, **options)
    chosen, why = _choose(call, backend)
    others = {
        name: refusal(other.limits, call) or other.not_chosen for name, other in _BACKENDS.items() if name != chosen
    }
    if layout is not None and _BACKENDS[chosen].copies:
        why += "; keys and values are copied, dequantised as a whole, first"
    return Explanation(chosen, why, others)


class _Backend(NamedTuple):
    run: Run
    limits: tuple[Limit, ...]
    not_chosen: str  # the reason in `explain` if it supports the call but another backend is chosen
    copies: bool = True  # True if int8 or paged keys and values are copied to plain tensors first


def _run_reference(call: Call) -> Result:
    mask, scale, softcap, sinks, dropout, _ = call.options
    return reference(
        call.query, call.key, call.value, mask=mask, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout
    )


# The native kernel and those in Triton need few wrappers: they support int8, pages and unaligned rows, and isolate
# NaN and Inf.
_BACKENDS = {
    "native": _Backend(native.run, native.LIMITS, "supports the call, but another backend was requested", copies=False),
    "triton": _Backend(gated(triton.run), triton.LIMITS, "supports the call, but SDPA is faster here", copies=False),
    "sdpa": _Backend(
        dense_keys(gated(aligned(fenced(sdpa.run)))), sdpa.LIMITS, "supports the call, but is slower here"
    ),
    "flex": _Backend(
        dense_keys(gated(aligned(fenced(flex.run)))),
        flex.LIMITS,
        "supports the call, but is faster only on CUDA from 128 x 128 on",
    ),
    "blocks": _Backend(
        dense_keys(gated(aligned(fenced(blocks.run)))),
        blocks.LIMITS,
        "supports the call, but is slower than a fused kernel",
    ),
    "reference": _Backend(
        dense_keys(gated(aligned(_run_reference))), (), "supports the call, but builds the T x S matrix"
    ),
}


class _Preference(NamedTuple):
    backend: str
    when: Callable[[Call], bool]
    why: str


# The first entry that applies and whose backend has no limit against the call decides.
_PREFERENCES = (
    _Preference("reference", lambda c: c.is_empty, "empty batch, queries or keys: the reference is used"),
    _Preference("reference", lambda c: c.query.dtype == torch.float64, "float64 is computed by the reference"),
    _Preference(
        "reference", lambda c: c.is_transformed, "torch.func and forward-mode AD are computed by the reference"
    ),
    _Preference("native", lambda c: not c.needs_grad, "headwise's own kernel"),
    _Preference(
        "native",
        lambda c: True,
        "headwise's own kernel, also for the gradient; gradients of gradients are computed by the reference",
    ),
    _Preference(
        "triton",
        triton.is_worthwhile,
        "headwise's own kernel for NVIDIA GPUs: no fused kernel of torch supports this call without copies or tiles "
        "that are empty",
    ),
    _Preference(
        "flex",
        flex.is_worthwhile,
        "on CUDA, the mask lets FlexAttention skip tiles, or SDPA does not support an option",
    ),
    _Preference(
        "blocks", sdpa.is_slower, "float32 decoding on the CPU: plain matrix products are as fast as the fused kernel"
    ),
    _Preference(
        "sdpa",
        lambda c: c.needs_grad and c.device_type == "cpu",
        "SDPA's fused kernel supports this call; on some CPUs the number of threads changes its gradient's bits",
    ),
    _Preference("sdpa", lambda c: True, "SDPA's fused kernel supports this call"),
    _Preference("triton", lambda c: c.device_type == "cuda", "headwise's own kernel for NVIDIA GPUs"),
    _Preference(
        "flex", flex.is_large_enough, "on CUDA, no fused kernel of SDPA supports this call, and FlexAttention does"
    ),
    _Preference(
        "blocks",
        lambda c: True,
        "plain torch operations on blocks of query rows: supports every option, in O(n) memory",
    ),
)


def _run(call: Call, name: str) -> Result:
    """Run the backend that is chosen, and another one if torch.compile refuses to compile FlexAttention once more."""
    try:
        return _BACKENDS[_choose(call, name)[0]].run(call)
    except flex.RecompileLimit:  # from now on it is a limit of `flex`
        return _BACKENDS[_choose(call, name)[0]].run(call)


def _choose(call: Call, name: str) -> tuple[str, str]:
    """Return the name of the backend that runs the call, and the reason."""
    if isinstance(name, str) and name == "auto":
        return next(
            (p.backend, p.why)
            for p in _PREFERENCES
            if p.when(call) and refusal(_BACKENDS[p.backend].limits, call) is None
        )
    if not isinstance(name, str) or name not in _BACKENDS:
        raise ValueError(f"backend is auto, {', '.join(_BACKENDS)}; got {shown(name)}")
    why_not = refusal(_BACKENDS[name].limits, call)
    if why_not is not None:
        able = [other for other in _BACKENDS if refusal(_BACKENDS[other].limits, call) is None]
        raise ValueError(f"backend {name!r} does not support this call: {why_not}; use 'auto' or {' or '.join(able)}")
    return name, "requested by name"


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    gate: Tensor | None = None,
    return_lse: bool = False,
    layout: StorageLayout | None = None,
) -> Call:
    quantised, sized = layout is not None and layout.key_scale is not None, key
    if layout is not None:
        layout.check(key, value)
        sized = layout.shown(key)
        check_attention(query, sized, layout.shown(value), quantised=quantised)
    else:
        check_attention(query, key, value)
    check_flags(return_lse=return_lse)
    rest = (mask, scale, softcap, sinks, dropout, gate)
    value_dim = value.shape[3] if layout is None else layout.width(value)
    options = ScoreOptions.checked(query, sized, *rest, value_dim=value_dim).trimmed(query.shape[2], sized.shape[2])
    return Call(query, key, value, options, return_lse, layout)
