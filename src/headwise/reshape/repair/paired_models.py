"""Run a changed model and its original on the same text, and record the inputs and outputs of their projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import AttentionCall, probe
from ...nn.hooks.thread_hooks import in_this_thread, uncompiled

Batch = Tensor | Mapping[str, Any]
Some = TypeVar("Some")


@dataclass(frozen=True)
class Projections:
    """The qualified names of an attention module's projections that are solved again.

    Attributes:
        output: The output projection; its input is the heads concatenated, (..., H V).
        value: The module that computes the values; None to leave the values unchanged.
        value_rows: The indices of its outputs that are values, K V of them in the order of heads; None for all.

    Example:
        >>> from headwise import reshape
        >>> fused = reshape.Projections("o_proj", "qkv_proj", value_rows=tuple(range(16, 24)))  # the last third
    """

    output: str
    value: str | None = None
    value_rows: tuple[int, ...] | None = None


@dataclass(eq=False)
class ModuleBatch:
    """The record of one attention module and one batch: inputs of the changed module, and output of the original.

    A part that was not run is None.

    Attributes:
        heads: (B, T, H V), the input of the output projection.
        target: (B, T, M), the output of the original.
        source: (B, S, N), the hidden states that become values.
        call: The attention call, an `AttentionCall`.
    """

    heads: Any = None
    target: Any = None
    source: Any = None
    call: Any = None


@dataclass(eq=False)
class Pair:
    """The changed and the original model with hooks; `read` runs a batch through both.

    With `forced`, each attention module of the changed model outputs what the original's does, so that all its layers
    have the original's inputs.
    """

    changed: nn.Module
    original: nn.Module
    layers: Mapping[str, Projections]
    forced: bool
    call: Callable[[nn.Module, Batch], Any]
    seen: dict[str, ModuleBatch] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    last: str | None = None

    def read(self, batch: Batch, until: str | None = None) -> dict[str, ModuleBatch]:
        """Return the record of each attention module; with `until`, stop after that module."""
        self.seen, self.last = {name: ModuleBatch() for name in self.layers}, until
        for model in (self.original, self.changed):
            with suppress(_Enough):
                self.call(model, batch)
        return self.seen

    @contextmanager
    def recording(self, calls: bool) -> Iterator[Pair]:
        """Install the hooks for the with block, in eval mode and without gradients.

        With `calls`, queries and keys are recorded as well.
        """
        with ExitStack() as undo:
            undo.enter_context(uncompiled())
            undo.enter_context(in_eval_mode_without_grad(self.original, self.changed))
            for name, where in self.layers.items():
                self._hook(undo, name, where)
            if calls:
                undo.enter_context(probe(self.changed, self._take_call))
            yield self

    def _hook(self, undo: ExitStack, name: str, where: Projections) -> None:
        def target(module: nn.Module, args: Any, out: Tensor) -> None:
            self.seen[name].target = out.detach().clone()
            if name == self.last:
                raise _Enough

        def output(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
            seen = self.seen[name]
            seen.heads = args[0].detach().clone()
            if name not in self.order:
                self.order.append(name)
            if name == self.last:
                raise _Enough
            return seen.target.to(out) if self.forced and seen.target is not None else None

        def source(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.seen[name].source = args[0].detach().clone()

        for hooked, hook in ((self.original, target), (self.changed, output)):
            undo.callback(_part(hooked, where.output).register_forward_hook(in_this_thread(hook)).remove)
        if where.value is not None:
            undo.callback(_part(self.changed, where.value).register_forward_pre_hook(in_this_thread(source)).remove)

    def _take_call(self, call: AttentionCall) -> None:
        for name in self.seen:
            if call.module == name or call.module.startswith(f"{name}."):
                self.seen[name].call = call


class _Enough(Exception):
    """The signal that ends a forward pass once everything needed is recorded."""


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{type(model).__name__} has no module {name!r}; name one of its named_modules()") from None


def run_model(model: nn.Module, batch: Batch) -> Any:
    """Return ``model(batch)``, or ``model(**batch)`` for a mapping."""
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def batches_of(batches: Sequence[Some]) -> tuple[list[Some], list[Some]]:
    """Return the batches to fit to, and the batches to check by: every fifth one, or the last."""
    if isinstance(batches, Tensor) or not isinstance(batches, Sequence) or len(batches) < 2:
        raise ValueError(
            "batches are a list of at least two, each ids (B, T) or the keywords of a call: some are fitted to, others "
            "show whether the fit holds"
        )
    check = [i for i in range(len(batches)) if i % 5 == 4] or [len(batches) - 1]
    return [b for i, b in enumerate(batches) if i not in check], [batches[i] for i in check]
