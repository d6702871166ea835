"""Composition of heads in different layers, from the weights: Q-, K- and V-composition (Elhage et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ...files.text import visible
from ...nn.hooks.unwrap import unwrap
from ...plan.show.printed import number_table
from ...shapes.arguments import check_counts
from ..inputs.ids import check_told, model_name
from ..interventions.losses import SHORT, no_loss, one_text, readings
from ..records.look_data import LookData
from ..views.palette import label
from ..views.tables import Tabled
from .attribution import HeadWrites, writes
from .head_matrices import Matrices, matrices

if TYPE_CHECKING:
    import matplotlib.figure
    import rich.table

KINDS = ("q", "k", "v")


@dataclass(frozen=True)
class Composition:
    """The overlap of one head's output with the input of a later head.

    Attributes:
        kind: ``"q"``, ``"k"`` or ``"v"``: the matrix through which the reader takes its input.
        reader: (layer, head).
        writer: (layer, head), of an earlier layer.
        value: the norm of the product of the two circuits over the product of their norms, 0 to 1.
        null: the chance level: the root mean square of the value over all rotations of the residual stream.
    """

    kind: str
    reader: tuple[int, int]
    writer: tuple[int, int]
    value: float
    null: float


@dataclass(frozen=True)
class Circuits(Tabled):
    """The composition of a model's heads, and their outputs. It prints as two tables and converts to JSON.

    Attributes:
        model: the name of the model.
        compositions: those that exceed chance most, for each kind, strongest first.
        pairs: the number of pairs of heads for each kind.
        heads: the output of each head.
        roles: the role of each head that plays one, by ``"layer.head"``; empty without a look, see `with_roles`.
    """

    model: str
    compositions: tuple[Composition, ...]
    pairs: dict[str, int]
    heads: tuple[HeadWrites, ...]
    roles: Mapping[str, str] = field(default_factory=dict)

    def with_roles(self, look: LookData) -> Circuits:
        """Return the circuits with the role of each head from a look of the same model.

        A head that plays no role but is a sink or attends broadly is named by that.

        Raises:
            TypeError: not a look.
            ValueError: a look of a model with other heads.
        """
        if not isinstance(look, LookData):
            raise TypeError(f"roles come from a look, as headwise.look.at returns it; got {type(look).__name__}")
        here, there = ({(head.layer, head.head) for head in heads} for heads in (self.heads, look.heads))
        if here != there:
            raise ValueError(
                f"the look of {look.model} has {len(there)} heads, and {self.model} has {len(here)} that are not the "
                "same; give a look of the same model"
            )
        names = {f"{head.layer}.{head.head}": head.roles[0].name for head in look.heads if head.roles}
        return replace(self, roles=names)

    def strongest(self, most: int) -> list[Composition]:
        """Return the `most` compositions of each kind that exceed chance most."""
        check_counts(most=most)
        return [one for kind in KINDS for one in [one for one in self.compositions if one.kind == kind][:most]]

    def table(self, most: int = 12) -> rich.table.Table:
        """Return a table of the strongest compositions, at most `most` of each kind, with the heads' roles."""
        check_counts(most=most)
        columns: tuple[str, ...] = ("by", "reader", "writer", "value", "of chance")
        if self.roles:
            columns = ("reader", "role", "reads", "its role", "through", "value", "of chance")
        caption = (
            "Q, K, V: through the reader's queries, keys, values; value: overlap of the weights of both, from 0 to 1;\n"
            "of chance: its multiple of what unrelated weights give"
        )
        title = f"{self.model}: what heads read of earlier ones"
        table = number_table(title, columns, left=("by", "role", "its role"), caption=caption)
        by = {"q": "queries", "k": "keys", "v": "values"}
        for one in self.strongest(most):
            reader, writer = ("{}.{}".format(*place) for place in (one.reader, one.writer))
            numbers = f"{one.value:.3f}", f"{one.value / one.null:.1f} x"
            if self.roles:
                names = [visible(label(self.roles.get(head, "-")), limit=40) for head in (reader, writer)]
                table.add_row(reader, names[0], writer, names[1], one.kind.upper(), *numbers)
            else:
                table.add_row(by[one.kind], reader, writer, *numbers)
        return table

    def plot_circuits(self, most: int = 12) -> matplotlib.figure.Figure:
        """Return a graph of the strongest compositions, at most `most` of each kind: layers from left to right.

        Raises:
            MissingExtra: Matplotlib is not installed.
        """
        from ..views.graph import graph

        check_counts(most=most)
        edges = [(one.kind, one.reader, one.writer, one.value / one.null) for one in self.strongest(most)]
        return graph(
            edges,
            {head: label(name) for head, name in self.roles.items()},
            f"{self.model}: heads that read earlier ones",
        )

    def heads_table(self, most: int | None = None) -> rich.table.Table:
        """Return a table of the heads' outputs; a dash if a number is not defined.

        Args:
            most: How many heads the table has at most, those that write the most; all heads by default.
        """
        if most is not None:
            check_counts(1, most=most)
        largest = sorted(self.heads, key=lambda head: -(head.norm or 0.0))[:most]
        names = ("norm", "share", "residual", "logit", "copying", "suppressing")
        caption = (
            "norm: mean length of what a head writes; share: its part of the layer's output;\n"
            "residual: its part of the final residual; logit: what it adds to that of the next token;\n"
            "copying, suppressing: how often a token is among the 5 that its value raises, or lowers, most"
        )
        table = number_table(f"{self.model}: what heads write", ("layer", "head", *names), caption=caption)
        for head in self.heads if most is None or len(self.heads) <= most else largest:
            numbers = [getattr(head, name) for name in names]
            table.add_row(str(head.layer), str(head.head), *("-" if x is None else f"{x:.3f}" for x in numbers))
        return table

    @override
    def _tables(self) -> Iterable[rich.table.Table]:
        return self.table(), self.heads_table()


def circuits(
    model: nn.Module,
    ids: Any,
    *,
    most: int = 50,
    name: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Circuits:
    r"""Measure the composition of heads from the weights, and the output of each head to the residual stream on a text.

    With $W_{QK} = W_Q^T W_K$ and $W_{OV} = W_O W_V$ of a head, and those of an earlier head as writer,

    $$\text{Q: } \frac{\lVert W_{QK}^T W_{OV} \rVert}{\lVert W_{QK} \rVert \lVert W_{OV} \rVert} \quad
    \text{K: } \frac{\lVert W_{QK} W_{OV} \rVert}{\lVert W_{QK} \rVert \lVert W_{OV} \rVert} \quad
    \text{V: } \frac{\lVert W_{OV}' W_{OV} \rVert}{\lVert W_{OV}' \rVert \lVert W_{OV} \rVert}$$

    in Frobenius norms (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"). Chance is
    $1 / \sqrt{d_{\text{model}}}$: the root mean square of each over all rotations of the residual stream between the
    two heads, for any spectra.

    The matrices are measured on the running model, at the last of the first 8 tokens: with a norm on queries, keys or
    latents they are the derivative there, without the direction of the normalized vector itself. The norm before an
    attention module is folded in, with its weight and the subtraction of the mean; norms after the output projection
    are not. The output of each head is measured on the whole text: see `HeadWrites`.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs.
        ids: One text, (T,) or (1, T).
        most: The number of compositions of each kind that are kept.
        name: The name of the model in the record.
        progress: Called as ``progress(done, total)`` after each layer.

    Raises:
        TypeError: not a model, or ids that are not integers.
        ValueError: several texts, fewer than 3 tokens, ids that do not fit; or no module takes the concatenated heads.

    Example:
        >>> import headwise
        >>> model = nn.Sequential(nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3), nn.Linear(12, 97))
        >>> read = circuits(model, [1, 2, 3, 5, 8, 13, 21, 34])
        >>> len(read.heads), read.compositions  # one layer: no head reads another
        (3, ())
    """
    check_counts(most=most)
    check_told(name, progress)
    model = unwrap(model)
    whole = one_text(ids, 3, "circuits are measured")
    short, text = readings(model, [whole[:SHORT], whole], loss=no_loss, mask_id=None, seed=0)
    layers = matrices(model, short)
    tell = progress or (lambda done, total: None)
    kept: dict[str, list[Composition]] = {kind: [] for kind in KINDS}
    pairs = dict.fromkeys(KINDS, 0)
    for number, reader in enumerate(layers):
        for writer in layers[:number]:
            for kind, values in compositions(reader, writer).items():
                pairs[kind] += values.numel()
                kept[kind] = _strongest([*kept[kind], *_records(kind, reader, writer, values, most)], most)
        tell(number + 1, len(layers))
    return Circuits(
        model=name or model_name(model),
        compositions=tuple(one for kind in KINDS for one in kept[kind]),
        pairs=pairs,
        heads=writes(model, short, text, layers),
    )


@torch.no_grad()
def compositions(reader: Matrices, writer: Matrices) -> dict[str, Tensor]:
    """Return the compositions by kind, each (heads of the reader, heads of the writer).

    Only kinds whose input is the writer's residual stream are included. No M x M matrix is stored:
    || A^T C B ||^2 = tr(C^T (A A^T) C (B B^T)), for A (D, M), C (D, V), B (V, M).
    """
    T, S = reader.lengths
    result = {}
    of_value, of_output = gram(writer.value), gram(writer.output)
    ov = (of_value * of_output).sum((-2, -1)).clamp(min=0).sqrt()
    for kind, length, inner, outer in (
        ("q", T, reader.query, reader.key),
        ("k", S, reader.key, reader.query),
        ("v", S, reader.value, reader.output),
    ):
        if length != writer.lengths[0] or inner.shape[-1] != writer.output.shape[-1]:
            continue
        of_outer = gram(outer)
        own = (gram(inner) * of_outer).sum((-2, -1)).clamp(min=0).sqrt()
        core = torch.einsum("hdm,gvm->hgdv", inner, writer.output)
        product = torch.einsum("hgdv,hde,hgew,gwv->hg", core, of_outer, core, of_value).clamp(min=0).sqrt()
        scale = own[:, None] * ov
        result[kind] = torch.where(scale > 0, product / scale.clamp(min=torch.finfo(scale.dtype).tiny), 0.0)
    return result


def gram(matrix: Tensor) -> Tensor:
    """Return the products of all pairs of rows, (H, n, n) from (H, n, M)."""
    return matrix @ matrix.mT


def _records(kind: str, reader: Matrices, writer: Matrices, values: Tensor, most: int) -> list[Composition]:
    """Return the records of the largest values."""
    null = writer.output.shape[-1] ** -0.5
    top = values.flatten().topk(min(most, values.numel()))
    places = [(n // values.shape[1], n % values.shape[1]) for n in top.indices.tolist()]
    return [
        Composition(kind, (reader.layer, r), (writer.layer, w), value, null)
        for (r, w), value in zip(places, top.values.tolist(), strict=True)
    ]


def _strongest(candidates: Sequence[Composition], most: int) -> list[Composition]:
    return sorted(candidates, key=lambda one: (-one.value / one.null, one.reader, one.writer))[:most]
