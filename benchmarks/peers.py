"""ONNX Runtime and OpenVINO on the same tensors, where they are installed; each form is one small graph.

Inputs and outputs are torch's own memory, bound beforehand. ONNX Runtime has no bfloat16 on the CPU: float16 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import FULL, Case

Run = Callable[[], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]
Forms = Mapping[str, Callable[[], Run]]


def _flat(x: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H * D)."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _folds(case: Case) -> bool:
    return case.kind == FULL and case.H != case.K


# --- ONNX Runtime ---------------------------------------------------------------------------------------------------


def onnxruntime_forms(case: Case, inputs: Inputs) -> Forms:
    """ONNX's own Attention, and the fused operators of Microsoft's domain, with the fewest copies each allows."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise LookupError(f"{error.name} is not installed") from None
    q, k, v = (x.detach().to(torch.float16 if x.dtype == torch.bfloat16 else x.dtype).contiguous() for x in inputs)
    square = case.kind == "causal" and case.T == case.S
    forms: dict[str, Callable[[], Run]] = {}
    if case.kind == FULL or square:
        forms["Attention"] = lambda: _ort_attention(q, k, v, square)
    elif case.kind in ("causal", "padded"):  # its own causal mask is aligned top-left
        forms["Attention"] = lambda: _ort_attention(q, k, v, False, case.mask())
    if _folds(case):
        folded = q.reshape(case.B, case.K, -1, case.D)
        forms["Attention, folded"] = lambda: _ort_attention(folded, k, v, False)
    if case.H == case.K and (case.kind == FULL or square):
        forms["MultiHeadAttention"] = lambda: _ort_multi_head(q, k, v, square)
    if square or case.kind == "window":
        forms["GroupQueryAttention"] = lambda: _ort_group_query(q, k, v, case.width if case.kind == "window" else -1)
    return forms


def _ort(node: Any, feeds: dict[str, Tensor], outs: dict[str, Tensor]) -> Callable[[], None]:
    """A session of one node, bound to these tensors."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {
        torch.float32: (TensorProto.FLOAT, np.float32),
        torch.float16: (TensorProto.FLOAT16, np.float16),
        torch.bool: (TensorProto.BOOL, np.bool_),
        torch.int32: (TensorProto.INT32, np.int32),
    }

    def infos(tensors: dict[str, Tensor]) -> list[Any]:
        return [helper.make_tensor_value_info(n, kinds[x.dtype][0], list(x.shape)) for n, x in tensors.items()]

    domains = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "attention", infos(feeds), infos(outs)), opset_imports=domains, ir_version=11
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in feeds.items():
        binding.bind_input(name, "cpu", 0, kinds[x.dtype][1], list(x.shape), x.data_ptr())
    for name, x in outs.items():
        binding.bind_output(name, "cpu", 0, kinds[x.dtype][1], list(x.shape), x.data_ptr())
    tensors = (feeds, outs)  # the session has addresses only: `run` keeps the tensors alive

    def run() -> None:
        session.run_with_iobinding(binding)
        assert tensors

    return run


def _ort_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Any = None) -> Run:
    from onnx import helper

    feeds = {"q": q, "k": k, "v": v}
    if mask is not None:
        feeds["mask"] = mask.dense(q.shape[2], k.shape[2]).expand(-1, -1, q.shape[2], -1).contiguous()
    out = q.new_empty(*q.shape[:3], v.shape[3])
    run = _ort(helper.make_node("Attention", list(feeds), ["out"], is_causal=int(causal)), feeds, {"out": out})

    def both() -> Tensor:
        run()
        return out

    return both


def _ort_multi_head(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Run:
    from onnx import helper

    B, H, T, _ = q.shape
    long = T > 1  # keys and values of a decoding step come from a cache, with a heads axis
    feeds = {"q": _flat(q), "k": _flat(k) if long else k, "v": _flat(v) if long else v}
    out = q.new_empty(B, T, H * v.shape[3])
    options = {"num_heads": H, "unidirectional": int(causal)}
    node = helper.make_node("MultiHeadAttention", list(feeds), ["out"], domain="com.microsoft", **options)
    run = _ort(node, feeds, {"out": out})

    def both() -> Tensor:
        run()
        return out.view(B, T, H, -1).transpose(1, 2)

    return both


def _ort_group_query(q: Tensor, k: Tensor, v: Tensor, window: int) -> Run:
    from onnx import helper

    (B, H, T, _), (_, K, S, _) = q.shape, k.shape
    feeds = {
        "q": _flat(q),
        "k": _flat(k),
        "v": _flat(v),
        "last": torch.full((B,), S - 1, dtype=torch.int32),
        "total": torch.tensor([S], dtype=torch.int32),
    }
    outs = {"out": q.new_empty(B, T, H * v.shape[3]), "keys": torch.empty_like(k), "values": torch.empty_like(v)}
    options = {"num_heads": H, "kv_num_heads": K, "local_window_size": window}
    names = ["q", "k", "v", "", "", "last", "total"]
    run = _ort(
        helper.make_node("GroupQueryAttention", names, list(outs), domain="com.microsoft", **options), feeds, outs
    )

    def both() -> Tensor:
        run()
        return outs["out"].view(B, T, H, -1).transpose(1, 2)

    return both


# --- OpenVINO -------------------------------------------------------------------------------------------------------


def openvino_forms(case: Case, inputs: Inputs) -> Forms:
    """Its scaled_dot_product_attention: groups folded, or their keys and values repeated beforehand."""
    try:
        import openvino  # noqa: F401
    except ImportError as error:
        raise LookupError(f"{error.name} is not installed") from None
    if case.dtype == "float16":
        raise LookupError("it computes float16 in bfloat16")
    q, k, v = (x.detach().contiguous() for x in inputs)
    square = case.kind == "causal" and case.T == case.S
    mask = case.mask()
    dense = None if mask is None or square else mask.dense(case.T, case.S).expand(-1, -1, case.T, -1)
    G = case.H // case.K
    if _folds(case) or case.K == 1:
        folded = q.reshape(case.B, case.K, -1, case.D)
        return {"folded": lambda: _openvino(folded, k, v, square, dense)}
    return {"repeated": lambda: _openvino(q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), square, dense)}


def _openvino(q: Tensor, k: Tensor, v: Tensor, causal: bool, dense: Tensor | None) -> Run:
    import openvino
    from openvino import opset13

    kinds = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16}

    def shared(x: Tensor) -> Any:
        if x.dtype == torch.bfloat16:  # numpy has no such type
            return openvino.Tensor(x.view(torch.int16).numpy(), openvino.Shape(list(x.shape)), openvino.Type.bf16)
        return openvino.Tensor(x.numpy(), shared_memory=True)

    feeds = [q, k, v]
    if dense is not None:
        feeds.append(torch.zeros(dense.shape).masked_fill(~dense, -torch.inf).to(q.dtype))
    places = [opset13.parameter(list(x.shape), kinds[x.dtype]) for x in feeds]
    model = openvino.Model([opset13.scaled_dot_product_attention(*places, causal=causal)], places, "attention")
    hints = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if q.dtype == torch.bfloat16 else "f32",
    }
    request = openvino.Core().compile_model(model, "CPU", hints).create_infer_request()
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for place, x in enumerate(feeds):
        request.set_input_tensor(place, shared(x))
    request.set_output_tensor(0, shared(out))

    def run() -> Tensor:
        request.infer()
        assert feeds  # the request has addresses only: this keeps the tensors alive
        return out

    return run
