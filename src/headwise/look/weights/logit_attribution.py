"""Direct logit attribution: what each head adds to the difference of two logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.unwrap import unwrap
from ...plan.show.printed import number_table
from ...shapes.arguments import check_counts, check_functions
from ..inputs.ids import as_row, check_told, model_name
from ..interventions.gates import learning
from ..interventions.losses import SHORT, no_loss, readings
from ..views.tables import Tabled
from .attribution import Ending, ending_of, frozen_norm, observed, way
from .head_matrices import output_projection, written_by

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class HeadLogit:
    """What one head adds to the difference of the two logits; None if it reaches them through a later norm only."""

    layer: int
    head: int
    effect: float | None


@dataclass(frozen=True)
class Attribution(Tabled):
    """The direct effect of each head on the difference of two logits. It prints as a table and converts to JSON.

    Attributes:
        model: the name of the model.
        answer, wrong: the two tokens.
        tokens: the tokens of the text.
        difference: the logit of `answer` minus that of `wrong` after the last token; before the softcap, if the model
            has one.
        heads: one record per head, in the order of the forward pass.
        rest: the part of everything else: embeddings, MLPs, biases, and heads without an effect of their own. The
            heads' effects and `rest` sum to `difference`.
    """

    model: str
    answer: str
    wrong: str
    tokens: tuple[str, ...]
    difference: float
    heads: tuple[HeadLogit, ...]
    rest: float

    def table(self, most: int = 20) -> rich.table.Table:
        """Return a table of the `most` heads with the largest effects, of either sign."""
        check_counts(most=most)
        direct = sorted((one for one in self.heads if one.effect is not None), key=lambda one: -abs(one.effect or 0.0))
        rest = f", {most} of {len(direct)} heads" if most < len(direct) else ""
        title = f"{self.model}: direct logit of {self.answer!r} minus {self.wrong!r}{rest}"
        heads = sum(one.effect or 0.0 for one in direct)
        caption = f"in logits: all heads {heads:+.3f}, all else {self.rest:+.3f}, together {self.difference:+.3f}"
        table = number_table(title, ("layer", "head", "effect"), caption=caption)
        for one in direct[:most]:
            table.add_row(str(one.layer), str(one.head), f"{one.effect:+.3f}")
        return table


def attribute(
    model: nn.Module,
    ids: Any,
    answer: int,
    wrong: int,
    *,
    decode: Callable[[int], str] = str,
    name: str | None = None,
) -> Attribution:
    r"""Measure what each head adds directly to the difference of two logits after a text.

    $$\text{effect}_h = \langle W_O a_h, \; \tfrac{1}{\sigma} A^T (u_\text{answer} - u_\text{wrong}) \rangle$$

    at the last token: $a_h$ is the head's output, $u$ the rows of the unembedding, $A$ the linear part of the final
    norm, and $\sigma$ its scale at the actual residual stream (direct logit attribution: Elhage et al. 2021; Wang et
    al. 2022, arXiv 2211.00593). What later layers make of the head's output is not in it: `patch` measures that.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs.
        ids: One text, (T,) or (1, T).
        answer: The id whose logit counts positively.
        wrong: The id whose logit is subtracted.
        decode: Returns an id as text, for the record.
        name: The name of the model in the record.

    Raises:
        TypeError: not a model, or ids that are not integers.
        ValueError: ids that do not fit; no head reaches logits by addition through one norm; no logits for `answer`
            or `wrong`; or no module takes the concatenated heads.

    Example:
        >>> import headwise
        >>> class Reader(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.attend = nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3)
        ...         self.unembed = nn.Linear(12, 97)
        ...     def forward(self, ids):
        ...         x = self.embed(ids)
        ...         return self.unembed(x + self.attend(x, mask=headwise.causal()))
        >>> found = attribute(Reader(), [1, 2, 3, 5, 8], answer=13, wrong=21)
        >>> round(sum(head.effect for head in found.heads) + found.rest - found.difference, 4)
        0.0
    """
    check_counts(answer=answer, wrong=wrong)
    check_functions(decode=decode)
    check_told(name, None)
    model = unwrap(model)
    row = as_row(ids)
    short, text = readings(model, [row[:SHORT], row], loss=no_loss, mask_id=None, seed=0)
    ending = ending_of(model, short)
    if ending is None or not ending.factors or max(answer, wrong) >= ending.outputs:
        raise ValueError(
            f"direct attribution needs heads that reach the logits of ids {answer} and {wrong} by addition and through "
            f"one norm at most, and {type(model).__name__} has none (no language-modelling head with these ids, or a "
            "norm after each sum); headwise.look.patch measures any model"
        )
    with learning(model):
        names = output_projections(model, short.output)
    outs, read = observed(model, ending, text)
    with in_eval_mode_without_grad(model):
        towards, difference = _direction(model, ending, read, answer, wrong)
        heads: list[HeadLogit] = []
        for layer, (module, out, _) in outs.items():
            part = output_projection(model, names, module, "; headwise.look.patch measures any model")
            W = written_by(part, len(out), out.shape[2], out)
            factor, linear, size = way(model, ending, layer, W, read)
            written = torch.einsum("hv,hvm->hm", out[:, -1].float(), W) @ linear.mT * size[-1]
            effects = [None] * len(out) if factor is None else (factor * (written @ towards)).tolist()
            heads += [HeadLogit(layer, head, effect) for head, effect in enumerate(effects)]
    return Attribution(
        model=name or model_name(model),
        answer=decode(answer),
        wrong=decode(wrong),
        tokens=tuple(map(decode, row)),
        difference=difference,
        heads=tuple(heads),
        rest=difference - sum(one.effect or 0.0 for one in heads),
    )


def _direction(
    model: nn.Module, ending: Ending, read: dict[str, Tensor], answer: int, wrong: int
) -> tuple[Tensor, float]:
    """Return the derivative (M,) of the logit difference by the residual stream at a frozen norm; and the difference.

    Raises:
        ValueError: the module before the unembedding is no norm.
    """
    unembedding = model.get_submodule(ending.unembedding)
    with torch.enable_grad():
        leaf = read[ending.unembedding][:, -1:].detach().requires_grad_()
        logits = unembedding(leaf)[0, -1].float()
        difference = ending.scale * (logits[answer] - logits[wrong])
        [grad] = torch.autograd.grad(difference, leaf)
    towards = grad[0, -1].float()
    if ending.norm is not None:
        frozen = frozen_norm(model.get_submodule(ending.norm), read[ending.norm])
        if frozen is None:
            raise ValueError(
                f"module {ending.norm!r}, whose output the unembedding reads, is no norm, so heads have no direct "
                "effect on the logits; headwise.look.patch measures any model"
            )
        linear, size = frozen
        towards = size[-1] * (towards @ linear)
    return towards, float(difference.detach())
