"""What each head writes: its share of the layer's update, of the residual, of the next token's logit; copying."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import resting
from ...nn.hooks.probe import AttentionCall, probe
from ...nn.hooks.thread_hooks import in_this_thread
from ..interventions.gates import learning
from ..interventions.losses import IGNORED, Reading, logits_in
from .head_matrices import Matrices, Sources, linear_part

COPIED, TOP = 64, 5
"""How many tokens of the text copying is measured at, and how high a copied token must stand."""

LINEAR = 0.02
"""How far what we take for a norm may be from one, relative to its output."""

LARGEST = 100_000
"""Steps of a graph that wait at most: one in which sums branch without end is given up."""

PASSED = ("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy")
"""Steps of a graph of gradients that leave the numbers as they are."""


@dataclass(frozen=True)
class HeadWrites:
    """What one head writes through W_O (and a norm behind it), on a text. None: it cannot be told for this model.

    Attributes:
        module: qualified name of the attention module.
        layer: running index of the attention call in the forward, from 0.
        head: index of the query head, from 0.
        norm: the length of what it writes, mean over the tokens.
        share: its part of what all heads of the layer write together, along that; over the heads the sum is 1.
        residual: its part of the residual stream that the final norm reads, along that; None where what it writes does
            not reach it by addition alone (a norm behind each sum, as in the encoders of 2018; an encoder beside the
            decoder; a learned vector on the residual).
        logit: what it adds to the logit of the next token, over the mean of all logits, straight through the final norm
            at its actual scale (direct logit attribution); None as for `residual`.
        copying: how often a token has one of the 5 highest logits where the final norm reads what the head writes as it
            attends that token alone, W_O v_j, for tokens j of the text (Wang et al. 2022, arXiv 2211.00593, who put in
            the residual behind the first MLP at names; here it is the value as it was).
        suppressing: the same of the negative, - W_O v_j: high where a head speaks against what it attends.
    """

    module: str
    layer: int
    head: int
    norm: float
    share: float
    residual: float | None
    logit: float | None
    copying: float | None
    suppressing: float | None


@dataclass(frozen=True)
class Ending:
    """How a model ends: the names of its unembedding and of the norm before it, and what heads add to the residual.

    Attributes:
        unembedding: the last module with a matrix that gives as many numbers as the model has logits.
        outputs: how many numbers it gives.
        norm: what made its input; None where that is the residual itself.
        factors: layer -> the factor with which what its heads write is added to the residual that the norm reads;
            those that reach it in another way are left out.
        behind: layer -> the norm between its output projection and the residual, where there is one.
    """

    unembedding: str
    outputs: int
    norm: str | None
    factors: dict[int, float]
    behind: dict[int, str]

    @property
    def watched(self) -> set[str]:
        """The modules whose input is needed."""
        return {self.unembedding, *self.behind.values(), *([] if self.norm is None else [self.norm])}


def ending_of(model: nn.Module, text: Reading) -> Ending | None:
    """Seen while the model reads a short text; None where no module with a matrix makes the logits.

    What heads add is read off the graph of gradients: from the residual back through sums, factors and changes of shape
    alone.
    """
    heads: list[Tensor] = []
    ran: list[tuple[str, Tensor, Tensor]] = []
    sources = Sources()

    def each(call: AttentionCall) -> Tensor:
        heads.append(call.attend().detach().requires_grad_())
        return heads[-1]

    def after(name: str, _: nn.Module, args: tuple[Any, ...], out: object) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and isinstance(out, Tensor) and x.is_floating_point() and x.ndim == 3:
            ran.append((name, x, out))

    with ExitStack() as undo:
        undo.enter_context(learning(model))
        undo.enter_context(sources.watching(model))
        undo.enter_context(probe(model, each))
        for name, part in model.named_modules():
            if not any(True for _ in part.children()):
                undo.callback(part.register_forward_hook(in_this_thread(partial(after, name))).remove)
        output = text.output(model)
    logits = logits_in(output)
    matrix = {name for name, part in model.named_modules() if any(p.ndim == 2 for p in part.parameters(recurse=False))}
    wide = [
        one for one in ran if one[0] in matrix and isinstance(logits, Tensor) and one[2].shape[-1] == logits.shape[-1]
    ]
    if not wide:
        return None
    unembedding, read, last = wide[-1]
    norm = sources.of(read)
    residual = read if norm is None else [x for name, x, _ in ran if name == norm[0]][-1]
    written: dict[Any, int] = {}  # steps of the graph, which live as long as they are held
    behind: dict[int, str] = {}
    for order, out in enumerate(heads):
        side_by_side = out.transpose(1, 2).flatten(2)
        made = [out for _, x, out in ran if x.shape == side_by_side.shape and torch.equal(x, side_by_side)]
        if made:
            written[made[0].grad_fn] = order
        for name, x, out in ran:
            if made and x.grad_fn is made[0].grad_fn and out.grad_fn is not x.grad_fn and name not in matrix:
                written[out.grad_fn], behind[order] = order, name
    name = None if norm is None else norm[0]
    return Ending(unembedding, last.shape[-1], name, _added(residual.grad_fn, written), behind)


def _added(step: Any, written: dict[Any, int]) -> dict[int, float]:
    """layer -> factor, from a step of the graph of gradients back to those that made what heads wrote."""
    factors: dict[int, float] = {}
    left: list[tuple[Any, float]] = [(step, 1.0)]
    while left and len(left) < LARGEST:
        step, factor = left.pop()
        if step in written:
            order = written[step]
            factors[order] = factors.get(order, 0.0) + factor
        elif step is not None:
            left += [(before, factor * times) for before, times in _additive(step)]
    return factors


def _additive(step: Any) -> list[tuple[Any, float]]:
    """Return the steps before a step of the graph of gradients whose results it adds up, each with its factor."""
    name = step.name().removesuffix("Backward0")
    before = [fn for fn, _ in step.next_functions]
    if name in ("Add", "Sub"):
        return [*zip(before, (1.0, float(step._saved_alpha) * (-1 if name == "Sub" else 1)), strict=False)]
    if name in PASSED:
        return [(fn, 1.0) for fn in before]
    if name == "Mul" and None in before:
        other = step._saved_other if before[1] is None else step._saved_self
        if isinstance(other, Tensor) and other.numel() == 1:
            return [(fn, float(other)) for fn in before]
    return []


def writes(model: nn.Module, short: Reading, text: Reading, layers: Sequence[Matrices]) -> tuple[HeadWrites, ...]:
    """Return what every head writes on a text; how the model ends is seen on a short one."""
    ending = ending_of(model, short)
    outs: dict[int, tuple[Tensor, Tensor]] = {}
    read: dict[str, Tensor] = {}

    def each(call: AttentionCall) -> Tensor:
        out = call.attend()
        assert call.value is not None
        outs[call.order] = out[0], call.value[0]
        return out

    with resting(model):
        with ExitStack() as undo:
            undo.enter_context(probe(model, each))
            for name in () if ending is None else ending.watched:
                part = model.get_submodule(name)
                keep = in_this_thread(lambda _, x, n=name: read.update({n: x[0]}))
                undo.callback(part.register_forward_pre_hook(keep).remove)
            text.output(model)
        final = None if ending is None else Final.of(model, ending, read, text)
        result = []
        for layer in layers:
            factor, linear, size = _way(model, ending, layer, read)
            out, value = (x.float() for x in outs[layer.layer])
            written = torch.stack([heads @ W for heads, W in zip(out, layer.output @ linear.mT, strict=True)]) * size
            copied = [value[h * len(value) // len(out)] @ W for h, W in enumerate(layer.output @ linear.mT)]
            result += _of_layer(layer, written, copied, factor, final, text)
    return tuple(result)


def _way(
    model: nn.Module, ending: Ending | None, layer: Matrices, read: dict[str, Tensor]
) -> tuple[float | None, Tensor, Tensor]:
    """How what the heads of a layer write comes to the residual: a factor, a matrix, and a scale (T, 1) of its norm."""
    width = layer.output.shape[-1]
    eye, one = torch.eye(width, device=layer.output.device), torch.ones(1, 1, device=layer.output.device)
    if ending is None:
        return None, eye, one
    factor = ending.factors.get(layer.layer)
    name = ending.behind.get(layer.layer)
    if factor is None or name is None:
        return factor, eye, one
    frozen = frozen_norm(model.get_submodule(name), read[name])
    return (None, eye, one) if frozen is None else (factor, *frozen)


def frozen_norm(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(M, M) A and (T, 1) s, for norm(x) = s A x + bias at x (1, T, M); None where it is no norm."""
    made = (norm(x) - norm(torch.zeros_like(x[:, :1])))[0].float()
    linear = linear_part(norm, x)
    if made.shape != x.shape[1:] or linear.shape != (x.shape[2],) * 2:
        return None
    straight = x[0].float() @ linear.mT
    size = (made * straight).sum(-1, keepdim=True) / straight.square().sum(-1, keepdim=True)
    return (linear, size) if (made - size * straight).norm() <= LINEAR * made.norm() else None


def _of_layer(
    layer: Matrices,
    written: Tensor,
    copied: Sequence[Tensor],
    factor: float | None,
    final: Final | None,
    text: Reading,
) -> list[HeadWrites]:
    """The records of one call; written (H, T, M), and of each head what it would write for each key alone (S, M)."""
    update = written.sum(0)
    energy = update.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
    fits = final is not None and final.residual.shape == update.shape
    direct = final if factor is not None and fits else None
    ids = next((ids[0] for ids in text.inputs if ids.shape[1] == len(copied[0])), None)
    records = []
    for head, one in enumerate(written):
        copies: tuple[float | None, float | None] = (None, None)
        if direct is not None and ids is not None:
            copies = direct.copying(copied[head], ids)
        records.append(
            HeadWrites(
                layer.module,
                layer.layer,
                head,
                norm=float(one.norm(dim=-1).mean()),
                share=float((one * update).sum() / energy),
                residual=None if direct is None else direct.share(one) * (factor or 0.0),
                logit=None if direct is None or direct.towards is None else direct.logit(one) * (factor or 0.0),
                copying=copies[0],
                suppressing=copies[1],
            )
        )
    return records


@dataclass(frozen=True, eq=False)
class Final:
    """The final norm at its actual scale, and the unembedding, on one text.

    Attributes:
        residual: (T, M), what the final norm reads.
        towards: (T, M): how the residual moves the next token's logit over the mean logit; None without next tokens.
        norm, unembedding: the modules.
    """

    residual: Tensor
    towards: Tensor | None
    norm: nn.Module | None
    unembedding: nn.Module

    @classmethod
    def of(cls, model: nn.Module, ending: Ending, inputs: dict[str, Tensor], text: Reading) -> Final | None:
        """From what the two modules read; None where what stands before the unembedding is no norm, or where it has no
        output for some token of the text, so that its outputs are no logits.
        """
        read, unembedding = inputs[ending.unembedding], model.get_submodule(ending.unembedding)
        norm = None if ending.norm is None else model.get_submodule(ending.norm)
        residual = read if ending.norm is None else inputs[ending.norm]
        beyond = any(bool((ids >= ending.outputs).any()) for ids in (*text.inputs[-1:], text.labels))
        if residual.shape != read.shape or beyond:
            return None
        x = residual[0].float()
        straight = torch.eye(x.shape[-1], device=x.device), torch.ones(len(x), 1, device=x.device)
        frozen = straight if norm is None else frozen_norm(norm, residual)
        if frozen is None:
            return None
        linear, size = frozen
        towards = None
        labels = text.labels[0]
        if labels.shape[0] == len(x) and bool((labels != IGNORED).any()):
            towards = size * (_of_logits(unembedding, read, labels) @ linear)
        return cls(x, towards, norm, unembedding)

    def share(self, written: Tensor) -> float:
        """Return the part of the residual that lies in what was written, (T, M)."""
        return float((written * self.residual).sum() / self.residual.square().sum())

    def logit(self, written: Tensor) -> float:
        """Return what the head's writing adds to the next token's logit, mean over the places that have one."""
        assert self.towards is not None
        counted = self.towards.abs().sum(-1) > 0
        return float((written * self.towards).sum() / counted.sum().clamp(min=1))

    def copying(self, written: Tensor, ids: Tensor) -> tuple[float, float]:
        """How often a token is among the 5 highest logits of what its value makes the head write (S, M), and of its
        negative.
        """
        places = torch.arange(min(COPIED, len(ids)), device="cpu") * len(ids) // min(COPIED, len(ids))
        dtype = next((p.dtype for p in self.unembedding.parameters()), torch.float32)
        x, wanted = written[places].to(dtype)[None], ids[places.to(ids.device)]
        zero = torch.zeros_like(x[:, :1])
        base = zero if self.norm is None else self.norm(zero)
        moved = (x if self.norm is None else self.norm(x)) - base
        nothing = self.unembedding(zero)
        at_rest, change = self.unembedding(base)[0].float(), (self.unembedding(moved) - nothing)[0].float()
        own, shares = change.gather(1, wanted[:, None])[:, 0], []
        for sign in (1, -1):
            top = (at_rest + sign * change).topk(min(TOP, change.shape[-1])).indices
            hit = (top == wanted[:, None]).any(-1) & (sign * own > 0)  # where nothing moves, ties are no copies
            shares.append(float(hit.float().mean()))
        return shares[0], shares[1]


def _of_logits(unembedding: nn.Module, read: Tensor, labels: Tensor) -> Tensor:
    """(T, M): the derivative of each label's logit, over the mean logit, by what is unembedded; 0 without a label."""
    parts = []
    for x, wanted in zip(read[0].split(256), labels.split(256), strict=True):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            logits = unembedding(leaf[None])[0].float()
            counted = wanted != IGNORED
            picked = logits.gather(1, wanted.clamp(min=0)[:, None])[:, 0] - logits.mean(-1)
            [towards] = torch.autograd.grad((picked * counted).sum(), leaf)
        parts.append(towards.float())
    return torch.cat(parts)
