"""Ablation: the loss without some heads, and the change of the predicted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import probe
from ...nn.hooks.unwrap import unwrap
from ...plan.show.printed import number_table
from ...shapes.arguments import check_functions, shown
from ..inputs.ids import check_told, model_name
from ..views.tables import Tabled
from .gates import WAYS, LayerHead, Survey, counter, gates_of, off, rises, survey
from .losses import Loss, Reading, logits_of, readings, texts_of

if TYPE_CHECKING:
    import rich.table

PLACES, NAMES, BLOCK = 5, 3, 256
"""The most positions in a record, tokens for each of them, and rows whose probabilities are in memory together."""


@dataclass(frozen=True)
class HeadLoss:
    """The loss with only this head off, in nats."""

    layer: int
    head: int
    loss: float


@dataclass(frozen=True)
class TokenChange:
    """A token whose probability changes without the heads: its probability before and after."""

    id: int
    token: str
    before: float
    after: float


@dataclass(frozen=True)
class PlaceChange:
    """A position at which the prediction changes without the heads."""

    text: int  # the index of the text
    position: int  # the index of the token after which the prediction changes
    token: str  # that token
    kl: float  # KL(before || after) of the distribution of the next token, in nats
    tokens: tuple[TokenChange, ...]  # the tokens whose probability changed most


@dataclass(frozen=True)
class Ablation(Tabled):
    """The effect of switching heads off. It prints as a table and converts to JSON.

    Attributes:
        model: the name of the model.
        by: ``"zero"`` or ``"mean"``: the output of a head that is off.
        tokens: the number of tokens read.
        before: the mean loss with all heads on, in nats.
        after: the mean loss with all of `heads` off together, in nats.
        heads: the loss with each head off alone.
        kl: KL(before || after) of the next token, mean over the tokens, in nats; None if the loss is not over words.
        places: the positions with the largest KL.
        measure: ``"loss"``, or ``"drift"``: of an encoder without a head, 1 - cosine of its embeddings.
    """

    model: str
    by: str
    tokens: int
    before: float
    after: float
    heads: tuple[HeadLoss, ...]
    kl: float | None
    places: tuple[PlaceChange, ...]
    measure: str = "loss"

    def table(self) -> rich.table.Table:
        """Return a table of the losses."""
        title = f"{self.model}: heads off by {self.by}, {self.tokens} tokens"
        if self.measure == "drift":
            title += ", drift of the embedding, 1 - cosine"
        moved = (
            "" if self.kl is None else f"; mean KL(original || ablated), of the predictions: {self.kl:.4f} nats/token"
        )
        caption = f"loss and change in nats{moved}" if self.measure == "loss" else None
        table = number_table(title, ("off", self.measure, "change"), caption=caption)
        rows = [("none", self.before), *((f"{x.layer}.{x.head}", x.loss) for x in self.heads)]
        for what, loss in [*rows, *([("all of them", self.after)] if len(self.heads) > 1 else [])]:
            table.add_row(what, f"{loss:.4f}", f"{loss - self.before:+.4f}" if what != "none" else "")
        return table

    def places_table(self) -> rich.table.Table:
        """Return a table of the positions where the next token changed most, with all heads off together."""
        from rich.text import Text

        after, changed = "after token", "next token: before -> after"
        table = number_table("where the next token changed most", (after, "KL", changed), left=(after, changed))
        for place in self.places:
            changes = "  ".join(f"{x.token!r} {x.before:.3f} -> {x.after:.3f}" for x in place.tokens)
            table.add_row(Text(f"{place.position} {place.token!r}"), f"{place.kl:.3f}", Text(changes))
        return table

    @override
    def _tables(self) -> Iterable[rich.table.Table]:
        return (self.table(), self.places_table()) if self.places else (self.table(),)


def ablate(
    model: nn.Module,
    ids: Any,
    heads: Iterable[Sequence[int]],
    *,
    by: str = "zero",
    loss: Loss | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    decode: Callable[[int], str] = str,
    name: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Ablation:
    """Measure the effect of switching heads off: the loss before and after, and the change of the next token.

    Each head is switched off alone, and then all of them together. The model runs in eval mode (dropout off) and is not
    changed.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs, with logits of the next token as
            output.
        ids: One text, (T,) or (1, T); or several, (N, T) or a list of texts.
        heads: Pairs (layer, head), numbered as in `headwise.look.at`.
        by: ``"zero"``: a head that is off outputs 0; ``"mean"``: it outputs its mean over all tokens of all texts.
        loss: ``(output, ids) -> (B,)``, the loss of each row, instead of that of `importance`.
        mask_id: For encoders: the id of the mask token. 15 % of the words are masked and give the loss.
        seed: The seed of the choice of masked words.
        decode: Returns an id as text, for the record.
        name: The name of the model in the record.
        progress: Called as ``progress(done, total)``.

    Raises:
        TypeError: not a model, or ids that are not integers.
        ValueError: a head that does not exist or is named twice; an unknown `by`; ids that do not fit; an encoder
            without `mask_id` or `loss`; no logits.

    Example:
        >>> from headwise.testing.constructed import constructed
        >>> model, jobs = constructed([["previous-token", "self"], ["induction"]])
        >>> lost = ablate(model, [1, 11, 13, 17, 11, 13, 17], [(0, 1), (1, 0)])  # self, induction
        >>> [head.loss > lost.before for head in lost.heads], len(lost.places)
        ([False, True], 5)
    """
    if not isinstance(by, str) or by not in WAYS:
        raise ValueError(f"by is {' or '.join(map(repr, WAYS))}; got {shown(by)}")
    check_told(name, progress)
    check_functions(decode=decode)
    model = unwrap(model)
    texts = readings(model, texts_of(ids), loss=loss, mask_id=mask_id, seed=seed)
    base = survey(model, texts)
    chosen = base.check(heads)
    groups = [[head] for head in chosen] + ([chosen] if len(chosen) > 1 else [])
    step = counter(progress, 1, 1 + len(groups) * len(texts))
    risen = rises(model, texts, base, groups, base.instead(by), step)
    kl, places = _changes(model, texts, base, chosen, by, decode) if texts[0].names_words else (None, ())
    return Ablation(
        model=name or model_name(model),
        by=by,
        tokens=base.tokens,
        before=base.loss,
        after=base.loss + risen[-1],
        heads=tuple(HeadLoss(*head, base.loss + rise) for head, rise in zip(chosen, risen, strict=False)),
        kl=kl,
        places=places,
        measure=texts[0].measure,
    )


def _changes(
    model: nn.Module,
    texts: Sequence[Reading],
    base: Survey,
    heads: Sequence[LayerHead],
    by: str,
    decode: Callable[[int], str],
) -> tuple[float, tuple[PlaceChange, ...]]:
    """Return the mean KL and the positions where it is largest."""
    total, count, places = 0.0, 0, []
    gates = gates_of(base, [heads])
    with in_eval_mode_without_grad(model):
        for number, text in enumerate(texts):
            length = text.labels.shape[1]
            logits = []
            for gated in ({}, gates):  # both through the probe, so that they differ only by the heads
                with probe(model, off(gated, base.instead(by))):
                    logits.append(logits_of(text.output(model), length)[0])
            before, after = logits
            kl = divergence(before, after)
            total, count = total + float(kl.sum()), count + length
            for position in kl.topk(min(PLACES, length)).indices.tolist():
                token = decode(int(text.inputs[-1][0, position]))
                tokens = _tokens(before[position], after[position], decode)
                places.append(PlaceChange(number, position, token, float(kl[position]), tokens))
    return total / count, tuple(sorted(places, key=lambda place: -place.kl)[:PLACES])


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """Return the KL (T,) between the distributions of two sets of logits, (T, vocabulary) each, in nats."""
    rows = []
    for b, a in zip(before.split(BLOCK), after.split(BLOCK), strict=True):
        log_b, log_a = (x.float().log_softmax(-1) for x in (b, a))
        rows.append((log_b.exp() * (log_b - log_a)).nansum(-1).clamp(min=0))
    return torch.cat(rows)


def _tokens(before: Tensor, after: Tensor, decode: Callable[[int], str]) -> tuple[TokenChange, ...]:
    """Return the tokens whose probability changed most, from the logits (vocabulary,)."""
    b, a = (x.float().softmax(-1) for x in (before, after))
    top = (a - b).abs().topk(min(NAMES, len(b))).indices.tolist()
    return tuple(TokenChange(i, decode(i), float(b[i]), float(a[i])) for i in top)
