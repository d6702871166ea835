"""The operators of the native library called as they are: every one that reads tensors, with all that it can take.

Sizes are such that no axis can be taken for another, nor for one that broadcasts; tensors lie contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.testing import make_qkv

FAR = 1 << 40  # no end on that side
B, H, K, T, S, D, V = 3, 4, 2, 5, 7, 16, 8


def rules(**changes: Any) -> dict[str, Any]:
    """The eleven arguments between scores and weights, by name."""
    dense = [torch.randn(1, H, T, S), torch.rand(B, 1, 1, S) > 0.2, torch.randn(B, 1, T, 1).double()]
    everything = {
        "scale": 0.25,
        "softcap": 5.0,
        "sinks": torch.randn(H),
        "low": -FAR,
        "high": FAR,
        "bounds": torch.tensor([[-FAR, FAR, 1, S], [-3, FAR, 0, S - 1], [-FAR, 4, 0, S]]),
        "segments": [torch.arange(B * T).view(B, T) % T // 3, torch.arange(S) // 4],
        "dense": dense,
        "alibi": [torch.rand(B, H), torch.tensor([1, -2, 0])],
        "maps": [torch.tensor([2, 1, 3]).view(B, 1, 1, 1), torch.randint(-(1 << 63), (1 << 63) - 1, (2, 64)) | 8],
        "relative": [torch.randn(1, H, T + S - 1)],
    }
    return everything | changes


def none() -> dict[str, Any]:
    """The same for a call without them."""
    names = ("sinks", "bounds", "segments", "dense", "alibi", "maps", "relative")
    return rules(softcap=0.0, **dict.fromkeys(names))


def calls() -> dict[str, dict[str, Any]]:
    """By operator, its arguments by name; behind a comma what kind of call it is."""
    query, key, value = make_qkv(B, H, K, T, S, D, V)
    seed, gate, every = torch.tensor([7]), torch.rand(B, H, T, V), rules()
    qkv = {"query": query, "key": key, "value": value}
    dropped = {"dropout": 0.3, "seed": seed}
    out, lse, kept = torch.ops.headwise.attend_kept(**qkv, **every, **dropped)
    pages = torch.randint(-127, 128, (B, K, 128, D), dtype=torch.int8), torch.rand(B, K, 128) + 0.01
    values = torch.randint(-127, 128, (B, K, 128, V), dtype=torch.int8), torch.rand(B, K, 128) + 0.01
    one = [x[:, :, :S].contiguous() for x in (*pages, *values)]
    names = ("key", "key_scale", "value", "value_scale")
    cache = {"query": query, **dict(zip(names, one, strict=True)), "table": None, "length": 0}
    paged = {"query": query, **dict(zip(names, (*pages, *values), strict=True)), "table": None, "length": S}
    table = torch.tensor([[2], [0], [1]])
    requests = {
        "picks": torch.arange(B * T * 3).view(B, T, 3) % 9 - 1,
        "slots": torch.tensor([0, 1, 1]),
        "sums": 2,
        "features": torch.randn(B, S, 3),
        "bins": 4,
        "query_bins": 3,
    }
    tokens = torch.randn(B, K, T, D), torch.randn(B, K, T, V)
    bytes_of = [torch.full((H, K, S, n), 3, dtype=torch.int8) for n in (D, V)]
    scales = torch.rand(H, K, S), torch.rand(H, K, S)
    append = dict(zip(("key", "value", "key_data", "key_scale", "value_data", "value_scale"), (
        *tokens, bytes_of[0], scales[0], bytes_of[1], scales[1]), strict=True))  # fmt: skip
    ends = {"top": torch.zeros(B, H, T), "largest": torch.ones(B, H, T)}
    return {
        "attend": {**qkv, "scale": 0.25, "low": -FAR, "high": FAR},
        "attend_full": {**qkv, **every, "gate": gate, **dropped},
        "attend_held": {**cache, **every, "gate": gate, **dropped},
        "attend_held, pages": {**paged, "table": table, **every, "gate": gate, **dropped},
        "attend_stored": {**cache, "scale": 0.25, "low": -FAR, "high": FAR},
        "attend_stored, pages": {**paged, "table": table, "scale": 0.25, "low": -FAR, "high": FAR},
        "attend_backward": {
            "grad_out": out * 3, "grad_lse": lse * 2, "out": out, "ends": kept, "biases": True, **qkv, **every,
            **dropped,
        },
        "attend_statistics": {**qkv, **every, **requests},
        "attend_received": {"query": query, "key": key, **ends, **every},
        "append_codes": append | {"spans": [0, 0, 2, 1, T, B - 1, 1, H - 1, 0, 2]},
        "dropout_keep": {"seed": seed, "dropout": 0.3, "B": B, "H": H, "first": 0, "rows": T, "S": S},
    }  # fmt: skip


NAMES = (
    "attend", "attend_full", "attend_held", "attend_held, pages", "attend_stored", "attend_stored, pages",
    "attend_backward", "attend_statistics", "attend_received", "append_codes", "dropout_keep",
)  # fmt: skip


def tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor, Callable[[Tensor], dict[str, Any]]]]:
    """Each tensor with its name and a way to put another one in its place; those of a list by list and number."""
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            yield name, x, lambda y, name=name: arguments | {name: y}
        for n, one in enumerate(x if isinstance(x, list) and not isinstance(x[0], int) else []):
            yield f"{name} {n}", one, lambda y, name=name, n=n, x=x: arguments | {name: [*x[:n], y, *x[n + 1 :]]}


def results(name: str, arguments: dict[str, Any]) -> list[Tensor]:
    """What the operator gives, as a list; what it has written, where it writes."""
    outputs = getattr(torch.ops.headwise, name.split(",")[0])(**arguments)
    if outputs is None:
        return [x.clone() for what, x in arguments.items() if what.endswith(("_data", "_scale"))]
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
