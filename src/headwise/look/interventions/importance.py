"""Importance of heads: four criteria, all computed through the probe, and their agreement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.probe import AttentionCall
from ...nn.hooks.unwrap import unwrap
from ...plan.show.printed import number_table
from ...shapes.arguments import check_counts, check_texts, shown
from ..beside import all_readings
from ..inputs.ids import check_told, model_name
from ..records.head import by_layer
from ..views.tables import Tabled
from .gates import Survey, counter, learning, rises, survey
from .gradients import gradients, spearman
from .losses import Loss, Reading

if TYPE_CHECKING:
    import rich.table
CRITERIA = ("gradient", "zero", "mean", "contribution")
"""The criteria of `importance`, in the order of its records."""


@dataclass(frozen=True)
class HeadImportance:
    """The importance of one head by each criterion; None if it was not measured.

    Attributes:
        module: qualified name of the attention module.
        call: the number of earlier calls of that module in the same forward pass (0 unless layers share it).
        layer: index of the attention call in the forward pass, from 0.
        head: index of the query head, from 0.
        group: index of its key-value head.
        gradient: |dL / dxi| of a gate xi on the head, mean over the texts, divided by the l2 norm of its layer.
        gradient_raw: the same without the division.
        zero: the rise of the loss when the head outputs 0, in nats.
        mean: the rise of the loss when the head outputs its mean, in nats.
        contribution: norm of the output of its key-value group after the output projection, mean over tokens.
    """

    module: str
    call: int
    layer: int
    head: int
    group: int
    gradient: float | None = None
    gradient_raw: float | None = None
    zero: float | None = None
    mean: float | None = None
    contribution: float | None = None


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlation of two criteria over all heads; None if one of them is constant."""

    first: str
    second: str
    rho: float | None


@dataclass(frozen=True)
class Importance(Tabled):
    """The importance of each head of a model. It prints as a table and converts to JSON.

    Attributes:
        model: the name of the model.
        texts: the number of texts.
        tokens: the number of their tokens.
        loss: the mean loss of the texts with all heads on, in nats.
        by: the criteria that were measured.
        heads: one record per head, in the order of the forward pass.
        agreements: the rank correlation of each pair of criteria.
        seconds: the duration of the measurement.
        stability: Spearman's rank correlation of ``gradient`` between the two halves of the texts (of one text: of its
            tokens); None if it was not measured. Under 0.5 another text would rank the heads differently.
        measure: ``"loss"``, or ``"drift"``: of an encoder without a head, 1 - cosine of its embeddings.
    """

    model: str
    texts: int
    tokens: int
    loss: float
    by: tuple[str, ...]
    heads: tuple[HeadImportance, ...]
    agreements: tuple[Agreement, ...]
    seconds: float
    stability: float | None = None
    measure: str = "loss"

    def scores(self, by: str) -> list[list[float]]:
        """Return one criterion as ``[layer][head]``, for example for a pruner.

        Raises:
            TypeError: `by` is not a string.
            ValueError: the criterion was not measured.
        """
        check_texts(by=by)
        if by not in self.by and not (by == "gradient_raw" and "gradient" in self.by):
            raise ValueError(f"measured were {', '.join(self.by)}; got {shown(by)}; name it in by=")
        return [[getattr(head, by) for head in heads] for heads in by_layer(self.heads).values()]

    def table(self, most: int = 40, by: str | None = None) -> rich.table.Table:
        """Return a table of the `most` most important heads by a criterion (the first by default).

        ``"gradient"`` is divided by the norm of its layer, so it ranks the heads within a layer only: the table is then
        sorted by ``gradient_raw``, the change of the loss, which compares across layers.
        """
        check_counts(most=most)
        by = self.by[0] if by is None else by
        self.scores(by)
        sorted_by = "gradient_raw" if by == "gradient" else by
        top = sorted(self.heads, key=lambda head: -float(getattr(head, sorted_by)))[:most]
        rest = f", {len(top)} of {len(self.heads)} heads" if len(top) < len(self.heads) else ""
        pairs = ", ".join(f"{a.first} and {a.second} {a.rho:.2f}" for a in self.agreements if a.rho is not None)
        lines = [f"rank correlation between criteria: {pairs}"] if pairs else []
        if self.stability is not None:
            lines.append(f"rank correlation of gradient between two halves of the text: {self.stability:.2f}")
        caption = "\n".join(lines) or None
        what = f"loss {self.loss:.3f}" if self.measure == "loss" else "drift of the embedding, 1 - cosine,"
        title = f"{self.model}: {what} on {self.tokens} tokens, sorted by {sorted_by}{rest}"
        columns = [name for one in self.by for name in ([one, "gradient_raw"] if one == "gradient" else [one])]
        table = number_table(title, ("layer", "head", *columns), caption=caption)
        for head in top:
            table.add_row(str(head.layer), str(head.head), *(f"{getattr(head, name):.4f}" for name in columns))
        return table


def importance(
    model: nn.Module,
    ids: Any,
    *,
    by: str | Sequence[str] = ("gradient",),
    loss: Loss | None = None,
    mask_id: int | None = None,
    seed: int = 0,
    name: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Importance:
    r"""Return the importance of each attention head of a model for the loss on some texts.

    - ``"gradient"``: $I_h = E_x |\partial L(x) / \partial \xi_h|$ at $\xi = 1$, a gate on the head's output: the
      first-order effect of the head on the loss, without its removal. One backward pass per text covers all heads. The
      absolute value is taken per text, before the mean; divided by the l2 norm of the layer (Michel et al. 2019, arXiv
      1905.10650).
    - ``"zero"``, ``"mean"``: the loss without the head minus the loss with it; the head then outputs 0, or its mean
      over all tokens of all texts, which keeps its constant part. Many heads run side by side as rows of a batch.
    - ``"contribution"``: $\lVert W_O^{(g)} a_g \rVert_2$ of each key-value group, mean over tokens: the output of the
      group (Puzzletron takes the sum over tokens, which gives the same ranking). All heads of a group have its number.

    The model runs in eval mode (dropout off) and is not changed; no gradient remains on its weights.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs, with logits of the next token as
            output.
        ids: One text, (T,) or (1, T); or several, (N, T) or a list of texts. Or a processor's output for a picture, a
            sound, or two texts: a mapping of tensors by name. The loss of a decoder is then on its text; that of a
            classifier is the cross entropy with the prediction of the unchanged model.
        by: One or more of the criteria.
        loss: ``(output, ids) -> (B,)``, the loss of each row. The default is cross entropy with the next token; for a
            classifier, cross entropy with its own predicted classes; for an encoder without a head, the drift of its
            embedding, 1 - cosine of the mean-pooled states (with the gradients of the embedding at length 1).
        mask_id: For encoders: the id of the mask token. 15 % of the words are masked and give the loss.
        seed: The seed of the choice of masked words.
        name: The name of the model in the record.
        progress: Called as ``progress(done, total)``.

    Raises:
        TypeError: not a model, or ids that are not integers.
        ValueError: an unknown criterion; ids that do not fit; an encoder of words without `mask_id` or `loss`; no
            logits; or ``"contribution"`` if no module takes the concatenated heads as input.

    Example:
        >>> from headwise.testing.constructed import constructed
        >>> model, jobs = constructed([["previous-token", "self"], ["induction"]])
        >>> found = importance(model, [1, 11, 13, 17, 11, 13, 17], by=("gradient", "zero"))
        >>> [jobs[head.layer, head.head] for head in found.heads if head.zero > 0.1], found.by
        (['previous-token', 'induction'], ('gradient', 'zero'))
    """
    started = time.perf_counter()
    names = _criteria(by)
    check_told(name, progress)
    model = unwrap(model)
    texts = all_readings(model, ids, loss=loss, mask_id=mask_id, seed=seed)
    base, columns, stability = _measured(model, texts, names, progress)
    return Importance(
        model=name or model_name(model),
        texts=len(texts),
        tokens=base.tokens,
        loss=base.loss,
        by=names,
        heads=tuple(
            HeadImportance(
                site.module,
                site.call,
                site.layer,
                head,
                head * site.num_kv_heads // site.num_heads,
                **{column: values[site.layer][head] for column, values in columns.items()},
            )
            for site in base.sites
            for head in range(site.num_heads)
        ),
        agreements=agreements({name: [x for row in columns[name] for x in row] for name in names}),
        seconds=round(time.perf_counter() - started, 3),
        stability=stability,
        measure=texts[0].measure,
    )


def _criteria(by: str | Sequence[str]) -> tuple[str, ...]:
    """Return the criteria in their fixed order; raise ValueError for an unknown one."""
    wanted: list[object] = [by] if isinstance(by, str) else [*by] if isinstance(by, (Sequence, Set)) else []
    unknown = [name for name in wanted if not isinstance(name, str) or name not in CRITERIA]
    if unknown or not wanted:
        raise ValueError(f"by names criteria among {', '.join(CRITERIA)}; got {shown(by)}")
    return tuple(name for name in CRITERIA if name in wanted)


Columns = dict[str, list[list[float]]]


def _measured(
    model: nn.Module, texts: Sequence[Reading], names: Sequence[str], progress: Callable[[int, int], object] | None
) -> tuple[Survey, Columns, float | None]:
    """Return the survey, for each criterion its values as ``[layer][head]``, and the stability of ``gradient``."""
    columns: Columns = {}
    stability = None
    contributions = Contributions.of(model, texts[0]) if "contribution" in names else None
    base = survey(model, texts, contributions)
    if contributions is not None:
        columns["contribution"] = [contributions.mean(site.layer, site.num_heads, base) for site in base.sites]
    ablations = [name for name in names if name in ("zero", "mean")]
    step = counter(progress, 1, 1 + ("gradient" in names) + len(base.heads) * len(ablations) * len(texts))
    if "gradient" in names:
        raw, normalised, stability = gradients(model, texts, base)
        columns |= {"gradient": normalised, "gradient_raw": raw}
        step(1)
    for name in ablations:
        risen = iter(rises(model, texts, base, [[head] for head in base.heads], base.instead(name), step))
        columns[name] = [[next(risen) for _ in range(site.num_heads)] for site in base.sites]
    return base, columns, stability


@dataclass(eq=False)
class Contributions:
    """The sums of the norms of each key-value group's output after its output projection."""

    projections: dict[str, nn.Module]
    sums: dict[int, Tensor]

    @classmethod
    def of(cls, model: nn.Module, text: Reading) -> Contributions:
        """Create the sums for a model; one forward pass on a text finds its output projections."""
        with learning(model):
            names = output_projections(model, text.output)
        return cls({module: model.get_submodule(name) for module, name in names.items()}, {})

    def __call__(self, call: AttentionCall, heads: Tensor) -> None:
        """Add one call, with its output (1, H, T, V)."""
        projection = self.projections.get(call.module)
        if projection is None:
            raise ValueError(
                f"by='contribution' needs the module that reads the heads of {call.module!r} side by side, and there "
                "is none (a gate or a norm stands between); take another criterion"
            )
        groups = call.key.shape[1]
        nothing = projection(torch.zeros_like(heads[0, :, :1].transpose(0, 1).flatten(1)))
        norms = []
        for group in range(groups):
            alone = torch.zeros_like(heads[0]).unflatten(0, (groups, -1))
            alone[group] = heads[0].unflatten(0, (groups, -1))[group]
            written = projection(alone.flatten(0, 1).transpose(0, 1).flatten(1)) - nothing
            norms.append(written.float().norm(dim=-1).sum().cpu())
        self.sums[call.order] = self.sums.get(call.order, torch.zeros(groups, device="cpu")) + torch.stack(norms)

    def mean(self, layer: int, heads: int, base: Survey) -> list[float]:
        """Return for each head the norm of its group, as the mean over the tokens."""
        groups = (self.sums[layer] / base.rows[layer]).tolist()
        return [groups[head * len(groups) // heads] for head in range(heads)]


def agreements(columns: dict[str, list[float]]) -> tuple[Agreement, ...]:
    """Return Spearman's rank correlation of each pair of columns."""
    names = [*columns]
    return tuple(
        Agreement(first, second, spearman(columns[first], columns[second]))
        for n, first in enumerate(names)
        for second in names[n + 1 :]
    )
