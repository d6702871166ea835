"""See every attention call of a model while it runs, and leave the model as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.masks.compose import Mask, as_mask
from ..ops.scoring import ScoringOptions
from .checks import check_part
from .inner import Inner
from .latent import LatentAttention
from .multihead import MultiHeadAttention
from .unwrap import unwrap


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention, as the kernel got it: the very tensors, not copies of them.

    `module` is the qualified name of the attention module (``""`` for the model itself) and `order` the running number
    of the call since the probe began; the two together are unique even where one module runs several times.
    `query` is (B, H, T, D), `key` (B, K, S, D), `value` (B, K, S, V), after every norm and rotation. `scale` None
    stands for ``D ** -0.5``. A field left None was not in use.
    """

    module: str
    order: int
    query: Tensor
    key: Tensor
    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    value: Tensor | None = None
    dropout: float = 0.0
    gate: Tensor | None = None

    @property
    def scoring(self) -> ScoringOptions:
        """Mask, scale, softcap and sinks: keywords of `headwise.weights`, `statistics` and `top_keys` of the call.

        >>> import headwise
        >>> mha = headwise.MultiHeadAttention(12, 3)
        >>> with headwise.nn.probe(mha) as seen:
        ...     out = mha(torch.randn(2, 5, 12), mask=headwise.causal())
        >>> [call] = seen.calls
        >>> headwise.weights(call.query, call.key, **call.scoring).shape
        torch.Size([2, 3, 5, 5])
        """
        return {"mask": self.mask, "scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def __repr__(self) -> str:
        shapes = f"query={tuple(self.query.shape)}, key={tuple(self.key.shape)}"
        return f"AttentionCall({self.module!r}, order={self.order}, {shapes}, mask={self.mask})"


@dataclass(eq=False)
class Probe:
    """What a running probe has seen.

    `expected` names the modules that have to be called before the probe ends. Without `each` the calls are kept in
    `calls`; with it they are handed over one by one and forgotten, so that memory stays that of one call.
    """

    expected: tuple[str, ...]
    each: Callable[[AttentionCall], None] | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    seen: int = 0
    called: set[str] = field(default_factory=set)

    def record(self, module: str, **fields: Any) -> None:
        """Take one call of `module`; `fields` are those of `AttentionCall` after ``order``."""
        call = AttentionCall(module, self.seen, **fields)
        self.seen += 1
        self.called.add(module)
        if self.each is None:
            self.calls.append(call)
        else:
            self.each(call)

    def check_complete(self) -> None:
        """Raise RuntimeError naming the expected modules that were never called."""
        silent = [name for name in self.expected if name not in self.called]
        if silent:
            raise RuntimeError(
                f"{len(silent)} of {len(self.expected)} attention modules were not called while the probe was open: "
                f"{_listed(silent)}; run the whole model inside the with block"
            )


def _listed(names: list[str], most: int = 5) -> str:
    """The first names, quoted, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


@singledispatch
@contextmanager
def probe(model: nn.Module, each: Callable[[AttentionCall], None] | None = None) -> Iterator[Probe]:
    """Watch every attention call of `model` while the with block runs.

    This implementation sees each `headwise.MultiHeadAttention` and `headwise.LatentAttention` inside any module; other
    rooms register theirs for other kinds of model with ``probe.register(type)``. Nothing is paid while no probe is
    open. A compiled model runs uncompiled inside the block. The model is left as it was, also after an exception.

    Args:
        model: The module to watch. Around a model of another kind, wrappers are seen through (`headwise.nn.unwrap`).
        each: Called at once with every `AttentionCall`; the calls are then not kept.

    Yields:
        The `Probe`, whose ``calls`` fill up as the model runs.

    Raises:
        TypeError: `model` has no attention module that headwise knows, or one whose inner part cannot be described.
        RuntimeError: an attention module of the model was never called, or one was called with a cache, which attends
            by itself and shows no tensors.

    Example:
        >>> import torch, headwise
        >>> mha = headwise.MultiHeadAttention(12, 3)
        >>> with headwise.nn.probe(mha) as seen:
        ...     out = mha(torch.randn(2, 5, 12))
        >>> seen.calls[0].query.shape
        torch.Size([2, 3, 5, 4])
    """
    check_part("each", each, "called with every AttentionCall")
    inside = unwrap(model)
    if probe.dispatch(type(inside)) is not probe.dispatch(nn.Module):  # another room's, which sees what this one cannot
        with probe(inside, each) as seen:
            yield seen
        return
    modules = _attention_modules(model)
    for name, mha in modules.items():
        _options(name, mha.inner)  # one that cannot tell what it computes is refused before anything runs
    seen = Probe(tuple(modules), each)
    running = [""]  # the attention module that was entered last: modules may share one inner part
    with ExitStack() as undo:
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled, and it takes a second to import
            # A compiled graph was traced without the hooks and would run past them.
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for name, mha in modules.items():
            hook = mha.register_forward_pre_hook(partial(_before_module, running, name), with_kwargs=True)
            undo.callback(hook.remove)
        for inner in {id(mha.inner): mha.inner for mha in modules.values()}.values():
            hook = inner.register_forward_pre_hook(partial(_before_inner, running, seen), with_kwargs=True)
            undo.callback(hook.remove)
        yield seen
    seen.check_complete()


def _attention_modules(model: object) -> dict[str, MultiHeadAttention | LatentAttention]:
    """The attention modules inside `model`, by their qualified names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"probe needs a torch.nn.Module, got {type(model).__name__}")
    kinds = (MultiHeadAttention, LatentAttention)
    modules = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
    if not modules:
        raise TypeError(
            f"{type(model).__name__} holds no headwise.MultiHeadAttention or LatentAttention, so there is nothing to "
            f"probe; {_way_out(model)}"
        )
    return modules


def _way_out(model: nn.Module) -> str:
    """What to do with a model in which there is nothing to see."""
    ours = probe.dispatch(nn.Module)
    for name, part in model.named_modules():
        if probe.dispatch(type(part)) is not ours:
            return f"its part {name!r} ({type(part).__name__}) is a model of its own: probe that"
    if "headwise.hf" in sys.modules:
        return "give a model that has some, or a transformers model on its attention interface"
    return "for a transformers model, import headwise.hf first"


def _options(name: str, inner: nn.Module) -> dict[str, Any]:
    """What the inner part says of itself; TypeError naming the module where it says nothing."""
    if not isinstance(inner, Inner):
        raise TypeError(
            f"cannot probe module {name!r}: its inner part {type(inner).__name__} does not say what it computes; "
            "derive it from headwise.nn.Inner and define options()"
        )
    try:
        return inner.options()
    except NotImplementedError as unknown:
        raise TypeError(f"cannot probe module {name!r}: {unknown}") from None


def _before_module(running: list[str], name: str, mha: nn.Module, args: object, keywords: dict[str, Any]) -> None:
    if keywords.get("cache") is not None:
        raise RuntimeError(
            f"module {name!r} was called with a cache, which attends by itself and shows the probe nothing; probe a "
            "call on the whole text without a cache, with mask=headwise.causal()"
        )
    running[0] = name


def _before_inner(
    running: list[str], seen: Probe, inner: nn.Module, args: tuple[Tensor, ...], keywords: dict[str, Any]
) -> None:
    query, key, value = args
    options = {option: what for option, what in _options(running[0], inner).items() if option != "backend"}
    mask = None if keywords.get("mask") is None else as_mask(keywords["mask"])
    seen.record(running[0], query=query, key=key, value=value, mask=mask, gate=keywords.get("gate"), **options)
