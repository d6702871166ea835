"""Norm-weighted attention: each weight times the length of what the head would write from its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.probe import AttentionCall, probe
from ...nn.hooks.unwrap import unwrap
from ...ops.attention import attention
from ...ops.statistics.weights import weights
from ...plan.show.printed import number_table
from ...shapes.arguments import check_counts, check_texts, shown
from ..collect.moved import lengths
from ..inputs.ids import as_row, check_told, model_name
from ..interventions.gates import learning
from ..interventions.losses import SHORT, no_loss, readings
from ..records.head import by_layer
from ..views.tables import Tabled
from .head_matrices import output_projection

if TYPE_CHECKING:
    import rich.table


@dataclass(frozen=True)
class HeadNorms:
    """The share of the first token in what one head attends to, and in what it writes.

    Attributes:
        layer, head: the head.
        first: mean weight on the first key, over the queries after the first, which alone may have no choice.
        first_moved: mean share of the first key in the sum over keys of weight times length of what it writes.
        moved: mean of that sum: the most that the head can write at a token.
    """

    layer: int
    head: int
    first: float
    first_moved: float
    moved: float


@dataclass(frozen=True)
class NormWeighted(Tabled):
    """The weights of each head by what they move. It prints as a table and converts to JSON.

    Attributes:
        model: the name of the model.
        tokens: the number of tokens.
        heads: one record per head, in the order of the forward pass.
    """

    model: str
    tokens: int
    heads: tuple[HeadNorms, ...]

    def scores(self, name: str) -> list[list[float]]:
        """Return one number as ``[layer][head]``, for `headwise.look.Look.with_extras`.

        Raises:
            ValueError: the name is none of ``"first"``, ``"first_moved"`` and ``"moved"``.
        """
        check_texts(name=name)
        if name not in ("first", "first_moved", "moved"):
            raise ValueError(f"the numbers are first, first_moved and moved; got {shown(name)}")
        return [[getattr(head, name) for head in heads] for heads in by_layer(self.heads).values()]

    def table(self, most: int = 20) -> rich.table.Table:
        """Return a table of the `most` heads whose first token has the largest weight."""
        check_counts(most=most)
        title = f"{self.model}: the first token by weight, and by what it moves"
        table = number_table(title, ("layer", "head", "weight", "moves", "all keys move"))
        for one in sorted(self.heads, key=lambda one: -one.first)[:most]:
            numbers = (f"{number:.3f}" for number in (one.first, one.first_moved, one.moved))
            table.add_row(str(one.layer), str(one.head), *numbers)
        return table


@torch.no_grad()
def norm_weighted(model: nn.Module, ids: Any, *, name: str | None = None) -> NormWeighted:
    r"""Measure the weights of each head by what they move: $P_{ij} \lVert W_O v_j \rVert$.

    A head that attends to the first token may do nothing there, because the value of that token is short; the norms
    tell a sink from a head that reads (Kobayashi et al. 2020, arXiv 2004.10102). The sums over keys are attention
    outputs with $\lVert W_O v_j \rVert$ as a value, so no attention matrix is stored.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs.
        ids: One text, (T,) or (1, T).
        name: The name of the model in the record.

    Raises:
        TypeError: not a model, or ids that are not integers.
        ValueError: ids that do not fit, a text of one token, or no module takes the concatenated heads.

    Example:
        >>> import headwise
        >>> model = nn.Sequential(nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3), nn.Linear(12, 97))
        >>> found = norm_weighted(model, [1, 2, 3, 5, 8])
        >>> len(found.heads), 0 < found.heads[0].first_moved < 1
        (3, True)
    """
    check_told(name, None)
    model = unwrap(model)
    row, heads = as_row(ids), list[HeadNorms]()
    for call, written in _calls(model, row):
        H = len(written)
        first = torch.zeros_like(written)
        first[:, 0] = 1.0
        columns = torch.stack([first, first * written, written], -1)[None]  # (1, H, S, 3)
        key = call.key.repeat_interleave(H // call.key.shape[1], 1)
        sums = attention(call.query, key, columns.to(key.dtype), **call.scoring)[0, :, 1:].float()  # (H, T - 1, 3)
        share = sums[..., 1] / sums[..., 2].clamp(min=torch.finfo(torch.float32).tiny)
        numbers = zip(sums[..., 0].mean(1).tolist(), share.mean(1).tolist(), sums[..., 2].mean(1).tolist(), strict=True)
        heads += [HeadNorms(call.order, head, *three) for head, three in enumerate(numbers)]
    return NormWeighted(name or model_name(model), len(row), tuple(heads))


@torch.no_grad()
def norm_weighted_map(model: nn.Module, ids: Any, layer: int, head: int) -> tuple[Tensor, Tensor]:
    r"""Return the map of one head by weight and by what it moves, $P_{ij}$ and $P_{ij} \lVert W_O v_j \rVert$.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs.
        ids: One text, (T,) or (1, T).
        layer: Index of the attention call, as in `headwise.look.at`.
        head: Index of the query head.

    Returns:
        Two matrices (T, S), float32.

    Raises:
        TypeError, ValueError: as `norm_weighted`; or the model has no such head.

    Example:
        >>> import headwise
        >>> model = nn.Sequential(nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3), nn.Linear(12, 97))
        >>> weight, moved = norm_weighted_map(model, [1, 2, 3, 5, 8], layer=0, head=2)
        >>> weight.shape, moved.shape
        (torch.Size([5, 5]), torch.Size([5, 5]))
    """
    check_counts(layer=layer, head=head)
    model = unwrap(model)
    calls = _calls(model, as_row(ids))
    for call, written in calls:
        if call.order == layer and head < len(written):
            P = weights(call.query, call.key, heads=head, **call.scoring)[0, 0].float()
            return P, P * written[head]
    heads = "; ".join(f"layer {call.order} has {len(written)}" for call, written in calls[:1])
    raise ValueError(f"the model has {len(calls)} layers of heads ({heads}), and no head {layer}.{head}")


def _calls(model: nn.Module, row: Sequence[int]) -> list[tuple[AttentionCall, Tensor]]:
    """Return the attention calls on a text, each with the lengths of W_O v_j, (H, S) float32.

    Raises:
        ValueError: fewer than 2 tokens, or no module takes the concatenated heads.
    """
    if len(row) < 2:
        raise ValueError("norm-weighted attention needs a text of at least 2 tokens; got 1; give a longer text")
    short, text = readings(model, [row[:SHORT], row], loss=no_loss, mask_id=None, seed=0)
    with learning(model):
        names = output_projections(model, short.output)
    with in_eval_mode_without_grad(model), probe(model) as seen:
        text.output(model)
    result = []
    for call in seen.calls:
        known = {} if call.value is None else names
        part = output_projection(model, known, call.module, ", and what its weights move is not defined")
        result.append((call, lengths(call, part)[0]))
    return result
