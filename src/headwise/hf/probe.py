"""See every attention call of a transformers model while it runs, and leave the model as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..nn.hooks.probe import Each, Probe
from ..nn.hooks.probe import probe as probe_any
from ..nn.hooks.thread_hooks import in_this_thread, uncompiled
from ..nn.hooks.unwrap import unwrap
from .attention.probe_sessions import Session, closed, opened
from .errors import ModelError
from .models.architectures import CROSS_ATTENTION
from .models.support import NAME, attention_modules, configs, outside_text, require_interface, title, unseen_modules
from .own_code.switch import switch


class _Session(Session):
    """An open probe of a transformers model: which of its modules ran, too."""

    def __init__(self, model: PreTrainedModel, seen: Probe, names: dict[nn.Module, str]) -> None:
        super().__init__(seen, names, {id(config): NAME for config in configs(model)})
        self.model = model
        self.ran: set[nn.Module] = set()
        self.before: dict[nn.Module, int] = {}

    def enter(self, module: nn.Module, *_: Any) -> None:
        """A module begins its forward."""
        self.ran.add(module)
        self.before[module] = self.seen.seen

    def leave(self, module: nn.Module, *_: Any) -> None:
        """An attention module has ended its forward; unless it called us, it computed attention by itself."""
        if self.seen.seen == self.before[module]:
            raise self.fault([self.names[module]], "ran without calling the attention function it is set to")

    def check_complete(self) -> None:
        """Every attention module was called, but for those of a part that had nothing to do.

        Such are a whole model inside the model that never ran (an encoder, say), and cross-attention without a memory.
        """
        ran = self.ran | {self.model} if self.seen.seen else set(self.model.modules())
        silent = [
            name for name in self.seen.expected if name not in self.seen.called and _owner(self.model, name) in ran
        ]
        if self.seen.seen and not any(map(_is_cross, self.seen.called)):
            silent = [name for name in silent if not _is_cross(name)]
        if silent:
            raise self.fault(
                silent,
                "was not called while the probe was open; run the whole model inside the with block, in its thread",
            )

    def fault(self, names: list[str], what: str) -> ModelError:
        more = f" (and {len(names) - 1} more attention modules)" if len(names) > 1 else ""
        return ModelError(f"{title(self.model)}: module {names[0]!r}{more} {what}")


@contextmanager
def probe(model: nn.Module, each: Each | None = None) -> Iterator[Probe]:
    """Watch every attention call of a transformers model while the with block runs.

    The model is switched to headwise's attention and back. Calls are told apart by the qualified name of the module and
    their order, never by `layer_idx`, which encoder-decoders give twice and shared layers once. The model is left
    bit-identical, also after an exception; a compiled model runs uncompiled inside the block. What other threads call
    meanwhile runs as it would without the probe, and is not seen; each may have probes of its own.

    Args:
        model: Any model that runs on headwise, in any mode and dtype; of a wrapper (see
            `headwise.nn.unwrap`) what it wraps is watched. In one that tensor parallelism splits, each process runs
            the probe, and sees the heads of all.
        each: Called at once with every `headwise.nn.AttentionCall`; the calls are then not kept. What it returns, a
            tensor (B, H, T, V), takes the place of the attention's output, as in `headwise.nn.probe`; None leaves it.

    Yields:
        The `headwise.nn.Probe`, whose ``calls`` fill up as the model runs.

    Raises:
        ModelError: the model, or a part of it, is not on the interface; or an attention module that should have run did
            not call; the text names the model and the module.
        TypeError: model is no transformers model.

    Warns:
        UserWarning: the model has further modules of attention that do not go through the interface (a pooling head,
            say); they run as always, unseen.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=11)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> with probe(model) as seen:
        ...     out = model(torch.tensor([[1, 2, 3]]))
        >>> seen.calls[1].module, seen.calls[1].query.shape
        ('model.layers.1.self_attn', torch.Size([1, 4, 3, 6]))
    """
    model = unwrap(model)
    names = _watched(model)
    seen = Probe(tuple(names.values()), each)
    session = _Session(model, seen, names)
    with ExitStack() as undo:
        undo.enter_context(uncompiled())
        for module in {*names, *(part for part in model.modules() if isinstance(part, PreTrainedModel))}:
            undo.callback(module.register_forward_pre_hook(in_this_thread(session.enter)).remove)
        for module in names:
            undo.callback(module.register_forward_hook(in_this_thread(session.leave)).remove)
        opened(session)
        undo.callback(closed, session)
        switch(model, NAME)
        yield seen
    session.check_complete()


probe_any.register(PreTrainedModel, probe)


def _watched(model: object) -> dict[nn.Module, str]:
    """The attention modules of a model and their names, once it is sure that all of its attention is among them."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"headwise.hf.probe takes a transformers PreTrainedModel, got {type(model).__name__}; for a module made of "
            "headwise.MultiHeadAttention use headwise.nn.probe"
        )
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            require_interface(type(part), part.config.model_type)
    names = {module: name for name, module in attention_modules(model).items()}
    if not names:
        reason = "no module of it calls the interface"
        raise ModelError(outside_text(type(model).__name__, model.config.model_type, reason))
    unseen = unseen_modules(model)
    if unseen:
        listed = ", ".join(f"{name!r} ({type(module).__name__})" for name, module in list(unseen.items())[:3])
        warnings.warn(
            f"{title(model)}: {len(unseen)} module(s) of attention outside transformers' attention interface run "
            f"unseen: {listed}",
            stacklevel=4,
        )
    return names


def _owner(model: PreTrainedModel, name: str) -> nn.Module:
    """The smallest whole model around a module: the encoder or decoder it belongs to."""
    path = name.split(".")[:-1]
    while path:
        part = model.get_submodule(".".join(path))
        if isinstance(part, PreTrainedModel):
            return part
        path.pop()
    return model


def _is_cross(name: str) -> bool:
    """By its own name; where that is "self", as within BERT's two kinds of attention, by that around it."""
    return CROSS_ATTENTION.search(name.removesuffix(".self").rpartition(".")[2]) is not None
