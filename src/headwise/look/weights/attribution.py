"""The output of each head: its share of the layer's update, of the residual stream, of the next logit; copying."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import AttentionCall, probe
from ...nn.hooks.thread_hooks import in_this_thread
from ..inputs.ids import IGNORED
from ..interventions.gates import learning
from ..interventions.losses import Reading, logits_in
from .head_matrices import Matrices, Sources, linear_part

COPIED, TOP = 64, 5
"""The most tokens of the text at which copying is measured, and the number of top logits that count as a copy."""

LINEAR = 0.02
"""The largest relative error of a norm's linear form; modules with a larger one are not taken as norms."""

LARGEST = 100_000
"""The most waiting steps in a graph: one in which sums branch without end is given up."""

PASSED = ("View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy")
"""Steps of an autograd graph that keep the values."""


@dataclass(frozen=True)
class HeadWrites:
    """The output of one head through W_O (and a norm after it), on a text. None: not defined for this model.

    Attributes:
        module: qualified name of the attention module.
        layer: index of the attention call in the forward pass, from 0.
        head: index of the query head, from 0.
        norm: the length of its output, mean over the tokens.
        share: the share of its output in the sum over all heads of the layer, by projection on that sum; the shares of
            the heads sum to 1.
        residual: the share of its output in the residual stream at the final norm, by projection on it; None if the
            output does not reach it by addition alone (a norm after each sum, as in the encoders of 2018; the encoder
            of an encoder-decoder; a learned vector on the residual stream).
        logit: its contribution to the logit of the next token, minus the mean of all logits, through the final norm
            at its actual scale and before a softcap (direct logit attribution); None as for `residual`.
        copying: the share of tokens j of the text that have one of the 5 highest logits when the final norm reads
            W_O v_j, the head's output if it attends only to j (Wang et al. 2022, arXiv 2211.00593, who use the
            residual stream after the first MLP at names; here it is the actual value).
        suppressing: the same for the negative, - W_O v_j: high if a head lowers the logits of its keys' tokens.
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
    """The end of a model: its unembedding, the norm before it, and the heads' factors in the residual stream.

    Attributes:
        unembedding: the last module with a matrix that has as many outputs as the model has logits.
        outputs: the number of its outputs.
        norm: the module that made its input; None if that is the residual stream itself.
        factors: layer -> the factor with which its heads' output is added to the residual stream that the norm reads;
            layers that reach it in another way are left out.
        behind: layer -> the norm between its output projection and the residual stream, if there is one.
        scale: the constant factor between its outputs and the model's logits; 1 if a softcap or another function stands
            there, of which the argument is meant then.
    """

    unembedding: str
    outputs: int
    norm: str | None
    factors: dict[int, float]
    behind: dict[int, str]
    scale: float

    @property
    def module_names(self) -> set[str]:
        """The modules whose input is needed."""
        return {self.unembedding, *self.behind.values(), *([] if self.norm is None else [self.norm])}


def ending_of(model: nn.Module, text: Reading) -> Ending | None:
    """Return the end of a model, observed on a short text; None if no module with a matrix makes the logits.

    The factors are read from the autograd graph: from the residual stream back through sums, scalar factors and changes
    of shape only.
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
    written: dict[Any, int] = {}  # steps of the graph; the dict keeps them alive
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
    scale = _added(logits.grad_fn, {last.grad_fn: 0}).get(0, 1.0)
    return Ending(unembedding, last.shape[-1], name, _added(residual.grad_fn, written), behind, scale)


def _added(step: Any, written: dict[Any, int]) -> dict[int, float]:
    """Return layer -> factor, from a step of the autograd graph back to the steps that made the heads' outputs."""
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
    """Return the steps whose results a step of the autograd graph adds, each with its factor."""
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
    if name == "Div" and before[1] is None and step._saved_other.numel() == 1:
        return [(before[0], 1 / float(step._saved_other))]
    return []


@torch.no_grad()
def observed(
    model: nn.Module, ending: Ending | None, text: Reading
) -> tuple[dict[int, tuple[str, Tensor, Tensor]], dict[str, Tensor]]:
    """Return of one run layer -> (module, heads' outputs (H, T, V), values (K, S, V)), and the inputs of the ending."""
    outs: dict[int, tuple[str, Tensor, Tensor]] = {}
    read: dict[str, Tensor] = {}

    def each(call: AttentionCall) -> Tensor:
        out = call.attend()
        assert call.value is not None
        outs[call.order] = call.module, out[0], call.value[0]
        return out

    with ExitStack() as undo:
        undo.enter_context(in_eval_mode_without_grad(model))
        undo.enter_context(probe(model, each))
        for name in () if ending is None else ending.module_names:
            part = model.get_submodule(name)
            keep = in_this_thread(lambda _, x, n=name: read.update({n: x[0]}))
            undo.callback(part.register_forward_pre_hook(keep).remove)
        text.output(model)
    return outs, read


def writes(model: nn.Module, short: Reading, text: Reading, layers: Sequence[Matrices]) -> tuple[HeadWrites, ...]:
    """Return the output records of every head on a text; the end of the model is found on a short text."""
    ending = ending_of(model, short)
    outs, read = observed(model, ending, text)
    with in_eval_mode_without_grad(model):
        final = None if ending is None else Final.of(model, ending, read, text)
        result = []
        for layer in layers:
            factor, linear, size = way(model, ending, layer.layer, layer.output, read)
            out, value = (x.float() for x in outs[layer.layer][1:])
            written = torch.stack([heads @ W for heads, W in zip(out, layer.output @ linear.mT, strict=True)]) * size
            copied = [value[h * len(value) // len(out)] @ W for h, W in enumerate(layer.output @ linear.mT)]
            result += _of_layer(layer, written, copied, factor, final, text)
    return tuple(result)


def way(
    model: nn.Module, ending: Ending | None, layer: int, output: Tensor, read: dict[str, Tensor]
) -> tuple[float | None, Tensor, Tensor]:
    """Return the path of a layer's heads to the residual stream: a factor, a matrix, and a scale (T, 1) of its norm.

    `output` is W_O of the heads, (H, V, M), and `read` has the inputs of the ending.
    """
    width = output.shape[-1]
    eye, one = torch.eye(width, device=output.device), torch.ones(1, 1, device=output.device)
    if ending is None:
        return None, eye, one
    factor = ending.factors.get(layer)
    name = ending.behind.get(layer)
    if factor is None or name is None:
        return factor, eye, one
    frozen = frozen_norm(model.get_submodule(name), read[name])
    return (None, eye, one) if frozen is None else (factor, *frozen)


def frozen_norm(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return A (M, M) and s (T, 1) with norm(x) = s A x + bias at x (1, T, M); None if the module is no norm."""
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
    """Return the records of one call; written is (H, T, M), copied has each head's output per single key, (S, M)."""
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
        residual: (T, M), the input of the final norm.
        towards: (T, M), the derivative of the next token's logit minus the mean logit by the residual stream; None
            without next tokens.
        norm, unembedding: the modules.
    """

    residual: Tensor
    towards: Tensor | None
    norm: nn.Module | None
    unembedding: nn.Module

    @classmethod
    def of(cls, model: nn.Module, ending: Ending, inputs: dict[str, Tensor], text: Reading) -> Final | None:
        """Create it from the inputs of the two modules; None if the outputs are no logits.

        That is if the module before the unembedding is no norm, or the unembedding has no output for a token of the
        text.
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
            towards = ending.scale * size * (_of_logits(unembedding, read, labels) @ linear)
        return cls(x, towards, norm, unembedding)

    def share(self, written: Tensor) -> float:
        """Return the share of the written part, (T, M), in the residual stream."""
        return float((written * self.residual).sum() / self.residual.square().sum())

    def logit(self, written: Tensor) -> float:
        """Return the head's contribution to the next token's logit, mean over the positions that have one."""
        assert self.towards is not None
        counted = self.towards.abs().sum(-1) > 0
        return float((written * self.towards).sum() / counted.sum().clamp(min=1))

    def copying(self, written: Tensor, ids: Tensor) -> tuple[float, float]:
        """Return the share of tokens among the 5 highest logits of the output for their value, and of its negative.

        `written` (S, M) has the head's output for each key alone.
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
            hit = (top == wanted[:, None]).any(-1) & (sign * own > 0)  # if nothing changes, ties are not copies
            shares.append(float(hit.float().mean()))
        return shares[0], shares[1]


def _of_logits(unembedding: nn.Module, read: Tensor, labels: Tensor) -> Tensor:
    """Return the derivative of each label's logit minus the mean logit, (T, M); 0 without a label."""
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
