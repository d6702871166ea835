"""Each operator's fake result, by which graphs are traced, has the shape, dtype and strides of the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import headwise
from headwise.cache import PagedCache, PagePool, StaticCache
from headwise.ops.native.library import error_for

pytestmark = [
    pytest.mark.unchecked,
    pytest.mark.skipif(error_for() is not None, reason="the operators are the native kernel's"),
]
B, H, K, T, S, D, V = 2, 6, 3, 5, 11, 8, 7


class Compared(TorchDispatchMode):
    """Runs each operator of headwise a second time on fake tensors, and notes where the results differ."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "headwise":
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        mode = FakeTensorMode()
        fakes = pytree.tree_map_only(Tensor, lambda x: mode.from_tensor(x.detach()), (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        with mode:
            fake = func(*fakes[0], **fakes[1])
        self.seen.add(name)
        results = [[x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)] for made in (out, fake)]
        forms = [[(tuple(x.shape), x.dtype, x.stride() if x.numel() else ()) for x in made] for made in results]
        if forms[0] != forms[1]:
            self.wrong.append(f"{name}: {forms[0]} and faked {forms[1]}")
        return out


def drawn(*size: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(*size).to(dtype).requires_grad_(grad)


def trained(**options: Any) -> None:
    tensors = [drawn(B, H, T, D, grad=True), drawn(B, K, S, D, grad=True), drawn(B, K, S, V, grad=True)]
    out, lse = headwise.attention(*tensors, return_lse=True, **options)
    (out.square().sum() + lse[lse.isfinite()].sum()).backward()


def attended(dtype: torch.dtype, **options: Any) -> None:
    with torch.no_grad():
        tensors = [drawn(B, heads, n, size, dtype=dtype) for heads, n, size in ((H, T, D), (K, S, D), (K, S, V))]
        headwise.attention(*tensors, **options)


def measured(**options: Any) -> None:
    headwise.statistics(drawn(B, H, T, D), drawn(B, K, S, D), **options)
    headwise.attention_statistics(drawn(B, H, T, D), drawn(B, K, S, D), drawn(B, K, S, V), **options)


def stored(dtype: torch.dtype) -> None:
    with torch.no_grad():
        for cache in (
            StaticCache(B, K, D, V, capacity=16, dtype=dtype),
            PagedCache(PagePool(4, K, D, V, dtype=dtype), B),
        ):
            cache.append(drawn(B, K, S, D), drawn(B, K, S, V))
            for tokens in (T, 1):
                headwise.attention(drawn(B, H, tokens, D), cache)
                headwise.attention(drawn(B, H, tokens, D), cache, softcap=3.0)


MASKS = {
    "none": None,
    "band": headwise.causal() & headwise.window(4),
    "lengths": headwise.lengths(torch.tensor([3, 9])),
    "map": headwise.window(2) | headwise.dilated(3),
    "bias": headwise.bias(torch.randn(1, H, T, S)) & headwise.causal(),
}
CALLS: dict[str, Callable[[], None]] = {
    **{f"train {name}": lambda mask=mask: trained(mask=mask) for name, mask in MASKS.items()},
    "train sinks": lambda: trained(sinks=drawn(H, grad=True), mask=headwise.causal()),
    "train dropout": lambda: trained(dropout=0.4),
    "plain": lambda: attended(torch.float32),
    "plain bfloat16": lambda: attended(torch.bfloat16, mask=headwise.causal(), return_lse=True),
    "gate": lambda: attended(torch.float32, gate=torch.rand(B, H, T, V), softcap=3.0),
    "statistics": lambda: measured(mask=headwise.causal()),
    "statistics, features": lambda: measured(features={"a": torch.rand(B, S)}, pool=3, sinks=drawn(H)),
    "stored": lambda: stored(torch.float32),
    "stored int8": lambda: stored(torch.int8),
}


def test_fakes_have_the_forms_of_what_they_stand_for() -> None:
    seen, wrong = set(), []
    for name, call in CALLS.items():
        with Compared() as mode:
            call()
        seen |= mode.seen
        wrong += [f"{name}, {text}" for text in mode.wrong]
    assert wrong == []
    wanted = {
        "attend", "attend_full", "attend_held", "attend_stored", "attend_backward", "attend_statistics",
        "attend_received",
    }  # fmt: skip
    assert wanted <= seen, seen
