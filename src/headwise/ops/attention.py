"""The public op: check, choose, call. And `explain`, which tells what was chosen and why nothing else was."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ..shapes import check_attention, check_gate, check_options
from ..shapes.arguments import check_flags, shown
from .autocast import in_autocast_dtype, without_autocast
from .backends import blocks, flex, sdpa
from .backends.wrappers import aligned, dense_keys, fenced, gated
from .call import Call, Limit, Result, Run, refusal
from .masks.mask import Mask
from .native import backend as native
from .options import CallOptions, Options, Scoring
from .reference import reference
from .sharding.dtensor_attention import any_dtensor, attend_parts
from .storage.int8 import Quantized
from .storage.layout import Cache, StorageLayout, parts_of
from .storage.paged import Paged
from .torch_keywords import refuse_others

Query: TypeAlias = Float[Tensor, "B H T D"]
Keys: TypeAlias = Float[Tensor, "B K S D"] | Quantized | Paged | Cache
Values: TypeAlias = Float[Tensor, "B K S V"] | Quantized | Paged | None
Out: TypeAlias = Float[Tensor, "B H T V"]
Lse: TypeAlias = Float[Tensor, "B H T"]
BY_PLACE = "over processes dropout is drawn by headwise's own kernel, from a weight's place among all heads and tokens"


@overload
def attention(
    query: Query, key: Keys, value: Values = None, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Out: ...
@overload
def attention(
    query: Query, key: Keys, value: Values = None, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Out, Lse]: ...
@overload
def attention(
    query: Query, key: Keys, value: Values = None, *, return_lse: bool = False, **options: Unpack[Options]
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
    """Scaled dot-product attention: `softmax(scale * Q K^T) V`, head by head (Vaswani et al. 2017, arXiv 1706.03762).

    Query head h reads key-value head h // (H / K): K = H is MHA, 1 < K < H is GQA, K = 1 is MQA.

    Args:
        query: (B, H, T, D), float32, bfloat16, float16 or float64; any strides. One dtype and device for all three.
            All three may be DTensors cut by batch or by head; keys and values of all heads serve queries of some.
        key: (B, K, S, D).
        value: (B, K, S, V). Key and value may both be `headwise.cache.Quantized`, int8 with a scale for every token and
            head: read in place, with the result of keys and values dequantised to float32. Or `key` is a cache of
            `headwise.cache`, and `value` is left out: the queries are then those of the last tokens in the cache.
        mask: what may be attended: `causal()`, `window(4)`, `lengths(n)`, `bias(t)`, ..., joined with `&`; or a bool
            tensor (True = attend), or a float tensor (added), that broadcasts to (B, H, T, S).
        scale: factor of the scores; D ** -0.5 by default. 0, or in size from 2**-100 to 2**100, as float32 wants it.
        softcap: bounds the scores by `softcap * tanh(score / softcap)`; from 2**-100 to 2**100.
        sinks: (H,) logits that join the softmax's denominator and carry no value.
        dropout: probability of zeroing a weight; always active, so pass 0 outside of training.
        gate: (H,), (B, H), (B, H, T) or (B, H, T, V); multiplies the output.
        return_lse: also return the log of the softmax's denominator (sink included), float32 (B, H, T).
        backend: `auto`, or one by name: `native`, `sdpa`, `flex`, `blocks`, `reference`.

    Returns:
        out (B, H, T, V) in the query's dtype; with `return_lse`, (out, lse).
        A row that may attend nothing is 0, its lse -inf, its gradient 0.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, or a backend asked for by name that cannot
            honour an argument; the text says why and what to do.
        TypeError: an argument of a wrong type.

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
        out, lse = _BACKENDS[_choose(call, backend)[0]].run(call)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attention_of_part(query: Tensor, key: Any, value: Any, *, seed: Tensor | None = None, **options: Any) -> Any:
    """`attention` of some rows, heads and tokens of a call, whose dropout keeps the weights that the whole call keeps.

    Args:
        query: as `attention`, as key and value and the options.
        seed: what dropout is drawn from, of `seed_of_part`; None where nothing is dropped.

    Raises:
        ValueError: as `attention`; and a call that headwise's own kernel does not serve: no other draws by place.
    """
    if seed is None or query.numel() == 0:
        return attention(query, key, value, **options)
    backend, with_lse = options.pop("backend", "auto"), options.pop("return_lse", False)
    if value is None:
        raise ValueError(f"{BY_PLACE}; a cache is not drawn for; pass dropout=0")
    k, v, layout = parts_of(key, value)
    query, k, v = in_autocast_dtype(query, k, v)
    call = _checked(query, k, v, return_lse=with_lse, layout=layout, **options)
    why_not = refusal(native.LIMITS, call) if backend in ("auto", "native") else f"backend {shown(backend)} does not"
    if why_not is not None:
        raise ValueError(f"{BY_PLACE}, which does not serve this call: {why_not}; pass dropout=0")
    with without_autocast(call.device_type):
        out, lse = native.run(replace(call, seed=seed))
    return (out, lse) if with_lse else out


def _of_cache(key: Any) -> Any:
    if hasattr(key, "attend"):  # and not isinstance: asking a protocol takes longer than a token
        return key
    raise TypeError(
        "attention takes query, key and value; value may be left out where key is a cache of headwise.cache; got "
        f"{type(key).__name__}"
    )


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, why, and why each other does not. Prints as text.

    Attributes:
        backend: the name of the one that runs.
        why: the reason, in one line.
        others: name -> reason of each other one.

    >>> explained = explain(*torch.randn(3, 1, 1, 1, 4), backend="reference")
    >>> explained.backend, explained.why
    ('reference', 'asked for by name')
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
    **options: Unpack[CallOptions],
) -> Explanation:
    """Which backend `attention` would run with these arguments, why, and why not each other. Computes nothing.

    Where a gradient is needed it also says by which means.

    Args:
        query, key, value, return_lse, backend: as for `attention`.
        options: mask, scale, softcap, sinks, dropout and gate, as for `attention`.

    Raises what `attention` would raise.

    >>> q = torch.randn(1, 4, 9, 16, dtype=torch.float64)
    >>> print(explain(q, q, q, softcap=30.0))
    reference: float64 runs on the definition
      not native: headwise's own kernel has no float64
      not sdpa: torch's SDPA has no softcap
      not flex: FlexAttention has no float64
      not blocks: able, but slower than a fused kernel
    """
    refuse_others({name: None for name in options if name not in CallOptions.__optional_keys__})
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
    not_chosen: str  # what `explain` says where it could serve and another is chosen
    copies: bool = True  # keys and values that are int8 or lie in pages


def _run_reference(call: Call) -> Result:
    scoring = call.scoring
    return reference(
        call.query,
        call.key,
        call.value,
        mask=scoring.mask,
        scale=scoring.scale,
        softcap=scoring.softcap,
        sinks=scoring.sinks,
        dropout=call.dropout,
    )


# Native needs nothing around it: it reads int8 and pages, any rows, keeps NaN and Inf in their place, and gates.
_BACKENDS = {
    "native": _Backend(native.run, native.LIMITS, "able, but not the one that was asked for", copies=False),
    "sdpa": _Backend(dense_keys(gated(aligned(fenced(sdpa.run)))), sdpa.LIMITS, "able, but not the faster one here"),
    "flex": _Backend(
        dense_keys(gated(aligned(fenced(flex.run)))),
        flex.LIMITS,
        "able, but fused on CUDA only, and worth its tiles from 128 x 128 on",
    ),
    "blocks": _Backend(
        dense_keys(gated(aligned(fenced(blocks.run)))), blocks.LIMITS, "able, but slower than a fused kernel"
    ),
    "reference": _Backend(dense_keys(gated(aligned(_run_reference))), (), "able, but it builds the whole T x S matrix"),
}


class _Preference(NamedTuple):
    backend: str
    when: Callable[[Call], bool]
    why: str


# The first line whose case holds and whose backend has no limit against it decides.
_PREFERENCES = (
    _Preference("reference", lambda c: c.is_empty, "no batch, no query or no key: nothing to be fast at"),
    _Preference("reference", lambda c: c.query.dtype == torch.float64, "float64 runs on the definition"),
    _Preference(
        "reference", lambda c: c.is_transformed, "inside torch.func or forward-mode AD: the definition has every rule"
    ),
    _Preference("native", lambda c: not c.needs_grad, "headwise's own kernel"),
    _Preference(
        "native", lambda c: True, "headwise's own kernel, and so its gradient; a gradient of that by the definition"
    ),
    _Preference("flex", flex.is_worthwhile, "on CUDA, a mask that lets whole tiles be skipped, or what SDPA has not"),
    _Preference(
        "blocks", sdpa.is_slower, "float32 decoding on the CPU: a plain product is as fast as the fused kernel"
    ),
    _Preference(
        "sdpa",
        lambda c: c.needs_grad and c.device_type == "cpu",
        "torch's fused kernel keeps our meaning here; on some CPUs the number of threads changes its gradient's bits",
    ),
    _Preference("sdpa", lambda c: True, "torch's fused kernel keeps our meaning here"),
    _Preference(
        "blocks",
        lambda c: True,
        "plain torch ops, a block of query rows at a time: honours everything in O(n) memory",
    ),
)


def _choose(call: Call, name: str) -> tuple[str, str]:
    """The backend that serves the call, and why."""
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
        raise ValueError(f"backend {name!r} cannot serve this call: {why_not}; use 'auto' or {' or '.join(able)}")
    return name, "asked for by name"


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
    scale, softcap, dropout = check_options(query, scale, softcap, sinks, dropout)
    check_flags(return_lse=return_lse)
    (B, H, T, _), S, V = query.shape, sized.shape[2], value.shape[3]
    scoring = Scoring.of(query, sized, mask, scale, softcap, sinks).trimmed(T, S)
    gate = None if gate is None else check_gate(gate, (B, H, T, V), query.device)
    return Call(query, key, value, scoring, dropout, return_lse, gate, layout)
