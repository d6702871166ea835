"""The probe of transformers models: it records every attention call and leaves the model unchanged."""

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
from .attention.probe_sessions import Session, close_session, open_session
from .errors import ModelError
from .models.architectures import CROSS_ATTENTION
from .models.support import NAME, attention_modules, configs, outside_text, require_interface, title, unseen_modules
from .own_code.switch import switch


class _Session(Session):
    """An open probe of a transformers model, with the modules that ran."""

    def __init__(self, model: PreTrainedModel, seen: Probe, names: dict[nn.Module, str]) -> None:
        super().__init__(seen, names, {id(config): NAME for config in configs(model)})
        self.model = model
        self.ran: set[nn.Module] = set()
        self.before: dict[nn.Module, int] = {}

    def enter(self, module: nn.Module, *_: Any) -> None:
        """Record that a module starts its forward pass."""
        self.ran.add(module)
        self.before[module] = self.seen.seen

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Raise ModelError if an attention module finished its forward pass without calling headwise."""
        if self.seen.seen == self.before[module]:
            raise self.fault([self.names[module]], "ran without calling the attention function it is set to")

    def check_complete(self) -> None:
        """Raise ModelError unless every attention module was called, except in parts that did not have to run.

        These are a submodel that never ran (such as an encoder) and cross-attention without encoder states.
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
    """Record every attention call of a transformers model while the with block runs.

    The model is switched to headwise's attention and back. A call is identified by the qualified name of its module
    and its order, not by `layer_idx`: encoder-decoders use each value twice, and shared layers have only one value. The
    model is left bit-identical, also after an exception; a compiled model runs uncompiled inside the block. Calls from
    other threads run as without the probe and are not recorded; each thread can open its own probes.

    Args:
        model: Any model that runs on headwise, in any mode and dtype. For a wrapper (see `headwise.nn.unwrap`), the
            wrapped model is probed. If the model is split by tensor parallelism, each process runs the probe and
            records the heads of all processes.
        each: A function that is called with every `headwise.nn.AttentionCall` during the forward pass; the calls are
            then not kept. If it returns a tensor (B, H, T, V), that tensor replaces the attention output, as in
            `headwise.nn.probe`; None keeps the output.

    Yields:
        The `headwise.nn.Probe`; each attention call is appended to its ``calls`` as the model runs.

    Raises:
        ModelError: The model, or a part of it, is not on the interface, or an attention module that should have run
            did not call headwise. The message names the model and the module.
        TypeError: `model` is not a transformers model.

    Warns:
        UserWarning: The model has other attention modules that do not use the interface (such as a pooling head). They
            run as usual and are not recorded.

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
        open_session(session)
        undo.callback(close_session, session)
        switch(model, NAME)
        yield seen
    session.check_complete()


probe_any.register(PreTrainedModel, probe)


def _watched(model: object) -> dict[nn.Module, str]:
    """Return the attention modules of a model with their names, and warn of attention that is not among them."""
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
    """Return the innermost PreTrainedModel that holds a module: the encoder or decoder that it belongs to."""
    path = name.split(".")[:-1]
    while path:
        part = model.get_submodule(".".join(path))
        if isinstance(part, PreTrainedModel):
            return part
        path.pop()
    return model


def _is_cross(name: str) -> bool:
    """Return whether a module is cross-attention by its name, or by its parent's name if its own is "self" (BERT)."""
    return CROSS_ATTENTION.search(name.removesuffix(".self").rpartition(".")[2]) is not None
