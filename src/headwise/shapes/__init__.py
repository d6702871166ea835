"""The names of dimensions, all shape checks, and their error messages.

| letter | size                                      |
|--------|-------------------------------------------|
| B      | batch                                     |
| T      | query length                              |
| S      | key length                                |
| H      | query heads                               |
| K      | key-value heads                           |
| G      | query heads per key-value head: G = H / K |
| D      | head dim of queries and keys (d_k)        |
| V      | head dim of values (d_v)                  |
| M      | d_model                                   |

query (B, H, T, D), key (B, K, S, D), value (B, K, S, V), out (B, H, T, V). Query head h reads key-value head h // G.
Inside `ops/` a tensor carries its shape as a suffix: `q_BHTD`.

A check writes its text where it raises and nowhere before: torch.compile takes a size that stands in a text for a
constant, so that every new size would be compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from .arguments import DTYPES as DTYPES
from .arguments import FAR, check_dense, check_tensor, fits, is_one_of, shown
from .arguments import INTEGERS as INTEGERS
from .arguments import describe as describe

LAYOUT = "attention takes query (B, H, T, D), key (B, K, S, D), value (B, K, S, V)"
AXES = "is the layout (B, heads, length, D)? (B, length, heads, D) becomes that by .transpose(1, 2)"
SPLIT = "split heads with .unflatten(-1, (H, D)).transpose(1, 2), and give (H, T, D) alone a batch of one by x[None]"
CONVERT = "convert an array with torch.as_tensor(), and pass a cache without a value, as attention(query, cache)"
# Factors of scores stay far from the limits of float32, whose exponents go from -126 to 127. The product of a factor
# with a score, or with the log2(e) that a kernel multiplies in, then neither overflows nor underflows.
LEAST_FACTOR, MOST_FACTOR = 2.0**-100, 2.0**100
MASK_RULE = "mask is a Mask (causal(), window(), ...), a bool tensor with True = attend, or a float bias"


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores, biases and softmax are computed: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_attention(query: Tensor, key: Tensor, value: Tensor, *, quantised: bool = False) -> None:
    """Check ranks, sizes, head counts, dtypes and devices of query, key and value.

    If `quantised` is set, keys and values may have another dtype than the query.

    Raises TypeError for an argument that is not a tensor, ValueError for other errors.
    """
    check_query_key(query, key, quantised=quantised)
    if not isinstance(value, Tensor):
        raise TypeError(f"{LAYOUT} as tensors; value is {type(value).__name__}; {CONVERT}")
    check_dense("value", value)
    if value.ndim != 4:
        raise ValueError(f"{LAYOUT}: four axes each; {_got(query, key, value)}; {SPLIT}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key and value share batch, key-value heads and length: key {tuple(key.shape[:3])}, "
            f"value {tuple(value.shape[:3])}; project or slice both in the same way"
        )
    if value.dtype != query.dtype and not quantised:
        raise ValueError(f"query, key and value share one dtype; {_got(query, key, value)}; cast with .to(query.dtype)")
    if value.device != query.device:
        raise ValueError(
            f"query, key and value are on one device; {_got(query, key, value)}; move with .to(query.device)"
        )
    if value.shape[3] == 0:
        raise ValueError(f"the value dim V is at least 1; {_got(query, key, value)}")


def check_query_key(query: Tensor, key: Tensor, *, quantised: bool = False) -> None:
    """Check query (B, H, T, D) and key (B, K, S, D) like `check_attention`; this is enough for scores."""
    for name, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{LAYOUT} as tensors; {name} is {type(tensor).__name__}; {CONVERT}")
        check_dense(name, tensor)
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"{LAYOUT}: four axes each; {_got(query, key)}; {SPLIT}")
    if query.dtype not in DTYPES:
        raise ValueError(
            f"attention runs in float32, bfloat16, float16 or float64; {_got(query, key)}; convert with .float()"
        )
    if key.dtype != query.dtype and not quantised:
        raise ValueError(f"query, key and value share one dtype; {_got(query, key)}; cast with .to(query.dtype)")
    if key.device != query.device:
        raise ValueError(f"query, key and value are on one device; {_got(query, key)}; move with .to(query.device)")
    if key.shape[0] != query.shape[0]:
        raise ValueError(
            f"query and key share the batch size: query B = {query.shape[0]}, key B = {key.shape[0]}; "
            f"expand the smaller with .expand({query.shape[0]}, -1, -1, -1)"
        )
    if key.shape[3] != query.shape[3]:
        raise ValueError(
            f"query and key share the head dim D: query D = {query.shape[3]}, key D = {key.shape[3]}; "
            f"{AXES}; {_got(query, key)}"
        )
    if query.shape[3] == 0:
        raise ValueError(f"the head dim D is at least 1; {_got(query, key)}")
    H, K = query.shape[1], key.shape[1]
    check_head_counts(H, K, f"; {AXES}; {_got(query, key)}" if K and H % K else "")


def _got(query: Tensor, key: Tensor, value: Tensor | None = None) -> str:
    got = f"got query {describe(query)}, key {describe(key)}"
    return got if value is None else f"{got}, value {describe(value)}"


def check_quantized(name: str, data: Tensor, scale: Tensor, bits: int = 8) -> None:
    """Check the tensors of quantised keys or values: int8 (B, K, S, D) and float32 (B, K, S) on one device.

    With 4 or 3 bits, the data is uint8 with rows of D * bits / 8 bytes.
    """
    if bits not in (8, 4, 3):
        raise ValueError(f"a quantised {name} has 8, 4 or 3 bits; got {bits!r}")
    form = "int8 (B, K, S, D)" if bits == 8 else f"uint8 (B, K, S, D * {bits} / 8)"
    rule = f"a quantised {name} is data, {form}, and scale, float32 (B, K, S)"
    for part, tensor in (("data", data), ("scale", scale)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{rule}; {part} is {type(tensor).__name__}")
        check_dense(f"{part} of the quantised {name}", tensor)
    if data.dtype != (torch.int8 if bits == 8 else torch.uint8) or scale.dtype != torch.float32:
        raise ValueError(f"{rule}; {_parts(data, scale)}; headwise.cache.quantize makes both from floats")
    if data.ndim != 4 or scale.shape != data.shape[:3] or (bits < 8 and data.shape[3] % bits):
        raise ValueError(f"{rule}: one scale for every token and head; {_parts(data, scale)}")
    if scale.device != data.device:
        raise ValueError(f"{rule} on one device; {_parts(data, scale)}; move with .to(device)")


def _parts(data: Tensor, scale: Tensor) -> str:
    return f"got data {describe(data)}, scale {describe(scale)}"


def check_head_counts(num_heads: int, num_kv_heads: int, more: str = "") -> None:
    """Raise ValueError unless num_kv_heads divides num_heads and both are positive; `more` is added to the message."""
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"num_heads and num_kv_heads are at least 1; got H = {num_heads}, K = {num_kv_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads: H = {num_heads}, K = {num_kv_heads} leave "
            f"{num_heads % num_kv_heads} over; query head h reads key-value head h // (H / K){more}"
        )


def check_options(
    query: Tensor | None, scale: float | None, softcap: float | None, sinks: Tensor | None, dropout: float = 0.0
) -> tuple[float, float | None, float]:
    """Return scale (D ** -0.5 by default), softcap and dropout as plain numbers; check sinks only with a query.

    Raises TypeError or ValueError with the name of the option.
    """
    for name, number in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        real = isinstance(number, (Real, torch.SymFloat, torch.SymInt)) and not isinstance(number, bool)
        if real or (number is None and name != "dropout"):
            continue
        hint = "; take it out of the tensor with .item()" if isinstance(number, Tensor) else ""
        rule = "a number" if name == "dropout" else "a number or None"
        raise TypeError(f"{name} is {rule}; got {type(number).__name__}{hint}")
    if scale is not None and scale != 0 and not LEAST_FACTOR <= abs(scale) <= MOST_FACTOR:
        raise ValueError(
            "scale is a finite factor of the scores, 0 or in size from 2**-100 to 2**100, so that float32 holds its "
            f"products; got {shown(scale)}; None stands for D ** -0.5"
        )
    if softcap is not None and not LEAST_FACTOR <= softcap <= MOST_FACTOR:
        raise ValueError(
            "softcap bounds scores by softcap * tanh(score / softcap), so softcap > 0, and from 2**-100 to 2**100, so "
            f"that float32 holds its products; got {shown(softcap)}; None leaves scores as they are"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability 0 <= dropout < 1; got {shown(dropout)}")
    if sinks is not None and query is not None:
        check_sinks(sinks, query.shape[1], query.device)
    if scale is None:
        scale = 1.0 if query is None else query.shape[3] ** -0.5
    return _plain(scale), None if softcap is None else _plain(softcap), _plain(dropout)


def _plain(x: float) -> float:
    """Return any real number, including numpy's, as a float; a symbol of torch.compile is unchanged."""
    return x if isinstance(x, (torch.SymFloat, torch.SymInt)) else float(x)


def check_sinks(sinks: Tensor, H: int | None = None, device: torch.device | None = None) -> None:
    """Logits, one a query head; where H and the device are not known yet, of any."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks are a float tensor {_sinks_form(H)}; got {type(sinks).__name__}")
    check_dense("sinks", sinks)
    if not sinks.is_floating_point() or sinks.ndim != 1 or not (H is None or sinks.shape[0] == H):
        raise ValueError(f"sinks are float logits, one a query head: {_sinks_form(H)}; got {describe(sinks)}")
    if device not in (None, sinks.device):
        raise ValueError(f"sinks must be on the query's device; query is on {device}, sinks on {sinks.device}")


def _sinks_form(H: int | None) -> str:
    return "(H,)" if H is None else f"(H,) = ({H},)"


def check_gate(gate: Tensor, out_shape: Sequence[int], device: torch.device) -> Tensor:
    """Return a gate (H,), (B, H), (B, H, T) or (B, H, T, V) that broadcasts against out (B, H, T, V)."""
    if not isinstance(gate, Tensor):
        raise TypeError(f"{_gate_rule(out_shape)}; got {type(gate).__name__}")
    check_dense("gate", gate)
    B, H, T, V = out_shape
    form = {1: (H,), 2: (B, H), 3: (B, H, T), 4: (B, H, T, V)}.get(gate.ndim)
    if form is None or gate.dtype not in DTYPES:
        raise ValueError(f"{_gate_rule(out_shape)}; got {describe(gate)}")
    if any(not fits(g, f) for g, f in zip(gate.shape, form, strict=True)):
        raise ValueError(f"{_gate_rule(out_shape)} (1 broadcasts); got {describe(gate)}")
    if gate.device != device:
        raise ValueError(f"gate must be on the query's device {device}; got {describe(gate)}; move with .to(device)")
    if gate.ndim == 1:
        return gate.view(1, -1, 1, 1)
    return gate.view(tuple(gate.shape) + (1,) * (4 - gate.ndim))


def _gate_rule(out_shape: Sequence[int]) -> str:
    forms = "(H,), (B, H), (B, H, T) or (B, H, T, V)"
    return f"gate is a float tensor {forms} with B, H, T, V = {', '.join(str(n) for n in out_shape)}"


def check_index_tensor(name: str, tensor: Tensor, forms: list[tuple[int, ...]], device: torch.device) -> None:
    """Check an integer tensor: it has one of the given shapes and is on the call's device."""
    check_tensor(name, tensor, "an integer tensor")
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name}: an integer tensor; got {describe(tensor)}; convert with .long()")
    if not is_one_of(tensor.shape, forms):
        wanted = " or ".join(str(form) for form in forms)
        raise ValueError(f"{name}: shape {wanted} for this call; got {describe(tensor)}")
    if tensor.device != device:
        raise ValueError(f"{name}: on the query's device {device}; got {describe(tensor)}; move with mask.to(device)")


def check_mask_tensor(tensor: Tensor, full: tuple[int, int, int, int], device: torch.device) -> None:
    """Check that a mask tensor broadcasts to (B, H, T, S) from the right."""
    check_dense("the mask's tensor", tensor)
    sizes = tuple(tensor.shape)
    wanted = full[4 - len(sizes) :]
    if any(not fits(size, want) for size, want in zip(sizes, wanted, strict=True)):
        raise ValueError(
            f"a mask tensor broadcasts to (B, H, T, S) = {full} from the right; got {sizes}; "
            f"(B, S) becomes that by mask[:, None, None, :], (B, T, S) by mask[:, None]"
        )
    if tensor.device != device:
        raise ValueError(
            f"the mask must be on the query's device {device}; got {describe(tensor)}; use mask.to(device)"
        )


def check_made(name: str, tensor: Tensor, kind: str, instead: str) -> None:
    """Check the argument of keep() or bias(): a `bool` or a `float` tensor of one to four axes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} takes a {kind} tensor; got {type(tensor).__name__}; make one with torch.as_tensor")
    check_dense(f"the tensor of {name}", tensor)
    if (tensor.dtype == torch.bool) != (kind == "bool") or (kind == "float") != tensor.is_floating_point():
        raise TypeError(f"{name} takes a {kind} tensor; got {tensor.dtype}; {instead}")
    if not 1 <= tensor.ndim <= 4:
        raise ValueError(f"{name} takes 1 to 4 axes, broadcast to (B, H, T, S) from the right; got {describe(tensor)}")


def check_integers(name: str, value: int | Tensor | None, *, tensor: bool) -> None:
    """Check a position or count: an int or None, or also an integer tensor if `tensor` is set."""
    if isinstance(value, Tensor):
        if tensor and value.dtype in INTEGERS:
            check_dense(name, value)
            if value.ndim != 1:
                way = "use .item() or .view(-1)" if value.numel() == 1 else "give one number a row of the batch"
                raise ValueError(f"{name} is an int, or an integer tensor (B,); got {describe(value)}; {way}")
            return
        raise TypeError(f"{name}: {'integers' if tensor else 'an int or None'}; got a Tensor, {describe(value)}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, torch.SymInt))):
        raise TypeError(f"{name}: an int or None; got {shown(value)} ({type(value).__name__})")
    if isinstance(value, int) and not -FAR <= value <= FAR:
        raise ValueError(f"{name}: from -2**40 to 2**40, farther than any key; got {shown(value)}; None sets no limit")
