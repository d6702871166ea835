"""The ways of doing one case that take turns: headwise, torch's own, and what an expert would write.

A way is built with its inputs made and its masks laid out beforehand: only the attention itself is on the clock.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import headwise
from benchmarks import peers, server_peers
from benchmarks.registry import FULL, HALVES, Case
from headwise.cache import quantize

Run = Callable[[], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass
class Lineup:
    """The ways that take part, their inputs, and why each other way does not."""

    inputs: Inputs
    runs: dict[str, Run] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def lineup(case: Case) -> Lineup:
    """Every way that can do the case and gives the same result; where a way has several forms, its fastest."""
    with torch.set_grad_enabled(case.backward):
        inputs = case.inputs()
        line = Lineup(inputs, {"headwise": headwise_way(case, inputs)})
        truth = line.runs["headwise"]().detach()
        for name, forms in FORMS.items():
            if name in case.without or (case.backward and name != "torch"):
                continue
            try:
                line.runs[name] = fastest(forms(case, inputs), truth)
            except LookupError as reason:
                line.absent[name] = str(reason)
        if case.kind.startswith("far"):
            near = case.near()
            line.runs["near"] = headwise_way(near, near.inputs())
        if case.regime == "statistics":
            line.runs["alone"] = headwise_way(replace(case, regime="prefill"), inputs)
        if case.int8:
            line.runs["as-bf16"] = headwise_way(replace(case, regime=case.regime.removeprefix("int8 ")), inputs)
        if case.dtype == "float16":
            line.runs["as-fp32"] = headwise_way(replace(case, dtype="float32"), tuple(x.float() for x in inputs))
        if case.backward:
            line.runs = {name: _with_backward(run, inputs) for name, run in line.runs.items()}
    return line


def fastest(forms: Mapping[str, Callable[[], Run]], truth: Tensor) -> Run:
    """Of several forms of one way, the fastest of those that run and agree with `truth`."""
    best: tuple[float, Run] | None = None
    why = "has no form for this case"
    for name, build in forms.items():
        try:
            run = build()
            off = difference(run(), truth)
        except Exception as error:  # each library raises errors of its own
            why = f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"
            continue
        if not off < (3e-2 if truth.dtype in HALF_DTYPES else 1e-3):
            why = f"{name}: another result, off by {off:.1g}"
            continue
        if len(forms) == 1:
            return run
        times = []
        while len(times) < 2 or (sum(times) < 0.02 and len(times) < 20):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        if best is None or min(times) < best[0]:
            best = min(times), run
    if best is None:
        raise LookupError(why)
    return best[1]


HALF_DTYPES = tuple(getattr(torch, name) for name in HALVES)


def difference(out: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm."""
    out, truth = out.detach().float(), truth.float()
    return float((out.reshape(truth.shape) - truth).norm() / truth.norm())


def headwise_way(case: Case, inputs: Inputs) -> Run:
    q, k, v = inputs
    mask = case.mask()
    if case.regime == "statistics":
        return lambda: headwise.attention_statistics(q, k, v, mask=mask)[0]
    if case.int8:
        k8, v8 = case.kept(k, v, torch.int8) if case.T == 1 else (quantize(k), quantize(v))
        return lambda: headwise.attention(q, k8, v8, mask=mask)
    return lambda: headwise.attention(q, k, v, mask=mask)


def torch_forms(case: Case, inputs: Inputs) -> dict[str, Callable[[], Run]]:
    """SDPA as a careful user calls it: `is_causal` where that means the same, else a dense mask made beforehand."""
    q, k, v = inputs
    mask = case.mask()
    square = case.kind == "causal" and case.T == case.S
    dense = None if mask is None or square else mask.dense(case.T, case.S)
    if dense is not None and dense.is_floating_point():
        dense = dense.to(q.dtype)
    grouped = case.H != case.K
    return {
        "sdpa": lambda: (
            lambda: scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=square, enable_gqa=grouped)
        )
    }


def folded_forms(case: Case, inputs: Inputs) -> dict[str, Callable[[], Run]]:
    """The group's heads laid into the query axis, where all have the same mask: the one-liner that experts write."""
    q, k, v = inputs
    if case.kind not in (FULL, "padded") or (case.T > 1 and (case.H == case.K or case.kind != FULL)):
        return {}
    shape = (case.B, case.K, case.H // case.K * case.T, case.D)
    mask = case.mask()
    dense = None if mask is None else mask.dense(1, case.S)
    scale = case.D**-0.5

    def fused() -> Tensor:
        return scaled_dot_product_attention(q.reshape(shape), k, v, attn_mask=dense).view(*q.shape[:3], -1)

    def plain() -> Tensor:
        scores = (q.reshape(shape) * scale) @ k.mT
        if dense is not None:
            scores = scores.masked_fill(~dense, -torch.inf)
        return (scores.softmax(-1) @ v).view(*q.shape[:3], -1)

    forms: dict[str, Callable[[], Run]] = {"sdpa": lambda: fused}
    if case.T == 1:
        forms["matmul"] = lambda: plain
    return forms


def flex_forms(case: Case, inputs: Inputs) -> dict[str, Callable[[], Run]]:
    """FlexAttention, compiled, with a block mask made beforehand."""
    return {"flex": lambda: _flex(case, inputs)}


def _flex(case: Case, inputs: Inputs) -> Run:
    q, k, v = inputs
    offset, width = case.S - case.T, case.width
    if case.kind == "causal":
        rule = lambda b, h, i, j: j <= i + offset  # noqa: E731
    elif case.kind == "window":
        rule = lambda b, h, i, j: (j <= i + offset) & (j > i + offset - width)  # noqa: E731
    elif case.kind == "padded":
        stop = case.lengths()
        rule = lambda b, h, i, j: j < stop[b]  # noqa: E731
    else:
        rule = None
    batch = case.B if case.kind == "padded" else None
    grouped = case.H != case.K
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's warnings about itself
        torch._dynamo.reset()  # else the eighth shape in one process would run uncompiled
        compiled = torch.compile(flex_attention, dynamic=False)
        block = rule and create_block_mask(rule, batch, None, case.T, case.S, device="cpu")
        compiled(q, k, v, block_mask=block, enable_gqa=grouped)
    return lambda: compiled(q, k, v, block_mask=block, enable_gqa=grouped)


def _with_backward(run: Run, inputs: Inputs) -> Run:
    leaves = tuple(x for x in inputs if x.requires_grad)

    def both() -> Tensor:
        with torch.enable_grad():
            out = run()
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        return out.detach()

    return both


FORMS: dict[str, Callable[[Case, Inputs], Mapping[str, Callable[[], Run]]]] = {
    "torch": torch_forms,
    "folded": folded_forms,
    "flex": flex_forms,
    "onnxruntime": peers.onnxruntime_forms,
    "openvino": peers.openvino_forms,
    "vllm": server_peers.vllm_forms,
    "sglang": server_peers.sglang_forms,
}
