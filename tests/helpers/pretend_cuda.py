"""CUDA tensors without a GPU: they say `cuda`, refuse tensors of other devices as CUDA does, and compute on the CPU.

Counted are kernel launches, waits for the device (`.item()`, `.tolist()`, `bool()`), and copies to it or from it. Views
launch nothing. The fused kernels of torch are one launch each: SDPA is the CPU's, and in place of compiled
FlexAttention plain arithmetic runs over the listed tiles. Our kernels are their definitions (`triton_definitions`).
Gradients cannot run: autograd has no thread for the device.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton_definitions import DEFINITIONS, LAUNCHES

from headwise.ops.backends import flex

CUDA = torch.device("cuda", 0)
# fmt: off
NO_LAUNCH = {
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "t",
    "as_strided", "alias", "detach", "unbind", "split", "reshape", "_reshape_alias", "lift_fresh", "unfold",
    "split_with_sizes", "empty", "empty_like", "new_empty", "empty_strided", "diagonal", "unflatten", "chunk",
    "movedim", "narrow", "view_as", "broadcast_tensors", "unsafe_split", "is_set_to",
}
# fmt: on
"""Operators that launch no kernel: views, memory that is not written, and questions about memory."""
COPIES = {"_to_copy", "copy_", "copy", "_copy_from", "to"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
NUMBERS = {"_local_scalar_dense", "item", "equal", "is_nonzero"}
WAITS = NUMBERS | {"nonzero", "masked_select", "_unique2"}


@dataclass
class Counts:
    """What the calls under `pretend_cuda` did, by operator."""

    launches: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    to_device: Counter[str] = field(default_factory=Counter)
    to_host: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Count from zero again."""
        for counter in (self.launches, self.syncs, self.to_device, self.to_host):
            counter.clear()

    def waits(self) -> int:
        """How often the host waited for the device."""
        return self.syncs.total() + self.to_host.total()


COUNTS = Counts()


@cache
def load_guard() -> None:
    """Let tensors of a torch without CUDA say `cuda`; for the rest of this process, where it changes nothing else."""
    if torch.version.cuda is not None:
        return
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "guard.so"
        source = Path(__file__).with_name("cuda_guard.cpp")
        paths = [f"-I{torch_root / 'include'}", f"-L{torch_root / 'lib'}"]
        subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", *paths, "-o", made, source, "-lc10"], check=True)
        ctypes.CDLL(str(made))


class Pretend(Tensor):
    """A tensor on the device; `on_host` holds its numbers."""

    on_host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor) -> Pretend:
        made = torch.Tensor._make_wrapper_subclass(
            cls, real.shape, strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype, device=CUDA
        )
        made.on_host = real
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"cuda({self.on_host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    cuda = [x for x in tensors if isinstance(x, Pretend)]
    cpu = [x for x in tensors if not isinstance(x, Pretend)]
    name, asked = func.overloadpacket.__name__, kwargs.get("device")
    target = None if asked is None else torch.device(asked).type
    if not cuda and target != "cuda":
        return func(*args, **kwargs)
    _check_devices(func, name, cuda, cpu)
    _count(name, args, cuda, cpu, target)
    a, k = tree_map(_real, args), tree_map(_real, dict(kwargs))
    if target == "cuda":
        k["device"] = torch.device("cpu")
    out = DEFINITIONS.get(name, func)(*a, **k)
    if name == "copy_":
        return args[0]
    if target == "cpu" or (cuda and name in NUMBERS):
        return out
    known = {id(x.on_host): x for x in cuda}  # an operator in place gives its own tensor

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return known[id(x)] if id(x) in known else Pretend(x)

    return tree_map(wrapped, out)


def _real(x: Any) -> Any:
    return x.on_host if isinstance(x, Pretend) else x


def _check_devices(func: Any, name: str, cuda: list[Pretend], cpu: list[Tensor]) -> None:
    if cuda and any(x.ndim for x in cpu) and name not in COPIES | INDEXING:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda and cpu in {func}")


def _count(name: str, args: Any, cuda: list[Pretend], cpu: list[Tensor], target: str | None) -> None:
    into = args[0] if name == "copy_" else None
    if name in COPIES and cpu and (target == "cuda" or isinstance(into, Pretend)):
        COUNTS.to_device[name] += 1
    if name in COPIES and cuda and (target == "cpu" or (into is not None and not isinstance(into, Pretend))):
        COUNTS.to_host[name] += 1
    if name in INDEXING and any(x.ndim for x in cpu):
        COUNTS.to_device[name] += 1
    chosen = tree_leaves(args[1:]) if name in INDEXING else ()
    if (cuda and name in WAITS) or any(isinstance(x, Pretend) and x.dtype == torch.bool for x in chosen):
        COUNTS.syncs[name] += 1
    if name not in NO_LAUNCH:
        COUNTS.launches[name] += LAUNCHES.get(name, 1)


class _Factories(TorchDispatchMode):
    """Operators that make a tensor on the device from none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that C++ decides by device, or that read a tensor's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _names_cuda(kwargs.get("device")):
            if isinstance(args[0], Pretend):
                return args[0].to(kwargs.get("dtype"))
            return func(*args, **{**kwargs, "device": "cpu"}).to("cuda")
        if func in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], Pretend):
            if func is Tensor.numpy:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
            COUNTS.syncs["tolist"] += 1
            return args[0].on_host.tolist()
        if func is Tensor.cuda:
            return args[0].to("cuda")
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], Pretend):
            return _sdpa(*args, **kwargs)
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    if not all(isinstance(x, Pretend) for x in given):
        raise RuntimeError("Expected query, key, value and attn_mask to be on the same device")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        raise RuntimeError("invalid dtype for bias - should match query's dtype")  # torch's memory-efficient kernel
    COUNTS.launches["scaled_dot_product_attention"] += 1
    q, k, v, mask = (_real(x) for x in (query, key, value, attn_mask))
    return Pretend(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options))


def _flex(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """FlexAttention by its definition, over the tiles that the block mask lists; one launch."""
    before = COUNTS.launches.copy(), COUNTS.syncs.copy()
    (B, H, T, _), S, tiles = query.shape, key.shape[2], options["block_mask"]
    G = H // key.shape[1]
    key, value = key.repeat_interleave(G, 1), value.repeat_interleave(G, 1)
    b, h, i, j = (
        torch.arange(n, device="cuda").view([-1 if axis == at else 1 for axis in range(4)])
        for at, n in enumerate((B, H, T, S))
    )
    scores = (query.float() @ key.float().mT) * options["scale"]
    if options["score_mod"] is not None:
        scores = options["score_mod"](scores, b, h, i, j)
    if tiles is not None:
        mixed = _listed(tiles.kv_num_blocks, tiles.kv_indices, tiles.BLOCK_SIZE, T, S)
        full = _listed(tiles.full_kv_num_blocks, tiles.full_kv_indices, tiles.BLOCK_SIZE, T, S)
        scores = scores.masked_fill(~(full | (mixed & tiles.mask_mod(b, h, i, j))), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = (weights @ value.float()).to(query.dtype)
    COUNTS.launches.clear(), COUNTS.syncs.clear()
    COUNTS.launches.update(before[0]), COUNTS.syncs.update(before[1])
    COUNTS.launches["flex_attention"] += 1
    return out, types.SimpleNamespace(lse=lse)


def _listed(counts: Tensor, indices: Tensor, size: tuple[int, int], T: int, S: int) -> Tensor:
    """Whether each pair lies in a listed tile, bool (B|1, H|1, T, S)."""
    place = torch.arange(indices.shape[-1], device="cuda")
    hit = torch.zeros(indices.shape, dtype=torch.bool, device="cuda")
    hit = hit.scatter(-1, indices.long(), place < counts[..., None])
    return hit.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :T, :S]


def card_of(major: int = 9) -> tuple[Any, ...]:
    """Changes that let torch believe in a card of this compute capability."""
    card = types.SimpleNamespace(major=major, minor=0, name="no card")
    return (
        mock.patch("torch.cuda._lazy_init", lambda: None),
        mock.patch("torch.cuda.get_device_properties", lambda *_: card),
    )


@contextmanager
def pretend_cuda() -> Iterator[Counts]:
    """Make `device="cuda"` work inside, and count; a mode of Python, so it is off again at the end."""
    load_guard()
    COUNTS.clear()
    changes = (
        # `module.to("cuda")` makes new parameters: memory of another kind cannot be put into the old ones.
        mock.patch("torch.__future__._overwrite_module_params_on_conversion", True),
        mock.patch.object(flex, "_compiled", lambda: _flex),
        torch.no_grad(),
        _Functions(),
        _Factories(),
    )
    with ExitStack() as stack:
        for change in (*changes, *card_of()):
            stack.enter_context(change)
        yield COUNTS
