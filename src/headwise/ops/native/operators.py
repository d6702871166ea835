"""The operators `torch.ops.headwise.*`, registered as soon as headwise and torch are both imported.

A saved program (`torch.export`, AOTInductor) has operator names, and a process that loads it may call no function of
headwise before. So `import headwise` registers the operators. It does not import torch for this, but waits until torch
is imported. Nothing is registered later, so the first call of a process takes the same path as every other call.

The library (csrc/binding/*.cpp) defines all operators except `attend_train` and `attend_ends`, which are `attend_kept`
with `attend_backward` as its gradient, without and with its third result. Without the library, the reference defines
the operators that an exported program may have.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from .after_import import when_imported

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = Path(__file__).parents[2] / "_native.so"
OWN = (
    "attend", "attend_full", "attend_held", "attend_stored", "attend_kept", "attend_backward", "attend_part_backward",
    "attend_statistics", "attend_received", "append_codes", "decode_step", "linear", "dropout_keep", "isa", "isas",
    "use_isa",
)  # fmt: skip
RULES = (
    "float scale, float softcap, Tensor? sinks, SymInt low, SymInt high, Tensor? bounds, Tensor[]? segments, "
    "Tensor[]? dense, Tensor[]? alibi, Tensor[]? maps, Tensor[]? relative"
)
TRAIN = (
    f"attend_train(Tensor query, Tensor key, Tensor value, {RULES}, float dropout, Tensor? seed) -> (Tensor, Tensor)"
)
ENDS = TRAIN.replace("attend_train", "attend_ends").replace("(Tensor, Tensor)", "(Tensor, Tensor, Tensor)")
EXPORTED = {  # the operators that an exported program may have, besides `attend_train`
    "attend": "(Tensor query, Tensor key, Tensor value, float scale, SymInt low, SymInt high) -> Tensor",
    "attend_full": f"(Tensor query, Tensor key, Tensor value, {RULES}, Tensor? gate, float dropout, Tensor? seed) "
    "-> (Tensor, Tensor)",
    "attend_held": "(Tensor query, Tensor key, Tensor? key_scale, Tensor value, Tensor? value_scale, Tensor? table, "
    f"SymInt length, {RULES}, Tensor? gate, float dropout, Tensor? seed) -> (Tensor, Tensor)",
}
DEFINITIONS = "headwise.ops.native.gradient"  # the module that has functions with these names
FLOPS = "headwise.ops.native.flops"  # the module with the FLOP formulas
COUNTED = {  # the function of FLOPS that counts each operator
    "attend": "attend", "attend_full": "attend_full", "attend_kept": "attend_full", "attend_train": "attend_full",
    "attend_ends": "attend_full",
    "attend_held": "attend_held", "attend_stored": "attend_stored",
    "attend_backward": "attend_backward", "attend_part_backward": "attend_backward",
    "attend_statistics": "attend_statistics", "attend_received": "attend_received",
}  # fmt: skip
COUNTED_OF_TORCH = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "flash_for_cpu_backward",
}
LOADED = (
    ("headwise.cache.saved", "rebuild"),
    ("headwise.ops.storage.quantized", "Quantized"),
)  # constructors for loading

_lock = Lock()
_registered: list[str | None] = []  # empty, or one entry: the problem with the library, None if there is none
_fragment: Any = None  # the operators are registered as long as this object exists


def register() -> str | None:
    """Register the operators once. Return the reason why there is no native kernel, or None if there is one."""
    with _lock:
        if not _registered:
            problem = _load()
            _define(problem is None)
            # Its module imports triton where that is installed, which takes a quarter of a second.
            when_imported("torch.utils.flop_counter", partial(_count_flops, problem is None))
            _allow_loading()
            _registered.append(problem)
        return _registered[0]


def register_with_torch() -> None:
    """Register the operators now, or as soon as torch is imported."""
    when_imported("torch", register)


def _load() -> str | None:
    import torch

    if os.environ.get("HEADWISE_NATIVE", "1") == "0":
        return "the native library is switched off by HEADWISE_NATIVE=0"
    if not hasattr(torch.ops.headwise, "attend"):  # otherwise the user has loaded another build
        if not LIBRARY.exists():
            return "the native library is not there: reinstall headwise where there is a C++ compiler"
        try:
            torch.ops.load_library(LIBRARY)
        except (OSError, RuntimeError) as error:
            return f"the native library does not load: {str(error).splitlines()[0]}"
    missing = [name for name in OWN if not hasattr(torch.ops.headwise, name)]
    if missing:
        return f"the native library is another version's, without {', '.join(missing)}: reinstall headwise"
    forced, sets = os.environ.get("HEADWISE_ISA"), torch.ops.headwise.isas().replace(",", ", ")
    if forced and forced not in sets.split(", "):
        runs = f"the native kernel runs {torch.ops.headwise.isa()}; this CPU and build have {sets}"
        warnings.warn(f"HEADWISE_ISA={forced} names no instruction set that can run here: {runs}", stacklevel=2)
    return None


def _define(native: bool) -> None:
    """Register with torch what the library does not: the operator with a gradient, and the fake implementations."""
    global _fragment
    import torch

    _fragment = torch.library.Library("headwise", "FRAGMENT")
    _fragment.define(TRAIN)
    if not native:
        for name, schema in EXPORTED.items():
            if not hasattr(torch.ops.headwise, name):  # an older library may define it
                _fragment.define(name + schema)
                _fragment.impl(name, _late(DEFINITIONS, name), "CompositeImplicitAutograd")
        _fragment.impl("attend_train", _late(DEFINITIONS, "attend_train"), "CompositeImplicitAutograd")
        return
    _fragment.define(ENDS)
    for name in ("attend_train", "attend_ends"):
        with_gradient = _late("headwise.ops.native.library", name)
        _fragment.impl(name, with_gradient, "CPU")
        _fragment.impl(name, with_gradient, "Autograd")
    fakes: dict[str, Callable[..., Any]] = {
        "attend": lambda *args: _empty_pair(*args)[0],
        "attend_full": _empty_pair,
        "attend_held": _empty_held,
        "attend_stored": lambda *args: _empty_held(*args)[0],
        "attend_kept": _empty_kept,
        "attend_ends": _empty_kept,
        "attend_train": _empty_pair,
        "attend_backward": _empty_gradients,
        "attend_part_backward": _empty_gradients,
        "attend_statistics": _empty_statistics,
        "attend_received": _empty_received,
        "append_codes": _nothing,
        "dropout_keep": lambda seed, dropout, B, H, first, rows, S: seed.new_empty((B, H, rows, S), dtype=torch.bool),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"headwise::{name}", fake, lib=_fragment)


def _count_flops(native: bool) -> None:
    """Register the FLOP formulas of the operators, and of torch's fused CPU attention if torch has none.

    Without the library, an operator that consists of other operators is counted by those.
    """
    import torch
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for room, counted in ((torch.ops.headwise, COUNTED if native else {}), (torch.ops.aten, COUNTED_OF_TORCH)):
        for name, formula in counted.items():
            operator = getattr(room, name, None)
            if operator is not None and operator not in flop_registry:
                register_flop_formula(operator, get_raw=True)(_late(FLOPS, formula))


def _allow_loading() -> None:
    """Register the constructors of caches as safe for torch.load: they use only numbers and tensors."""
    import torch

    torch.serialization.add_safe_globals([(_late(*function), ".".join(function)) for function in LOADED])


def _late(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports another module only when it is called, so that `import headwise` stays fast."""
    return lambda *args, **options: getattr(import_module(module), name)(*args, **options)


def _empty_pair(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty out (B, H, T, V) in the memory order (B, T, H, V), and lse (B, H, T)."""
    import torch

    B, H, T, _D = query.shape
    out = query.new_empty(B, T, H, value.shape[3]).transpose(1, 2)
    return out, query.new_empty((B, H, T), dtype=torch.float32)


def _empty_held(query: Tensor, key: Tensor, key_scale: Any, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the same for keys and values of any storage; packed ones have a fraction of the query's width."""
    return _empty_pair(query, key, value.new_empty((1, 1, 1, value.shape[3] * query.shape[3] // key.shape[3])))


def _empty_kept(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty out, lse, and `ends`: each row's largest score and weight, which the backward pass uses."""
    out, lse = _empty_pair(query, key, value)
    return out, lse, lse.new_empty((2, *lse.shape))


def _empty_statistics(query: Tensor, key: Tensor, value: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    import torch

    B, H, T, _D = query.shape
    *_, sums, features, bins, query_bins = args
    columns = 0 if features is None else features.shape[-1]
    out = query.new_empty(B, T, H, 0 if value is None else value.shape[3]).transpose(1, 2)
    lse, numbers = (query.new_empty(shape, dtype=torch.float32) for shape in ((B, H, T), (6, B, H, T)))
    totals = (
        query.new_empty((B, H, *shape), dtype=torch.float64)
        for shape in ((2 * sums + columns,), (query_bins, bins + 1))
    )
    return out, lse, numbers, query.new_empty((2, B, H, T), dtype=torch.int64), *totals


def _empty_received(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    import torch

    (B, H), S = query.shape[:2], key.shape[2]
    return query.new_empty((B, H, S), dtype=torch.float64), query.new_empty((B, H, S), dtype=torch.int64)


def _nothing(*args: Any) -> None:
    """Check the devices for an operator that writes: a real tensor together with a fake one would not be written."""
    devices = {x.device.type for x in args if hasattr(x, "device")}
    if len(devices) > 1:
        raise RuntimeError(f"headwise: append_codes takes tensors of one device, got {', '.join(sorted(devices))}")


def _empty_gradients(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, ends: Tensor, biases: bool, *args: Any
) -> list[Tensor]:
    from .gradient import Training, leaves_of

    leaves = leaves_of(Training.of(*args), biases)
    qkv = [x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in leaves[:3]]
    return qkv + [x.new_empty(x.shape) for x in leaves[3:]]
