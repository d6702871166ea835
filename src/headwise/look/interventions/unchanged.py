"""Layers before the first head that is replaced: their outputs are computed once, not again for each row of a batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...nn.hooks.probe import Probe
from ...nn.hooks.thread_hooks import in_this_thread
from .losses import Reading

KEPT = 1 << 26
"""The most numbers of outputs that are kept; later layers are computed again."""


@dataclass
class Unchanged:
    """The outputs of a model's layers on one text."""

    model: nn.Module
    outputs: dict[str, Any] = field(default_factory=dict)  # of each layer that was called once, in the order of calls
    calls: dict[str, list[int]] = field(default_factory=dict)  # by layer, the numbers of its attention calls
    modules: dict[int, str] = field(default_factory=dict)  # the attention modules by the numbers of their calls

    @classmethod
    def of(cls, model: nn.Module, text: Reading, modules: Mapping[int, str]) -> Unchanged:
        """Read the text once and keep the output of each layer with attention, an entry of a list of modules."""
        result, counts = cls(model, modules=dict(modules)), Counter[str]()
        for call, module in modules.items():
            if (name := _layer_of(model, module)) is not None:
                result.calls.setdefault(name, []).append(call)

        def keep(name: str, output: Any) -> None:
            counts[name] += 1
            result.outputs[name] = output

        with ExitStack() as undo:
            for name in result.calls:
                hook = in_this_thread(lambda module, args, output, name=name: keep(name, output))
                undo.callback(model.get_submodule(name).register_forward_hook(hook).remove)
            text.output(model)
        left = KEPT
        for name in list(result.outputs):
            left -= sum(leaf.numel() for leaf in pytree.tree_leaves(result.outputs[name]) if isinstance(leaf, Tensor))
            if counts[name] > 1 or left < 0:
                del result.outputs[name]
        return result

    @contextmanager
    def before(self, call: int, rows: int, seen: Probe) -> Iterator[None]:
        """Let the layers whose attention calls all come before a call give their outputs, in so many rows."""
        count = 0
        with ExitStack() as undo:
            for name, output in self.outputs.items():
                calls, layer = self.calls[name], self.model.get_submodule(name)
                if calls != list(range(count, count + len(calls))) or calls[-1] >= call:
                    break
                if (end := _give(layer, output, rows)) is None:
                    break
                undo.callback(end)
                count += len(calls)
            seen.seen = count
            seen.called |= {self.modules[n] for n in range(count)}
            yield


def _layer_of(model: nn.Module, module: str) -> str | None:
    """Return the outermost entry of a list of modules that a module is in, if its forward is that of its class."""
    parts = module.split(".")
    for size in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:size])), (nn.ModuleList, nn.Sequential)):
            name = ".".join(parts[: size + 1])
            layer = model.get_submodule(name)
            plain = "forward" not in vars(layer) and layer._compiled_call_impl is None
            return name if plain and name != module else None
    return None


def _give(layer: nn.Module, output: Any, rows: int) -> Callable[[], object] | None:
    """Let a layer return an output in this thread; return the function that ends it, None if another thread does so."""
    here, forward = threading.get_ident(), layer.forward

    def repeated(leaf: Any) -> Any:
        one_row = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == 1
        return leaf.repeat(rows, *[1] * (leaf.ndim - 1)) if one_row else leaf

    def give(*args: Any, **keywords: Any) -> Any:
        return pytree.tree_map(repeated, output) if threading.get_ident() == here else forward(*args, **keywords)

    # setdefault is one step for all threads, and a forward of the instance comes before that of its class
    return partial(vars(layer).pop, "forward") if vars(layer).setdefault("forward", give) is give else None
