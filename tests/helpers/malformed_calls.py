"""Every public function and method, with arguments that fit: what the malformed calls of the tests are made of.

A target's name begins with what it covers, `Class.method` or `function`; what follows a space tells its cases apart.
Arguments come from the signature: each parameter that `GOOD` knows by its name, and what the target says itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Unpack, get_args, get_origin

import torch
from malformed import PACKAGE, Call
from malformed_heads import ANNOTATE, CONSTRUCTED, LOOK, composed, patched, seen
from malformed_reshape import RESHAPE
from torch import Tensor

import headwise
from headwise import LatentAttention, MultiHeadAttention, cache, nn, plan, report, testing
from headwise.ops import masks
from headwise.ops.storage.paged import Paged

B, H, K, T, S, D, V, M = 2, 6, 3, 5, 7, 11, 13, 12
LEAVE = object()  # an argument that this call goes without


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


GOOD: dict[str, Callable[[], Any]] = {
    "query": lambda: normal(B, H, T, D),
    "key": lambda: normal(B, K, S, D),
    "value": lambda: normal(B, K, S, V),
    "mask": lambda: torch.ones(T, S, dtype=torch.bool),
    "scale": lambda: 0.3,
    "softcap": lambda: 20.0,
    "sinks": lambda: normal(H),
    "dropout": lambda: 0.0,
    "gate": lambda: normal(H),
    "return_lse": lambda: True,
    "backend": lambda: "auto",
    "rows": lambda: [1, 2],
    "heads": lambda: [0],
    "stage": lambda: "biased",
    "k": lambda: 2,
    "offsets": lambda: 2,
    "features": lambda: {"a": normal(S)},
    "targets": lambda: {"b": torch.zeros(T, 1).long()},
    "pool": lambda: 3,
    "device": lambda: torch.device("cpu"),
    "T": lambda: T,
    "S": lambda: S,
    "B": lambda: B,
    "H": lambda: H,
    "K": lambda: K,
    "D": lambda: D,
    "V": lambda: V,
    "x": lambda: normal(B, T, M),
    "memory": lambda: normal(B, S, M),
    "positions": lambda: torch.arange(T),
    "batch": lambda: B,
    "num_heads": lambda: H,
    "num_kv_heads": lambda: K,
    "head_dim": lambda: 4,
    "value_dim": lambda: 4,
    "d_model": lambda: M,
    "bias": lambda: True,
    "num_layers": lambda: 2,
    "memory_dim": lambda: 7,
    "dtype": lambda: torch.float32,
    "shared": lambda: False,
    "causal": lambda: True,
    "side": lambda: "right",
    "what": lambda: "output",
}


def of(function: Callable[..., Any], /, **own: Any) -> Call:
    """The function and the arguments that its signature asks for, and the keywords that a TypedDict of it names."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        options = get_args(parameter.annotation)[:1] if get_origin(parameter.annotation) is Unpack else ()
        names = [key for typed in options for key in typed.__annotations__] or [name]
        for key in names:
            if key in own or (key in GOOD and (options or parameter.kind is not parameter.VAR_KEYWORD)):
                arguments[key] = own[key] if key in own else GOOD[key]()
    return function, {name: what for name, what in arguments.items() if what is not LEAVE}


def filled(kind: str) -> Any:
    """A cache of one kind with four tokens a row; queries, keys and values as `GOOD` has them."""
    shared = "latent" in kind
    sizes = {"dtype": torch.int8 if "int8" in kind else torch.float32, "shared": shared}
    made: Any
    if kind.startswith("paged"):
        made = cache.PagedCache(cache.PagePool(6, K, D, 9 if shared else V, **sizes), B)
    elif kind.startswith("rolling"):
        made = cache.RollingCache(B, K, D, 9 if shared else V, window=9, chunk=6, **sizes)
    else:
        made = cache.StaticCache(B, K, D, 9 if shared else V, capacity=20, **sizes)
    return made.append(normal(B, K, 4, D), None if shared else normal(B, K, 4, V))


def appended(kind: str) -> Call:
    tokens = {"key": normal(B, K, 3, D), "value": LEAVE if "latent" in kind else normal(B, K, 3, V)}
    return of(filled(kind).append, **tokens, lengths=[1, 3])


CACHES = (
    "static", "paged", "rolling", "static int8", "paged int8", "rolling int8", "static latent", "paged latent int8",
)  # fmt: skip


def taken() -> cache.PagePool:
    """A pool whose first page is in use."""
    pool = cache.PagePool(2, K, D, V)
    assert pool.take() == 0
    return pool


CLASSES = {"KVCache": "static", "StaticCache": "static", "PagedCache": "paged", "RollingCache": "rolling"}


def attended(kind: str) -> Call:
    return of(filled(kind).attend, query=normal(B, H, 4, D), mask=headwise.causal())


CHANGES: dict[str, dict[str, Any]] = {
    "truncate": {"lengths": [2, 3]},
    "reorder": {"rows": [1, 0]},
    "keep": {"indices": torch.tensor([[0, 2], [3, -1]])},
    "drop": {"indices": torch.tensor([[0, 2], [3, -1]])},
}


def changed(kind: str, method: str) -> Call:
    return of(getattr(filled(kind), method), **CHANGES[method])


def mha(**parts: Any) -> MultiHeadAttention:
    return MultiHeadAttention(M, H, num_kv_heads=K, **parts)


def mla() -> LatentAttention:
    return LatentAttention(M, 3, kv_lora_rank=8, nope_dim=6, rope_dim=4, value_dim=5)


def small() -> Any:
    return cache.quantize(normal(B, K, S, D))


def fused(**matrices: Tensor) -> MultiHeadAttention:
    return MultiHeadAttention.from_heads([nn.Head(**matrices)])


def attend_pages(pages: Any, table: Any, length: Any) -> Tensor:
    return headwise.attention(
        normal(B, H, T, D), Paged(pages, table, length), Paged(normal(4, K, 128, V), table, length)
    )


def attend_to_picked(indices: Any) -> Tensor:
    return headwise.attention(*(GOOD[name]() for name in ("query", "key", "value")), mask=headwise.picked(indices))


def statistics_of(feature: Any, target: Any) -> Any:
    return headwise.statistics(
        *(GOOD[name]() for name in ("query", "key")), features={"a": feature}, targets={"b": target}
    )


def lay_out(pages: Any, table: Any, length: Any) -> Any:
    return Paged(pages, table, length).dense()


def attend_int8(data: Any, scale: Any) -> Tensor:
    return headwise.attention(normal(B, H, T, D), cache.Quantized(data, scale), small())


def as_floats(data: Any, scale: Any) -> Tensor:
    return cache.Quantized(data, scale).dequantize()


def a_call() -> nn.AttentionCall:
    """A call of attention as a probe meets it."""
    met: list[nn.AttentionCall] = []
    model = mha()
    with nn.probe(model, met.append):
        model(normal(B, T, M))
    return met[0]


def probed(model: Any, each: Any) -> Any:
    with nn.probe(model, each):
        model(normal(B, T, M))


PAGES = {"pages": lambda: normal(4, K, 128, D), "table": lambda: torch.tensor([[0, 1], [2, 3]]), "length": lambda: 130}
MATRICES = {"W_Q": (M, 4), "W_K": (M, 4), "W_V": (M, 5), "W_O": (5, M), "b_Q": (4,)}
QUERY_ROWS = {"rows": slice(0, 2), "cols": torch.tensor([0, 1])}

OPS: dict[str, Callable[[], Call]] = {
    "attention": lambda: of(headwise.attention),
    "attention plain": lambda: (headwise.attention, {name: GOOD[name]() for name in ("query", "key", "value")}),
    "attention causal": lambda: of(headwise.attention, mask=headwise.causal(), sinks=LEAVE, softcap=LEAVE),
    "attention float64": lambda: of(headwise.attention, **{n: GOOD[n]().double() for n in ("query", "key", "value")}),
    "attention by definition": lambda: of(headwise.attention, backend="reference"),
    "attention int8": lambda: of(headwise.attention, key=small(), value=small(), mask=LEAVE),
    "attention cache": lambda: of(
        headwise.attention, query=normal(B, H, 4, D), key=filled("static"), value=LEAVE, mask=LEAVE
    ),
    "attention pages": lambda: (attend_pages, {name: make() for name, make in PAGES.items()}),
    "attention Quantized": lambda: (attend_int8, {"data": small().data, "scale": small().scale}),
    "explain": lambda: of(headwise.explain),
    "weights": lambda: of(headwise.weights),
    "top_keys": lambda: of(headwise.top_keys),
    "statistics": lambda: of(headwise.statistics),
    "statistics tensors": lambda: (statistics_of, {"feature": normal(S), "target": torch.zeros(T, 1).long()}),
    "attention_max_logits": lambda: of(headwise.attention_max_logits),
    "attention_statistics": lambda: of(headwise.attention_statistics),
    "Quantized.dequantize": lambda: of(small().dequantize),
    "Quantized.dequantize parts": lambda: (as_floats, {"data": small().data, "scale": small().scale}),
    "Paged.dense": lambda: (lay_out, {name: make() for name, make in PAGES.items()}),
    "causal": lambda: of(headwise.causal, offset=1),
    "window": lambda: of(headwise.window, left=2, right=1, offset=torch.tensor([1, 2]), first=1),
    "lengths": lambda: of(headwise.lengths, stop=torch.tensor([1, 2]), start=torch.tensor([0, 0])),
    "segments": lambda: of(headwise.segments, query_ids=torch.zeros(T).long(), key_ids=torch.zeros(S).long()),
    "keep": lambda: of(headwise.keep, tensor=torch.ones(T, S, dtype=torch.bool)),
    "bias": lambda: of(headwise.bias, tensor=normal(T, S)),
    "alibi": lambda: of(headwise.alibi, slopes=normal(H), offset=1),
    "alibi_slopes": lambda: of(headwise.alibi_slopes),
    "picked": lambda: of(headwise.picked, indices=torch.zeros(B, 1, T, 2).long()),
    "attention picked": lambda: (attend_to_picked, {"indices": torch.zeros(B, 1, T, 2).long()}),
    "prefix": lambda: of(headwise.prefix, n=2),
    "dilated": lambda: of(headwise.dilated, step=2, offset=1),
    "blocks": lambda: of(headwise.blocks, size=2, offset=1),
    "relative": lambda: of(headwise.relative, table=normal(H, 3), offset=1),
    "rule": lambda: of(headwise.rule, function=lambda b, h, i, j: i >= j),
    "as_mask": lambda: of(masks.as_mask),
    "Mask.allowed": lambda: of(headwise.window(2).allowed, **QUERY_ROWS),
    "Mask.allowed of a tensor": lambda: of(headwise.keep(torch.ones(T, S) > 0).allowed, **QUERY_ROWS),
    "Mask.added": lambda: of(headwise.alibi(normal(H)).added, **QUERY_ROWS),
    "Mask.at": lambda: of(headwise.window(2).at, i=torch.arange(T)[:, None], j=torch.arange(S)),
    "Mask.at of a tensor": lambda: of(headwise.bias(normal(T, S)).at, i=torch.arange(T)[:, None], j=torch.arange(S)),
    "Mask.dense": lambda: of(headwise.window(2).dense),
    "Mask.draw": lambda: of(headwise.window(2).draw, batch=0, head=0),
    "Mask.bounds": lambda: of(headwise.window(2).bounds),
    "Mask.reach": lambda: of(headwise.window(2).reach, first=0, last=2),
    "Mask.tiles": lambda: of(headwise.window(2).tiles, tile_q=2, tile_k=3),
    "Mask.trimmed": lambda: of(headwise.window(2).trimmed),
    "Mask.check": lambda: of(headwise.window(2).check),
    "Mask.to": lambda: of((headwise.window(2) & headwise.lengths(torch.tensor([1, 2]))).to),
    "Mask.__and__": lambda: of(headwise.causal().__and__, other=headwise.causal()),
    "Mask.__or__": lambda: of(headwise.causal().__or__, other=headwise.prefix(2)),
    "Mask.part": lambda: of(headwise.causal().part, rows=(1, 3), cols=(0, 4), T=T, S=S, heads=(0, 2), batch=(0, 1)),
    "Mask.meets": lambda: of(headwise.causal().meets, rows=(1, 3), cols=(0, 4), T=T, S=S),
    "Mask.placed": lambda: of(headwise.causal().placed, offset=1),
    "Mask.sized": lambda: of(headwise.causal().sized),
    "Mask.computed_in": lambda: of((headwise.causal() & headwise.alibi(normal(H))).computed_in),
}
STORES: dict[str, Callable[[], Call]] = {
    "StaticCache": lambda: of(cache.StaticCache, capacity=9),
    "RollingCache": lambda: of(cache.RollingCache, window=9, first=1, chunk=8),
    "PagePool": lambda: of(cache.PagePool, num_pages=2, page_size=128),
    "PagedCache": lambda: of(cache.PagedCache, pool=cache.PagePool(2, K, D, V)),
    **{f"KVCache.append {kind}": functools.partial(appended, kind) for kind in CACHES},
    **{f"KVCache.attend {kind}": functools.partial(attended, kind) for kind in ("static", "paged", "rolling")},
    **{
        f"{name}.{method}": functools.partial(changed, kind, method)
        for name, kind in CLASSES.items()
        for method in CHANGES
        if kind != "rolling" or method in ("truncate", "reorder")
    },
    "RollingCache.remember": lambda: of(filled("rolling").remember, tokens=4),
    "PagePool.require": lambda: of(filled("paged").pool.require, pages=2),
    "PagePool.grow": lambda: of(filled("paged").pool.grow, pages=2),
    **{
        f"PagePool.{name}": lambda name=name: of(getattr(taken(), name), page=0)
        for name in ("hold", "give", "is_shared", "holders", "copy")
    },
    "quantize": lambda: of(cache.quantize, x=normal(B, K, S, D)),
    "quantization_error": lambda: of(cache.quantization_error),
}
NN: dict[str, Callable[[], Call]] = {
    "MultiHeadAttention": lambda: of(
        MultiHeadAttention, rotary=nn.Rotary(4), qk_norm=torch.nn.RMSNorm, inner=nn.InnerAttention()
    ),
    "MultiHeadAttention.forward": lambda: of(mha(head_dim=4).forward, positions=LEAVE),
    "MultiHeadAttention.forward rotary": lambda: of(
        mha(head_dim=4, rotary=nn.Rotary(4)).forward, memory=LEAVE, mask=headwise.causal()
    ),
    "MultiHeadAttention.forward cache": lambda: of(
        mha(head_dim=D, value_dim=V).forward,
        **{"memory": LEAVE, "mask": LEAVE, "positions": LEAVE, "cache": filled("paged"), "lengths": [1, 5]},
    ),
    "MaxLogitAttention": lambda: of(nn.MaxLogitAttention),
    "MaxLogitAttention.forward": lambda: of(nn.MaxLogitAttention().forward),
    "GatedMultiHeadAttention": lambda: of(nn.GatedMultiHeadAttention, d_model=M, num_heads=H, gate=nn.OutputGate),
    "OutputGate": lambda: of(nn.OutputGate, d_model=M, num_heads=H, value_dim=V, bias=True),
    "OutputGate.forward": lambda: of(nn.OutputGate(M, H).forward, x=normal(B, T, M)),
    "headwise_gate": lambda: of(nn.headwise_gate, d_model=M, num_heads=H, value_dim=V),
    "MultiHeadAttention.head": lambda: of(mha().head, index=1),
    "MultiHeadAttention.from_heads": lambda: of(
        MultiHeadAttention.from_heads, heads=[mha().head(0)] * 2, num_kv_heads=LEAVE, output_bias=normal(M)
    ),
    "MultiHeadAttention.from_heads matrices": lambda: (fused, {n: normal(*size) for n, size in MATRICES.items()}),
    "from_torch": lambda: of(nn.from_torch, module=torch.nn.MultiheadAttention(M, 3, batch_first=True)),
    "replace": lambda: of(nn.replace, model=torch.nn.MultiheadAttention(M, 3)),
    "to_torch": lambda: of(nn.to_torch, mha=mha()),
    "mask_from_torch": lambda: of(
        nn.mask_from_torch, attn_mask=torch.ones(T, S) > 0, key_padding_mask=torch.ones(B, S) > 0
    ),
    "mask_to_torch": lambda: of(nn.mask_to_torch, mask=headwise.causal()),
    "InnerAttention": lambda: of(nn.InnerAttention),
    "InnerAttention.forward": lambda: of(nn.InnerAttention().forward),
    "LatentAttention": lambda: of(
        LatentAttention, q_lora_rank=9, kv_lora_rank=8, nope_dim=6, rope_dim=4, rotary=nn.Rotary(4, interleaved=True)
    ),
    "LatentAttention.forward": lambda: of(mla().forward, mask=torch.ones(T, T) > 0, form="auto"),
    "LatentAttention.forward cache": lambda: of(
        mla().forward,
        **{"mask": LEAVE, "cache": cache.StaticCache(B, 1, 12, 8, capacity=9, shared=True), "lengths": [1, 5]},
        form="absorbed",
    ),
    "LatentAttention.expand": lambda: of(mla().expand, key=normal(B, 1, S, 12), heads=(0, 2)),
    "LatentAttention.form": lambda: of(mla().form, queries=2, held=[3]),
    "Rotary": lambda: of(nn.Rotary, head_dim=8, base=1e4, rotary_dim=4, interleaved=True, frequencies=[0.1, 0.2]),
    "Rotary.forward": lambda: of(nn.Rotary(D, rotary_dim=4).forward, key=normal(B, K, T, D)),
    "Rotary.angles": lambda: of(nn.Rotary(8).angles),
    "rotate": lambda: of(nn.rotate, x=normal(B, T, 8), cos=normal(T, 4), sin=normal(T, 4), interleaved=True),
    "split_over": lambda: of(nn.split_over, model=mha()),
    "probe": lambda: of(probed, model=mha(), each=lambda call: None),
    "AttentionCall.check_answer": lambda: of(a_call().check_answer, answer=normal(B, H, T, M // H)),
    "output_projections": lambda: of(nn.output_projections, model=mha(), run=lambda model: model(normal(B, T, M))),
    "trace": lambda: of(headwise.trace, mha=mha(head_dim=4), positions=LEAVE),
    "trace_shape": lambda: of(nn.trace_shape, length=3),
    "yarn_frequencies": lambda: of(
        nn.yarn_frequencies, rotary_dim=8, factor=4.0, original_length=64, base=1e4, beta_fast=32.0, beta_slow=1.0
    ),
    "yarn_scale": lambda: of(nn.yarn_scale, head_dim=8, factor=4.0, mscale=1.0),
}
PLAN: dict[str, Callable[[], Call]] = {
    "plan.of": lambda: of(
        plan.of, config="gpt-3", context=[100, 200], kv_dtype="bf16", heads_plan={"layers": {"0": {"keep": [0]}}},
        bandwidth="1TB/s", flops=1e12,
    ),
    "AttentionShape.of": lambda: of(plan.AttentionShape.of),
    "attention_flops": lambda: of(plan.attention_flops, queries=3, keys=4),
    "parameter_counts": lambda: of(plan.parameter_counts, memory_dim=(7, 8)),
    "parameter_count": lambda: of(plan.parameter_count),
    "kv_bytes_per_token": lambda: of(plan.kv_bytes_per_token, bytes_per_number=2),
    "projection_flops": lambda: of(plan.projection_flops, tokens=3, memory_tokens=4),
    "contexts": lambda: of(plan.contexts, text="128K"),
    "read_config": lambda: of(plan.read_config, config=str(PACKAGE / "models/tiny/config.json")),
    "svg": lambda: of(plan.svg, plans=[plan.of("gpt-3")]),
    "csv": lambda: of(plan.csv, plans=[plan.of("gpt-3")]),
    "side_by_side": lambda: of(plan.side_by_side, plans=[plan.of("gpt-3")]),
    "card_list": lambda: of(plan.card_list, known=plan.known()),
}  # fmt: skip
TESTING: dict[str, Callable[[], Call]] = {
    "make_qkv": lambda: of(testing.make_qkv, seed=0, kind="normal", requires_grad=False),
    "strided": lambda: of(testing.strided, tensor=normal(2, 3, 4, 5), pattern="order 0213", slack=0.0),
    "poison": lambda: of(testing.poison, tensor=normal(2, 3), where=torch.ones(2, 3) > 0, what=1.0),
    "oracle": lambda: of(testing.oracle),
    "naive": lambda: of(testing.naive),
    "ulp": lambda: of(testing.ulp, largest=1.0),
    "accuracy": lambda: of(
        testing.accuracy, ours=normal(5), exact=normal(5).double(), naive=normal(5), values=normal(5), factor=2.0
    ),
    "assert_close_like_torch": lambda: of(
        testing.assert_close_like_torch,
        ours=torch.ones(5),
        exact=torch.ones(5).double(),
        naive=torch.ones(5),
        factor=2.0,
    ),
    "assert_same_bits": lambda: of(testing.assert_same_bits, ours=torch.ones(5), other=torch.ones(5)),
}
REPORT: dict[str, Callable[[], Call]] = {
    "render": lambda: of(report.render, look=seen()),
    "write": lambda: of(report.write, look=seen(), path="written.html"),
    "render_comparison": lambda: of(report.render_comparison, before=seen(), after=seen(), kept={0: [0, 1, 2]}),
    "render_circuits": lambda: of(report.render_circuits, found=composed()),
    "write_circuits": lambda: of(report.write_circuits, found=composed(), path="written.html"),
    "render_effects": lambda: of(report.render_effects, result=patched()),
    "write_effects": lambda: of(report.write_effects, result=patched(), path="written.html"),
    "write_comparison": lambda: of(report.write_comparison, before=seen(), after=seen(), path="written.html"),
    "put": lambda: of(report.put, content=b"content", path="put.html"),
    "check_destination": lambda: of(report.check_destination, path="checked.html"),
}
ROOMS = {
    "ops": OPS, "cache": STORES, "nn": NN, "look": LOOK | ANNOTATE, "plan": PLAN, "testing": TESTING | CONSTRUCTED,
    "report": REPORT, "reshape": RESHAPE,
}  # fmt: skip
