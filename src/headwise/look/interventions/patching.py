"""Activation patching: a head's output on one text takes the place of its output on another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...nn.hooks.unwrap import unwrap
from ...plan.show.printed import number_table
from ...shapes import describe
from ...shapes.arguments import check_counts, check_flags, check_functions, shown
from ..inputs.ids import as_row, check_told, model_name
from ..views.tables import Tabled
from .gates import Place, counter, rises, survey
from .losses import Loss, logits_in, readings

if TYPE_CHECKING:
    import matplotlib.figure
    import rich.table

MOST_ROWS = 32
"""The most heads in a heatmap by position: those with the largest effects."""


@dataclass(frozen=True)
class LogitDifference:
    """The logit of one token minus that of another, at one position: a metric of `patch`.

    Attributes:
        answer: The id whose logit counts positively.
        wrong: The id whose logit is subtracted.
        position: The position in the text; -1 is the last, whose logits predict what follows the text.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 2.0, 5.0]]])
        >>> LogitDifference(answer=2, wrong=0)(logits, torch.tensor([[7, 11]]))
        tensor([4.])
    """

    answer: int
    wrong: int
    position: int = -1

    def __call__(self, output: Any, ids: Tensor) -> Tensor:
        """Return the difference for each row of a model's output, (B,).

        Raises:
            ValueError: there are no logits (B, T, vocabulary) with these ids and this position.
        """
        logits = logits_in(output)
        fits = isinstance(logits, Tensor) and logits.ndim == 3 and logits.is_floating_point()
        if not fits or not 0 <= min(self.answer, self.wrong) <= max(self.answer, self.wrong) < logits.shape[2]:
            got = describe(logits) if isinstance(logits, Tensor) else type(output).__name__
            raise ValueError(
                f"a difference of the logits of ids {self.answer} and {self.wrong} needs logits (B, T, vocabulary) "
                f"that have both; the model gave {got}; load it with its language-modelling head, or give a metric of "
                "your own, (output, ids) -> (B,)"
            )
        if not -logits.shape[1] <= self.position < logits.shape[1]:
            raise ValueError(f"position {self.position} is not among the {logits.shape[1]} positions of the logits")
        at = logits[:, self.position].float()
        return at[:, self.answer] - at[:, self.wrong]


@dataclass(frozen=True)
class HeadPatch:
    """The effect of one head's output on the clean text, put into the run on the corrupted text.

    Attributes:
        layer, head: the head.
        position: the only query position at which it was replaced; None for all of them.
        effect: the share of the metric's difference that it restores: 0 = as corrupted, 1 = as clean.
    """

    layer: int
    head: int
    position: int | None
    effect: float


@dataclass(frozen=True)
class Patching(Tabled):
    """The effect of patching each head. It prints as a table and converts to JSON.

    Attributes:
        model: the name of the model.
        metric: the metric in words.
        clean: the metric on the clean text.
        corrupted: the metric on the corrupted text.
        clean_tokens, corrupted_tokens: the tokens of the two texts.
        heads: one record per head, or per head and position, in the order of the forward pass.
    """

    model: str
    metric: str
    clean: float
    corrupted: float
    clean_tokens: tuple[str, ...]
    corrupted_tokens: tuple[str, ...]
    heads: tuple[HeadPatch, ...]

    @property
    def by_position(self) -> bool:
        """True if each position of each head was patched alone."""
        return self.heads[0].position is not None

    def best(self, most: int) -> list[HeadPatch]:
        """Return the `most` records with the largest effects, of either sign."""
        check_counts(most=most)
        return sorted(self.heads, key=lambda one: -abs(one.effect))[:most]

    def table(self, most: int = 20) -> rich.table.Table:
        """Return a table of the `most` heads with the largest effects, of either sign."""
        from rich.text import Text

        top = self.best(most)
        rest = f", {len(top)} of {len(self.heads):,} patches" if len(top) < len(self.heads) else ""
        title = f"{self.model}: {self.metric}{rest}"
        caption = f"effect: 0 = as corrupted ({self.corrupted:.3f}), 1 = as clean ({self.clean:.3f})"
        where = ("position", "clean", "corrupted") if self.by_position else ()
        columns = ("layer", "head", *where, "effect")
        table = number_table(title, columns, left=("clean", "corrupted"), caption=caption)
        for one in top:
            place: list[str | Text] = []
            if one.position is not None:
                texts = (self.clean_tokens, self.corrupted_tokens)
                tokens = [repr(text[one.position]) if one.position < len(text) else "" for text in texts]
                place = [str(one.position), *map(Text, tokens)]
            table.add_row(str(one.layer), str(one.head), *place, f"{one.effect:+.3f}")
        return table

    def plot_patching(self) -> matplotlib.figure.Figure:
        """Return a heatmap: layers by heads; or, by position, the heads with the largest effects by positions.

        Raises:
            MissingExtra: Matplotlib is not installed.
        """
        from ..views.heatmap import heatmap

        title = self.model, self.metric, f"{self.clean:.3f} clean, {self.corrupted:.3f} corrupted"
        label = "effect: 0 as corrupted, 1 as clean"
        if not self.by_position:
            cells = {(one.layer, one.head): one.effect for one in self.heads}
            rows, columns = (list(map(str, range(1 + max(place[axis] for place in cells)))) for axis in (0, 1))
            return heatmap(cells, rows, columns, axes=("layer", "head"), title=title, label=label)
        best = list(dict.fromkeys((one.layer, one.head) for one in self.best(len(self.heads))))[:MOST_ROWS]
        row = {head: n for n, head in enumerate(sorted(best))}
        kept = [one for one in self.heads if (one.layer, one.head) in row]
        cells = {(row[one.layer, one.head], one.position or 0): one.effect for one in kept}
        pairs = list(zip(self.clean_tokens, self.corrupted_tokens, strict=True))
        names = [clean if clean == corrupted else f"{clean} | {corrupted}" for clean, corrupted in pairs]
        names += [""] * (1 + max(column for _, column in cells) - len(names))  # a decoder with a start token of its own
        heads = ["{}.{}".format(*head) for head in row]
        axes = ("layer.head", "position: clean | corrupted where they differ")
        return heatmap(cells, heads, names, axes=axes, title=title, label=label)


def patch(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Loss,
    *,
    heads: Iterable[Sequence[int]] | None = None,
    positions: bool = False,
    decode: Callable[[int], str] = str,
    name: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Patching:
    r"""Measure which heads carry the difference between two texts, by activation patching.

    The model reads the corrupted text, and one head's output (before $W_O$) is replaced by its output on the clean
    text. The effect is the share of the metric's difference that this restores,

    $$\frac{m_\text{patched} - m_\text{corrupted}}{m_\text{clean} - m_\text{corrupted}}$$

    so 0 = as corrupted and 1 = as clean (Vig et al. 2020, arXiv 2004.12265; Wang et al. 2022, arXiv 2211.00593). The
    two texts in exchanged roles give the other direction: which heads break the clean text. The model runs in eval mode
    and is not changed; many heads run side by side as rows of a batch.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs.
        clean: One text, (T,) or (1, T).
        corrupted: A text of as many tokens.
        metric: ``(output, ids) -> (B,)``, a number for each row: `LogitDifference`, or a function of your own.
        heads: Pairs (layer, head), numbered as in `headwise.look.at`; the default is all heads.
        positions: Patch each query position of each head alone: T times as many runs.
        decode: Returns an id as text, for the record.
        name: The name of the model in the record.
        progress: Called as ``progress(done, total)``.

    Raises:
        TypeError: not a model, ids that are not integers, or a metric that is not a function.
        ValueError: texts of different lengths; ids that do not fit; a head that does not exist or is named twice; a
            metric that gives both texts the same number, or not one number for each row.

    Example:
        >>> from headwise.testing.constructed import constructed
        >>> model, jobs = constructed([["previous-token", "self"], ["induction"]])
        >>> clean, corrupted = [1, 11, 13, 17, 11], [1, 11, 19, 17, 11]  # after 11 comes 13, or 19
        >>> found = patch(model, clean, corrupted, LogitDifference(13, 19))
        >>> {jobs[head.layer, head.head]: round(head.effect, 2) for head in found.heads}
        {'previous-token': 0.0, 'self': 0.0, 'induction': 1.0}
    """
    check_functions(metric=metric, decode=decode)
    check_flags(positions=positions)
    check_told(name, progress)
    model = unwrap(model)
    rows = [as_row(clean), as_row(corrupted)]
    if len(rows[0]) != len(rows[1]):
        raise ValueError(
            "patching puts each position of the clean text into the same position of the corrupted one, so both have "
            f"as many tokens; got {len(rows[0])} and {len(rows[1])}; replace words by words with the same token count"
        )
    last = isinstance(metric, LogitDifference) and metric.position == -1
    texts = [replace(text, last=last) for text in readings(model, rows, loss=metric, mask_id=None, seed=0)]
    outputs: dict[int, Tensor] = {}
    healthy = survey(model, [texts[0]], lambda call, out: outputs.update({call.order: out[0]}))
    base = survey(model, [texts[1]])
    gap = healthy.loss - base.loss
    if gap == 0:
        raise ValueError(
            f"the metric is {base.loss:.6g} on both texts, so there is no difference to restore; give texts that "
            "differ in what it measures"
        )
    chosen: list[Place] = [*(base.heads if heads is None else base.check(heads))]
    if positions:
        chosen = [(*head, position) for head in chosen for position in range(base.rows[head[0]])]
    step = counter(progress, 2, 2 + len(chosen))
    risen = rises(model, [texts[1]], base, [[place] for place in chosen], outputs.__getitem__, step)
    heads_patched = (
        HeadPatch(place[0], place[1], place[2] if positions else None, rise / gap)
        for place, rise in zip(chosen, risen, strict=True)
    )
    tokens = [tuple(map(decode, row)) for row in rows]
    told = name or model_name(model), _words(metric, decode)
    return Patching(*told, healthy.loss, base.loss, tokens[0], tokens[1], tuple(heads_patched))


def _words(metric: Loss, decode: Callable[[int], str]) -> str:
    """Return a metric in words."""
    if isinstance(metric, LogitDifference):
        return f"logit of {decode(metric.answer)!r} minus {decode(metric.wrong)!r}"
    return str(getattr(metric, "__name__", shown(metric)))
