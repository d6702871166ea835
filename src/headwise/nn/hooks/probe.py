"""See every attention call of a model while it runs, answer in its place, and leave the model as it was."""

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
from ...ops.options import ScoringOptions
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

    def attend(self) -> Tensor:
        """What the model's own attention gives, (B, H, T, V): dropout and gate included, gradients flow."""
        return attention(self.query, self.key, self.value, dropout=self.dropout, gate=self.gate, **self.scoring)

    def check_answer(self, answer: object) -> None:
        """Raise unless `answer` can take the place of what the call gives.

        Raises:
            TypeError: no tensor.
            ValueError: another shape, dtype or device, or a tensor whose numbers are not in memory by strides.
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
"""What a probe hands its calls to: it may return what the call is to give instead."""


@dataclass(eq=False)
class Probe:
    """What a running probe has seen.

    `expected` names the modules that have to be called before the probe ends. Without `each` the calls are kept in
    `calls`; with it they are handed over one by one and forgotten, so that memory stays that of one call.
    """

    expected: tuple[str, ...]
    each: Each | None = None
    calls: list[AttentionCall] = field(default_factory=list)
    seen: int = 0
    called: set[str] = field(default_factory=set)

    def record(self, module: str, **fields: Any) -> Tensor | None:
        """Take one call of `module`; `fields` are those of `AttentionCall` after ``order``.

        Returns what the call is to give, where `each` says so; None leaves it to the model's own attention.
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
        """Raise RuntimeError naming the expected modules that were never called."""
        silent = [name for name in self.expected if name not in self.called]
        if silent:
            raise RuntimeError(
                f"{len(silent)} of {len(self.expected)} attention modules were not called while the probe was open: "
                f"{_listed(silent)}; run the whole model inside the with block, in the same thread"
            )


def _listed(names: list[str], most: int = 5) -> str:
    """The first names, quoted, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(repr(name) for name in names[:most]) + more


@singledispatch
@contextmanager
def probe(model: nn.Module, each: Each | None = None) -> Iterator[Probe]:
    """Watch every attention call of `model` while the with block runs.

    This implementation sees each `headwise.MultiHeadAttention` and `headwise.LatentAttention` inside any module, and
    each `torch.nn.MultiheadAttention` that `headwise.nn.replace` has replaced; other rooms register theirs for other
    kinds of model with ``probe.register(type)``. Nothing is paid while no probe is
    open. A compiled model runs uncompiled inside the block. The model is left as it was, also after an exception.

    A probe is of the thread that opens it. What other threads call meanwhile, on the same model too, runs as it would
    without the probe, and is not seen; each may have probes of its own. (A thread that autograd starts to run a
    checkpointed part again is taken for the opener's.) The replicas that `torch.nn.DataParallel` makes on several
    devices run in threads of their own, so such a model is watched on one device: give what it wraps.

    Args:
        model: The module to watch. Around a model of another kind, wrappers are seen through (`headwise.nn.unwrap`).
        each: Called at once with every `AttentionCall`; the calls are then not kept. If it returns a tensor
            (B, H, T, V) in the query's dtype, that takes the place of what the attention would give, which is then not
            computed: it stands for all of ``inner(query, key, value, mask=mask, gate=gate)``, so the call's gate and
            dropout are its own affair; ``call.attend()`` has them. Gradients flow through it. None changes nothing.
            In a module whose heads are dealt out to several processes (`headwise.parallel.tensor_parallel`), a call
            has the heads of all of them, on each, and so has what is returned.
            Of several open probes each sees every call, in the order in which they were opened, as the model made it;
            where more than one answers, the last opened has its way.

    Yields:
        The `Probe`, whose ``calls`` fill up as the model runs.

    Raises:
        TypeError: `model` has no attention module that headwise knows, or one whose inner part cannot be described; or
            `each` returned something other than a tensor or None.
        ValueError: `each` returned a tensor of another shape, dtype or device than the attention's output.
        RuntimeError: an attention module of the model was never called, or one was called with a cache, which attends
            by itself and shows no tensors.

    Warns:
        UserWarning: beside modules that are seen the model has some `torch.nn.MultiheadAttention`, which run unseen.

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
    if probe.dispatch(type(inside)) is not probe.dispatch(nn.Module):  # another room's, which sees what this one cannot
        with probe(inside, each) as seen:
            yield seen
        return
    modules = _attention_modules(model)
    for name, mha in modules.items():
        _options(name, mha.inner)  # one that cannot tell what it computes is refused before anything runs
    seen = Probe(tuple(modules), each)
    running = [_Running("", None, {})]  # the attention module that was entered last: modules may share one inner part
    with ExitStack() as undo:
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled, and it takes a second to import
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
    """The attention modules inside `model`, by their qualified names."""
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
    """What to do with a model in which there is nothing to see; `unseen` are the modules of torch's own class."""
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
    query, key, value = args
    name, module, whole = running[0]
    options = {option: what for option, what in _options(name, inner).items() if option != "backend"}
    here = None if module is None else module.dealt
    if here is not None:  # the heads of all processes, by their numbers among them
        keywords = whole
        query, key, value = here.together(query, key, value)
        if options.get("sinks") is not None:
            options["sinks"] = here.group.gathered(options["sinks"], 0)
    mask = None if keywords.get("mask") is None else as_mask(keywords["mask"])
    answer = seen.record(name, query=query, key=key, value=value, mask=mask, gate=keywords.get("gate"), **options)
    answers[:] = [answer if here is None or answer is None else here.group.parted(answer, 1)]


_lock = Lock()


class _Cover:
    """Over the ``forward`` of an inner part while probes answer for it: a hook before it cannot keep it from running.

    `probes` are those, each with what it answers now; they may end in any order, and each answers its own thread.
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
    """For a while, an inner part gives what is in `answers` instead of computing; the last opened has its way."""
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
