"""Hooks that record every attention call of a running model or replace its output, and are removed afterwards."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, singledispatch
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...ops.attention import attention
from ...ops.autocast import autocasts
from ...ops.masks.mask import Mask, as_mask
from ...ops.options import ScoreKeywords
from ...shapes import describe
from ...shapes.arguments import check_dense, shown
from ..checks import check_part
from ..drop_in import DropInMultiheadAttention
from ..inner_attention import Inner
from ..latent import LatentAttention
from ..multihead import MultiHeadAttention
from .thread_hooks import Opener, in_this_thread, uncompiled
from .unwrap import unwrap


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention call: the tensors that the kernel received, not copies.

    `module` is the qualified name of the attention module (``""`` for the model itself), and `order` the index of the
    call since the probe began, so that several calls of one module can be distinguished.
    `query` is (B, H, T, D), `key` (B, K, S, D), `value` (B, K, S, V), after all norms and rotary embedding. `scale`
    None means ``D ** -0.5``. Any other field that is None is not used.
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
    def scoring(self) -> ScoreKeywords:
        """The mask, scale, softcap and sinks, as keywords for `headwise.weights`, `statistics` and `top_keys`.

        >>> import headwise
        >>> mha = headwise.MultiHeadAttention(12, 3)
        >>> with headwise.nn.probe(mha) as seen:
        ...     out = mha(torch.randn(2, 5, 12), mask=headwise.causal())
        >>> [call] = seen.calls
        >>> headwise.weights(call.query, call.key, **call.scoring).shape
        torch.Size([2, 3, 5, 5])
        """
        return {"mask": self.mask, "scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}

    def attend(self) -> Tensor:
        """Compute the output of the model's attention (B, H, T, V), with dropout, gate and gradients."""
        return attention(self.query, self.key, self.value, dropout=self.dropout, gate=self.gate, **self.scoring)

    def check_answer(self, answer: object) -> None:
        """Check that `answer` can replace the output of the call.

        Raises:
            TypeError: `answer` is not a tensor.
            ValueError: another shape, dtype or device, or a tensor that is not strided.
        """
        rule = "what `each` returns takes the place of the attention's output"
        if not isinstance(answer, Tensor):
            raise TypeError(
                f"{rule} of module {self.module!r}: a tensor (B, H, T, V), or None to leave it; got {shown(answer)}"
            )
        check_dense(f"what `each` returns for module {self.module!r}", answer)
        device = self.query.device
        shape = (*self.query.shape[:3], *(() if self.value is None else self.value.shape[3:]))
        dtypes = {self.query.dtype}
        if autocasts(device.type):
            dtypes.add(torch.get_autocast_dtype(device.type))
        fits = answer.ndim == 4 and answer.shape[: len(shape)] == shape
        if not fits or answer.dtype not in dtypes or answer.device != device:
            raise ValueError(
                f"{rule} of module {self.module!r}: (B, H, T, V) = {shape}, {self.query.dtype} on {device}, as "
                f"call.attend() gives it; got {describe(answer)} on {answer.device}"
            )

    def __repr__(self) -> str:
        shapes = f"query={tuple(self.query.shape)}, key={tuple(self.key.shape)}"
        return f"AttentionCall({self.module!r}, order={self.order}, {shapes}, mask={self.mask})"


Each: TypeAlias = Callable[[AttentionCall], Tensor | None]
"""A function that a probe calls with each attention call; it may return a replacement for the call's output."""


@dataclass(eq=False)
class Probe:
    """The calls recorded by a probe.

    `expected` has the names of the modules that must be called before the probe ends. Without `each` the calls are
    stored in `calls`. With `each` they are passed to it one by one and not stored, so memory is that of one call.
    """

    expected: tuple[str, ...]
    each: Each | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    seen: int = 0
    called: set[str] = field(default_factory=set)

    def record(self, module: str, **fields: Any) -> Tensor | None:
        """Record one call of `module`; `fields` are those of `AttentionCall` after ``order``.

        Returns the replacement for the output if `each` returns one; None keeps the output of the model's attention.
        """
        call = AttentionCall(module, self.seen, **fields)
        self.seen += 1
        self.called.add(module)
        if self.each is None:
            self.calls.append(call)
            return None
        answer = self.each(call)
        if answer is not None:
            call.check_answer(answer)
        return answer

    def check_complete(self) -> None:
        """Check that all expected modules were called; otherwise raise a RuntimeError with the names of the others."""
        silent = [name for name in self.expected if name not in self.called]
        if silent:
            raise RuntimeError(
                f"{len(silent)} of {len(self.expected)} attention modules were not called while the probe was open: "
                f"{_listed(silent)}; run the whole model inside the with block, in the same thread"
            )


def _listed(names: list[str], most: int = 5) -> str:
    """Return the first names, quoted, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


@singledispatch
@contextmanager
def probe(model: nn.Module, each: Each | None = None) -> Iterator[Probe]:
    """Record every attention call of `model` inside the with block.

    This implementation records each `headwise.MultiHeadAttention` and `headwise.LatentAttention` inside any module, and
    each `torch.nn.MultiheadAttention` that `headwise.nn.replace` has replaced; other packages add other kinds of model
    with ``probe.register(type)``. There is no overhead while no probe is open. A compiled model runs uncompiled inside
    the block. Afterwards, also after an exception, the model is unchanged.

    A probe records only calls made in the thread that opens it. Calls in other threads, of the same model too, run as
    without the probe; each thread can have its own probes. (A thread in which autograd recomputes a checkpointed part
    counts as the opening thread.) The replicas that `torch.nn.DataParallel` makes on several devices run in their own
    threads, so such a model can be probed on one device only: pass the wrapped model.

    Args:
        model: The module to probe. Wrappers around other kinds of model are removed (`headwise.nn.unwrap`).
        each: Called with every `AttentionCall` before the attention runs; the calls are then not stored. If it returns
            a tensor (B, H, T, V) in the query's dtype, that tensor replaces the output of the attention, which is not
            computed. It replaces all of ``inner(query, key, value, mask=mask, gate=gate)``, so gate and dropout are not
            applied to it; ``call.attend()`` applies them. Gradients flow through it. None changes nothing.
            In a module whose heads are split over several ranks (`headwise.parallel.tensor_parallel`), the call on each
            rank has the heads of all ranks, and the returned tensor must have them too.
            If several probes are open, each gets every original call, in the order in which they were opened. If
            several return a tensor, that of the probe opened last is used.

    Yields:
        The `Probe`; each call is appended to its ``calls``.

    Raises:
        TypeError: `model` has no attention module that headwise supports, or one whose inner part does not define
            `options`; or `each` returned something other than a tensor or None.
        ValueError: `each` returned a tensor of another shape, dtype or device than the attention's output.
        RuntimeError: an attention module of the model was never called, or one was called with a cache, so that its
            tensors cannot be recorded.

    Warns:
        UserWarning: some attention modules of the model are `torch.nn.MultiheadAttention`, which are not recorded.

    Example:
        >>> import torch, headwise
        >>> mha = headwise.MultiHeadAttention(12, 3)
        >>> with headwise.nn.probe(mha) as seen:
        ...     out = mha(torch.randn(2, 5, 12))
        >>> seen.calls[0].query.shape
        torch.Size([2, 3, 5, 4])
        >>> without_the_first = torch.tensor([0.0, 1.0, 1.0]).view(3, 1, 1)
        >>> with headwise.nn.probe(mha, lambda call: call.attend() * without_the_first):
        ...     out = mha(torch.randn(2, 5, 12))
    """
    check_part("each", each, "called with every AttentionCall")
    inside = unwrap(model)
    if probe.dispatch(type(inside)) is not probe.dispatch(nn.Module):  # implemented elsewhere
        with probe(inside, each) as seen:
            yield seen
        return
    modules = _attention_modules(model)
    for name, mha in modules.items():
        _options(name, mha.inner)  # refuse an inner part without options() before anything runs
    seen = Probe(tuple(modules), each)
    running = [_Running("", None, {})]  # the module entered last, as modules may share one inner part
    with ExitStack() as undo:
        if "torch._dynamo" in sys.modules:  # if not imported, nothing is compiled, and the import takes a second
            undo.enter_context(uncompiled())
        for name, mha in modules.items():
            enter = in_this_thread(partial(_before_module, running, name))
            undo.callback(mha.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for inner in {id(mha.inner): mha.inner for mha in modules.values()}.values():
            answers: list[Tensor | None] = []
            watch = in_this_thread(partial(_before_inner, running, seen, answers))
            undo.callback(inner.register_forward_pre_hook(watch, with_kwargs=True).remove)
            if each is not None:
                undo.enter_context(_answering(inner, answers))
        yield seen
    seen.check_complete()


Attention: TypeAlias = MultiHeadAttention | LatentAttention | DropInMultiheadAttention


def _attention_modules(model: object) -> dict[str, Attention]:
    """Return the attention modules inside `model`, by qualified name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"probe needs a torch.nn.Module, got {type(model).__name__}")
    modules = {name: part for name, part in model.named_modules() if isinstance(part, Attention)}
    unseen = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention) and not isinstance(part, Attention)
    ]
    if not modules:
        raise TypeError(
            f"{type(model).__name__} holds no headwise.MultiHeadAttention or LatentAttention, so there is nothing to "
            f"probe; {_way_out(model, unseen)}"
        )
    if unseen:
        warnings.warn(
            f"{len(unseen)} torch.nn.MultiheadAttention of {type(model).__name__} run unseen: {_listed(unseen)}; "
            "headwise.nn.replace(model) makes them seen",
            stacklevel=5,
        )
    return modules


def _way_out(model: nn.Module, unseen: list[str]) -> str:
    """Return advice for a model without supported attention; `unseen` are its `torch.nn.MultiheadAttention` modules."""
    if unseen:
        return f"its torch.nn.MultiheadAttention ({_listed(unseen)}) are seen after headwise.nn.replace(model)"
    ours = probe.dispatch(nn.Module)
    for name, part in model.named_modules():
        if probe.dispatch(type(part)) is not ours:
            return f"its part {name!r} ({type(part).__name__}) is a model of its own: probe that"
    if "headwise.hf" in sys.modules:
        return "give a model that has some, or a transformers model on its attention interface"
    return "for a transformers model, import headwise.hf first"


def _options(name: str, inner: nn.Module) -> dict[str, Any]:
    """Return the options of the inner part, or raise a TypeError with the module's name if it defines none."""
    if not isinstance(inner, Inner):
        raise TypeError(
            f"cannot probe module {name!r}: its inner part {type(inner).__name__} does not say what it computes; "
            "derive it from headwise.nn.Inner and define options()"
        )
    try:
        return inner.options()
    except NotImplementedError as unknown:
        raise TypeError(f"cannot probe module {name!r}: {unknown}") from None


class _Running(NamedTuple):
    """The attention module that was entered last, and the keywords of its call."""

    name: str
    module: Attention | None
    keywords: dict[str, Any]


def _before_module(running: list[_Running], name: str, mha: Any, args: object, keywords: dict[str, Any]) -> None:
    if keywords.get("cache") is not None:
        raise RuntimeError(
            f"module {name!r} was called with a cache, which attends by itself and shows the probe nothing; probe a "
            "call on the whole text without a cache, with mask=headwise.causal()"
        )
    running[:] = [_Running(name, mha, keywords)]


def _before_inner(
    running: list[_Running],
    seen: Probe,
    answers: list[Tensor | None],
    inner: nn.Module,
    args: tuple[Tensor, ...],
    keywords: dict[str, Any],
) -> None:
    name, module, whole = running[0]
    options = {option: what for option, what in _options(name, inner).items() if option != "backend"}
    given = {"mask": keywords.get("mask"), "gate": keywords.get("gate")}
    call, own_part = observed(module, dict(zip(("query", "key", "value"), args, strict=True)) | given | options, whole)
    mask = call.pop("mask")
    answer = seen.record(name, mask=None if mask is None else as_mask(mask), **call)
    answers[:] = [None if answer is None else own_part(answer)]


@singledispatch
def observed(
    module: object, call: dict[str, Any], keywords: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """Return what a probe records of a call, and a function from an answer of the probe to the heads of the call.

    Registered for modules whose inner part gets less than the whole call.

    Args:
        module: The attention module that runs.
        call: Tensors and options of the call of its inner part, by the names of `AttentionCall`.
        keywords: The keywords with which the module was called.
    """
    return call, lambda answer: answer


_lock = Lock()


class _Cover:
    """A replacement for the ``forward`` of an inner part, needed because a pre-hook cannot skip the forward.

    `probes` has the open probes, each with its answer to the current call. They may end in any order, and each applies
    to its own thread.
    """

    def __init__(self, inner: nn.Module) -> None:
        self.under, self.before = inner.forward, vars(inner).get("forward")
        self.probes: tuple[tuple[Opener, list[Tensor | None]], ...] = ()

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        for opener, answers in reversed(self.probes):
            answer = answers.pop() if opener.here() and answers else None
            if answer is not None:
                return answer
        return self.under(*args, **keywords)


@contextmanager
def _answering(inner: nn.Module, answers: list[Tensor | None]) -> Iterator[None]:
    """Let an inner part return the tensor in `answers` inside the with block; the last opened block has priority."""
    probe = (Opener(), answers)
    with _lock:
        cover = vars(inner).get("forward")
        if not isinstance(cover, _Cover):
            cover = vars(inner)["forward"] = _Cover(inner)
        cover.probes = (*cover.probes, probe)
    try:
        yield
    finally:
        with _lock:
            cover.probes = tuple(other for other in cover.probes if other is not probe)
            if not cover.probes:
                del vars(inner)["forward"]
                if cover.before is not None:
                    vars(inner)["forward"] = cover.before
