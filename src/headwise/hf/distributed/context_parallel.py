"""Context parallelism for a transformers decoder: sequences are split over ranks, in training and in prefill."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import find_packed_sequence_indices

from ...nn.attention_mode import attention_mode
from ...parallel import Comm, Context, join_sequence, sum_gradients
from ...parallel.context_layouts.agreement import digest
from ...parallel.context_layouts.attention import LayoutOption
from ...plan.ranks.sharding import TokenOrder
from ..errors import ModelError
from ..models.support import NAME, attention_modules, refuse_own_code, title
from .split_batch import WholeBatch, masks_of_whole_batch

SPLIT = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "labels", "token_type_ids")
"""The arguments whose second axis is that of tokens."""
WHOLE = ("num_items_in_batch", "use_cache", "return_dict", "output_hidden_states", "output_attentions")
_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary types that depend on the longest position of a forward pass, which a rank does not have."""


Contexts = Callable[[], list[AbstractContextManager[None]]]
"""A function that makes the context managers of a forward pass."""


class Shards:
    """A model whose sequences are split over ranks; `context_parallel` yields it.

    Attributes:
        comm: the ranks, and what they sent.
        order: the token order of the last forward pass: "contiguous" or "zigzag".
    """

    def __init__(self, model: PreTrainedModel, comm: Comm, order: TokenOrder | None, layout: LayoutOption) -> None:
        self.model, self.comm, self.layout, self._order = model, comm, layout, order
        self.order: TokenOrder = order or "contiguous"
        self._open = ExitStack()
        self._contexts: Contexts = list

    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the output of all tokens (B, T, N) from that of this rank's tokens (B, T_r, N), such as logits."""
        return join_sequence(x, self.comm.group, order=self.order, dim=dim)

    def sum_gradients(self) -> None:
        """Add the parameters' gradients of all ranks: call it once, before the optimizer's step."""
        sum_gradients(self.model, self.comm.group)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def before(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a forward pass, reduced to this rank's tokens."""
        operation = f"forward of {type(model).__name__}"
        with self.comm.before(operation):
            arguments = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
            arguments |= arguments.pop("kwargs", {})
            tokens = arguments.get("input_ids" if arguments.get("inputs_embeds") is None else "inputs_embeds")
            _check(model, arguments, tokens)
        assert tokens is not None
        B, T = tokens.shape[:2]
        self.order = self._order if 2 * self.comm.world <= T and self._order else "contiguous"
        if self._order is None and 2 * self.comm.world <= T and not _only_windows(model.config):
            self.order = "zigzag"
        texts = {name: f"{digest(x):08x}" for name, x in arguments.items() if isinstance(x, Tensor)}
        self.comm.agree(operation, {"order": self.order, **texts})
        documents = None
        if arguments.get("position_ids") is None:
            arguments["position_ids"] = torch.arange(T, device=tokens.device)[None].expand(B, -1)
        elif arguments.get("attention_mask") is None:
            documents = find_packed_sequence_indices(arguments["position_ids"].expand(B, -1))
        padding = arguments.get("attention_mask")
        whole = WholeBatch(T, None if padding is None else padding.bool())
        if arguments.get("labels") is not None:
            after = torch.nn.functional.pad(arguments["labels"], (0, 1), value=-100)[:, 1:]
            arguments.setdefault("num_items_in_batch", (after != -100).sum())
            arguments["shift_labels"] = after
        arguments.setdefault("use_cache", False)
        context = Context(self.comm, self.order, self.layout, T)
        mine = context.places().to(tokens.device)
        by_token = {n for n, x in arguments.items() if n in (*SPLIT, "shift_labels") and isinstance(x, Tensor)}
        cut = {name: x.index_select(1, mine) if name in by_token else x for name, x in arguments.items()}
        positions = arguments["position_ids"].expand(B, -1)
        self._contexts = lambda: [masks_of_whole_batch(whole, positions, documents), attention_mode(context)]
        self._enter(self._contexts)
        return (), cut

    def after(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output of a forward pass; its loss becomes that of all tokens."""
        self._open.close()
        loss = getattr(output, "loss", None)
        if loss is not None and kwargs.get("labels") is not None:
            output.loss = _Total.apply(self.comm, loss)
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self._backward, self._contexts))
        return output

    def _backward(self, contexts: Contexts, grad: Tensor) -> None:
        """Split what a backward pass computes again (activation checkpointing) in the same way as the forward pass."""
        self._enter(contexts)
        torch.autograd.Variable._execution_engine.queue_callback(self._open.close)

    def _enter(self, contexts: Contexts) -> None:
        self._open.close()
        for context in contexts():
            self._open.enter_context(context)


@contextmanager
def context_parallel(
    model: PreTrainedModel,
    mesh: DeviceMesh | ProcessGroup | None = None,
    *,
    order: TokenOrder | None = None,
    layout: LayoutOption = "auto",
    timeout: float | None = None,
) -> Iterator[Shards]:
    """Split a decoder's forward pass over ranks inside of the with block: every rank passes the same whole sequences.

    Each rank computes embeddings, projections and feed-forward layers for its own tokens, and its queries attend the
    keys of all tokens. Causal layers, windows, chunks, sinks, softcaps, padding and packed documents work as in one
    process. The loss (if `labels` are passed) is that of all tokens, on every rank. Each rank has a part of its
    gradient: `sum_gradients` adds the parts.

    ``with headwise.hf.context_parallel(model, mesh) as shards:``
        ``out = model(input_ids=ids, labels=ids)``, then ``out.loss.backward()``, ``shards.sum_gradients()``,
        ``optimizer.step()``; ``shards.join(out.logits)`` has the logits of all tokens.

    Args:
        model: with ``attn_implementation="headwise"``; all of its layers must be attention layers.
        mesh: `DeviceMesh` of one dimension, or a process group; all processes by default.
        order: the order in which tokens are split; by default zigzag, or contiguous if all layers have windows.
        layout: as for `headwise.parallel.context_parallel`.
        timeout: seconds to wait for another rank.

    Raises:
        TypeError: model is not a transformers model.
        ModelError: a model, or an argument of its forward pass, that cannot be split.
        RankError: ranks disagree, or one fails.
    """
    _check_model(model)
    shards = Shards(model, Comm.of(mesh, timeout), order, layout)
    before = model.register_forward_pre_hook(shards.before, with_kwargs=True)
    after = model.register_forward_hook(shards.after, with_kwargs=True)
    try:
        yield shards
    finally:
        before.remove()
        after.remove()
        shards._open.close()


class _Total(torch.autograd.Function):
    """The sum of the parts of a loss on all ranks; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, share: Tensor) -> Tensor:
        comm.agree("loss", {"dtype": share.dtype})
        return comm.all_reduce("loss", share.reshape(1)).view(share.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def _only_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return bool(kinds) and all(kind in ("sliding_attention", "chunked_attention") for kind in kinds)


def _check(model: PreTrainedModel, arguments: dict[str, Any], tokens: Any) -> None:
    """Raise ModelError for arguments of a forward pass that cannot be split."""
    who = f"a split forward of {title(model)}"
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise ModelError(f"{who} takes input_ids (B, T) or inputs_embeds (B, T, M), whole, on every rank")
    unknown = [name for name, x in arguments.items() if isinstance(x, Tensor) and name not in (*SPLIT, *WHOLE)]
    unknown += [
        name for name in ("cache", "past_key_values", "encoder_hidden_states") if arguments.get(name) is not None
    ]
    unknown += [name for name in ("output_attentions", "output_router_logits", "logits_to_keep") if arguments.get(name)]
    if unknown:
        raise ModelError(
            f"{who} takes {', '.join(SPLIT)}; it cannot split {', '.join(sorted(set(unknown)))}: leave that out, or "
            "run the model outside of context_parallel"
        )
    padding = arguments.get("attention_mask")
    if padding is not None and (not isinstance(padding, Tensor) or padding.shape != tokens.shape[:2]):
        raise ModelError(f"{who} takes an attention_mask (B, T) = {tuple(tokens.shape[:2])} of 0 and 1, or none")
    if arguments.get("labels") is not None and not _has_known_loss(model):
        raise ModelError(
            f"{who} computes its loss in a way that cannot be split; leave labels out and compute the loss from "
            "shards.join(out.logits)"
        )


def _has_known_loss(model: PreTrainedModel) -> bool:
    """Return True if a model computes its loss by `ForCausalLMLoss` and its forward pass takes any keyword."""
    takes = inspect.signature(model.forward).parameters.values()
    free = any(p.kind is p.VAR_KEYWORD for p in takes)
    called = "self.loss_function(" in inspect.getsource(type(model).forward)
    return free and called and model.loss_function is ForCausalLMLoss


def _check_model(model: Any) -> None:
    """Raise ModelError for a model that cannot be split."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"context_parallel takes a transformers model; got {type(model).__name__}")
    refuse_own_code(model, "context_parallel")
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        raise ModelError(
            f"{title(model)} attends by {config._attn_implementation!r}, which sees this rank's tokens alone; call "
            'model.set_attn_implementation("headwise") first'
        )
    layers, attending = getattr(config, "num_hidden_layers", None), len(attention_modules(model))
    if getattr(config, "is_encoder_decoder", False) or layers != attending:
        raise ModelError(
            f"{title(model)} has {layers} layers, {attending} of which are attention on transformers' interface; what "
            "mixes tokens in another way (an encoder beside it, recurrences, convolutions) cannot be split over ranks"
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {ropes.get("rope_type")} | {rope.get("rope_type") for rope in ropes.values() if isinstance(rope, dict)}
    depends = kinds & set(_LENGTH_DEPENDENT)
    if depends:
        raise ModelError(
            f"{title(model)} has rotary positions of type {', '.join(sorted(map(str, depends)))}, which depend on the "
            "longest position that one process sees; use a type that does not, such as yarn"
        )
