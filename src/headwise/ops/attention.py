"""The public op: check, choose, call. And `explain`, which tells what was chosen and why nothing else was."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ..shapes import check_attention, check_gate, check_options
from ..shapes.kinds import check_flags, shown
from .backends import blocks, flex, sdpa
from .call import Call, Limit, fitted, refusal
from .fence import alive_rows, fence, quiet, show, surely_tame
from .masks.compose import Mask
from .native import backend as native
from .reference import reference
from .scores import autocasts, without_autocast
from .storage.held import Held, Layout, parts_of
from .storage.int8 import Quantized
from .storage.paged import Paged

AUTO = "auto"
Keys: TypeAlias = Float[Tensor, "B K S D"] | Quantized | Paged | Held
Values: TypeAlias = Float[Tensor, "B K S V"] | Quantized | Paged | None


@overload
def attention(
    query: Float[Tensor, "B H T D"],
    key: Keys,
    value: Values = None,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    gate: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Float[Tensor, "B H T V"]: ...
@overload
def attention(
    query: Float[Tensor, "B H T D"],
    key: Keys,
    value: Values = None,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    gate: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]: ...
@overload
def attention(
    query: Float[Tensor, "B H T D"],
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
) -> Float[Tensor, "B H T V"] | tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]: ...
def attention(
    query: Float[Tensor, "B H T D"],
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
) -> Float[Tensor, "B H T V"] | tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]:
    """Scaled dot-product attention: `softmax(scale * Q K^T) V`, head by head (Vaswani et al. 2017, arXiv 1706.03762).

    Query head h reads key-value head h // (H / K): K = H is MHA, 1 < K < H is GQA, K = 1 is MQA.

    Args:
        query: (B, H, T, D), float32, bfloat16, float16 or float64; any strides. One dtype and device for all three.
        key: (B, K, S, D).
        value: (B, K, S, V). Key and value may both be `headwise.cache.Quantized`, int8 with a scale for every token and
            head: attended as they lie, as if they had been dequantised to float32. Or `key` is a cache of
            `headwise.cache`, and no value is given: the queries are then those of the last tokens it holds.
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
    if value is None:
        return _attend_held(
            key,
            query,
            mask=mask,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            gate=gate,
            return_lse=return_lse,
            backend=backend,
        )
    k, v, layout = parts_of(key, value)
    hasty = backend is AUTO or (isinstance(backend, str) and backend in (AUTO, "native"))
    if hasty and not torch.compiler.is_compiling():
        done = native.at_once(query, k, v, mask, scale, softcap, sinks, dropout, gate, return_lse, layout)
        if done is not None:
            return done
    query, k, v = _autocast(query, k, v)
    call = _checked(query, k, v, mask, scale, softcap, sinks, dropout, gate, return_lse, layout)
    with without_autocast(call.device_type):
        out, lse = _run(call, _choose(call, backend)[0])
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _attend_held(key: Any, query: Tensor, **options: Any) -> Any:
    if hasattr(key, "attend"):  # and not isinstance: asking a protocol takes longer than a token
        return key.attend(query, **options)
    raise TypeError(
        "attention takes query, key and value; value may be left out where key is a cache of headwise.cache; got "
        f"{type(key).__name__}"
    )


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, why, and why each other does not. Prints as text."""

    backend: str
    why: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.why}"]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.others.items()])


def explain(
    query: Float[Tensor, "B H T D"],
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
) -> Explanation:
    """Which backend `attention` would run with these arguments, why, and why not each other. Computes nothing.

    Where a gradient is needed it also says by which means.

    Raises what `attention` would raise.

    >>> q = torch.randn(1, 4, 9, 16, dtype=torch.float64)
    >>> print(explain(q, q, q, softcap=30.0))
    reference: float64 runs on the definition
      not native: headwise's own kernel has no float64
      not sdpa: torch's SDPA has no softcap
      not flex: FlexAttention has no float64
      not blocks: able, but slower than a fused kernel
    """
    k, v, layout = parts_of(key, value)
    query, k, v = _autocast(query, k, v)
    call = _checked(query, k, v, mask, scale, softcap, sinks, dropout, gate, return_lse, layout)
    chosen, why = _choose(call, backend)
    others = {name: refusal(other.limits, call) or other.aside for name, other in _BACKENDS.items() if name != chosen}
    if layout is not None and chosen != "native":
        why += "; keys and values are copied, dequantised as a whole, first"
    return Explanation(chosen, why, others)


class _Backend(NamedTuple):
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    limits: tuple[Limit, ...]
    aside: str  # what `explain` says where it could serve and is not chosen
    entire: bool = False  # takes any rows, keeps NaN and Inf in their place, and gates where no gradient is needed


def _run_reference(call: Call) -> tuple[Tensor, Tensor | None]:
    return reference(
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout=call.dropout,
    )


_BACKENDS = {
    "native": _Backend(native.run, native.LIMITS, "able, but not the one that was asked for", entire=True),
    "sdpa": _Backend(sdpa.run, sdpa.LIMITS, "able, but not the faster one here"),
    "flex": _Backend(flex.run, flex.LIMITS, "able, but fused on CUDA only, and worth its tiles from 128 x 128 on"),
    "blocks": _Backend(blocks.run, blocks.LIMITS, "able, but slower than a fused kernel"),
    "reference": _Backend(_run_reference, (), "able, but it builds the whole T x S matrix"),
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
    _Preference("flex", flex.pays, "on CUDA, a mask that lets whole tiles be skipped, or what SDPA has not"),
    _Preference("blocks", sdpa.loses, "float32 decoding on the CPU: a plain product is as fast as the fused kernel"),
    _Preference("sdpa", lambda c: True, "torch's fused kernel keeps our meaning here"),
    _Preference(
        "blocks",
        lambda c: True,
        "plain torch ops, a block of query rows at a time: honours everything in O(n) memory",
    ),
)


def _choose(call: Call, name: str) -> tuple[str, str]:
    """The backend that serves the call, and why."""
    if isinstance(name, str) and name == AUTO:
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


def _run(call: Call, name: str) -> tuple[Tensor, Tensor | None]:
    """Run a backend; the gate comes last."""
    if call.layout is not None and name != "native":
        out, lse = _run(call.plain(), name)
        return out.to(call.query.dtype), lse
    if _BACKENDS[name].entire:
        out, lse = _BACKENDS[name].run(call)
        if not call.needs_grad:
            return out, lse
    else:
        out, lse = _fenced(call, name)
    return out if call.gate is None else _gated(out, call), lse


def _gated(out: Tensor, call: Call) -> Tensor:
    """The output times the gate, whose gradient is 0, too, in rows that may attend nothing, whatever comes in there."""
    gate = call.gate.to(out.dtype)  # type: ignore[union-attr]
    if call.mask is None or not gate.requires_grad:
        return out * gate
    T, S = call.sizes[3:]
    return quiet(out * gate, ~alive_rows(call.mask, T, S, out.device)[..., None])


def _fenced(call: Call, name: str) -> tuple[Tensor, Tensor | None]:
    """Run a backend on aligned rows, behind the fence that keeps NaN, Inf and the huge where they belong."""
    V, run = call.value.shape[-1], _BACKENDS[name].run
    query, key, value = (_aligned(x) for x in (call.query, call.key, call.value))
    call = replace(call, query=query, key=key, value=value)
    if name == "reference" or call.is_empty:
        out, lse = run(call)
        return out[..., :V], lse
    # A bad value always shows in the output, 0 * NaN being NaN, so it is looked for there, where less is to be read.
    # Not so in a gradient; and a second run would draw another dropout.
    once = call.needs_grad or call.dropout > 0
    if surely_tame(query, key, *([value] if once else [])):
        out, lse = run(call)
        if once or surely_tame(out):
            return out[..., :V], lse
    query, key, value, rows_BHT = fence(query, key, value, call.mask)
    out, lse = run(replace(call, query=query, key=key, value=value))
    return show(out[..., :V], rows_BHT[..., None]), None if lse is None else show(lse, rows_BHT)


def _aligned(x: Tensor) -> Tensor:
    """The last axis padded with zeros to whole 16 bytes, which changes no score and no value.

    Matrix products give other last bits where a matrix starts off 16 bytes, so that a row would depend on its place in
    the batch (measured: MKL, float32, D = 11).
    """
    lacking = -x.shape[-1] % (16 // x.itemsize)
    return torch.nn.functional.pad(x, (0, lacking)) if lacking else x


def _checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    gate: Tensor | None,
    return_lse: bool,
    layout: Layout | None,
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
    mask = fitted(mask, query, sized)
    mask = None if mask is None else mask.trimmed(T, S)
    gate = None if gate is None else check_gate(gate, (B, H, T, V), query.device)
    return Call(query, key, value, mask, scale, softcap, sinks, dropout, return_lse, gate, layout)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the op runs in its lower precision, as torch's own SDPA does."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not autocasts(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
