"""Wrappers that give all backends the same semantics: each takes a `run` function and returns one.

The table in `attention` composes them: `dense_keys(gated(aligned(fenced(sdpa.run))))`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor

from ..call import Call, Result, Run
from ..nonfinite import alive_rows, is_finite_hint, mask_nonfinite, quiet, show


def dense_keys(run: Run) -> Run:
    """Copy int8 or paged keys and values to plain tensors (B, K, S, n) before the backend runs."""

    @wraps(run)
    def dense(call: Call) -> Result:
        if call.layout is None:
            return run(call)
        out, lse = run(call.dense())
        return out.to(call.query.dtype), lse

    return dense


def gated(run: Run) -> Run:
    """Multiply the output by the gate. The gate's gradient is 0 in rows that may attend to no key."""

    @wraps(run)
    def then_gate(call: Call) -> Result:
        out, lse = run(call)
        if call.options.gate is None:
            return out, lse
        gate = call.options.gate.to(out.dtype)
        if not call.options.mask.parts or not gate.requires_grad:
            return out * gate, lse
        T, S = call.sizes[3:]
        return quiet(out * gate, ~alive_rows(call.options.mask, T, S, out.device)[..., None]), lse

    return then_gate


def aligned(run: Run) -> Run:
    """Pad head dims with zeros to a multiple of 16 bytes, which changes no score and no value.

    The last bits of a matrix product differ if a matrix is not 16-byte aligned, so a row would depend on its position
    in the batch (measured: MKL, float32, D = 11).
    """

    @wraps(run)
    def on_padded(call: Call) -> Result:
        V = call.value.shape[-1]
        query, key, value = (_padded(x) for x in (call.query, call.key, call.value))
        out, lse = run(replace(call, query=query, key=key, value=value))
        return out[..., :V], lse

    return on_padded


def _padded(x: Tensor) -> Tensor:
    lacking = -x.shape[-1] % (16 // x.itemsize)
    return torch.nn.functional.pad(x, (0, lacking)) if lacking else x


def fenced(run: Run) -> Run:
    """Keep NaN, Inf and very large numbers out of rows that may not attend to them (`mask_nonfinite`)."""

    @wraps(run)
    def behind_fence(call: Call) -> Result:
        if call.is_empty:
            return run(call)
        query, key, value = call.query, call.key, call.value
        # A bad value always makes the output bad because 0 * NaN is NaN, so the smaller output is checked instead of
        # the values. With a gradient or dropout the values are checked, so that the kernel runs only once.
        once = call.needs_grad or call.options.dropout > 0
        if is_finite_hint(query, key, *([value] if once else [])):
            out, lse = run(call)
            if once or is_finite_hint(out):
                return out, lse
        query, key, value, rows_BHT = mask_nonfinite(query, key, value, call.options.mask)
        out, lse = run(replace(call, query=query, key=key, value=value))
        return show(out, rows_BHT[..., None]), None if lse is None else show(lse, rows_BHT)

    return behind_fence
