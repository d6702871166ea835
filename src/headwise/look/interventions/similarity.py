"""Redundant heads: the distances between their patterns and between their outputs, and clusters of close heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import AttentionCall, probe
from ...nn.hooks.unwrap import unwrap
from ...ops.statistics.weights import weights
from ...plan.show.printed import number_table
from ...shapes.arguments import check_counts, check_numbers
from ..beside import all_readings
from ..inputs.ids import check_told, model_name
from ..views.tables import Tabled
from .losses import Reading, no_loss, one_text

if TYPE_CHECKING:
    import rich.table

SMOOTHING = 0.999
"""The share of a row that remains before rows are compared; the rest is spread over all keys (Clark et al. 2019)."""

ROWS, NUMBERS = 128, 1 << 23
"""The number of query rows that are compared, evenly spaced; and the most weights in memory together."""

LEAST = 4
"""The fewest tokens that the debiased CKA needs."""

Distances = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SimilarHead:
    """A head and its nearest heads, by patterns and by outputs; distances are 0 to 1.

    Attributes:
        layer, head: the head.
        pattern: distance to the nearest head by patterns: Jensen-Shannon, bits, mean over rows.
        pattern_of: that nearest head, (layer, head); None if no other head has as many queries and keys.
        output: distance to the nearest head by outputs: 1 - CKA.
        output_of: that nearest head; None if no other has as many queries and keys, or for fewer than 4 tokens.
    """

    layer: int
    head: int
    pattern: float | None
    pattern_of: tuple[int, int] | None
    output: float | None
    output_of: tuple[int, int] | None


@dataclass(frozen=True)
class Redundancy(Tabled):
    """The redundant heads of a model on a text. It prints as tables and converts to JSON.

    Attributes:
        model: the name of the model.
        tokens: the number of tokens.
        rows: the number of query rows at which patterns were compared.
        threshold: the largest mean distance at which two clusters were joined.
        heads: each head with its nearest heads.
        patterns: clusters of at least two heads with similar patterns, largest first.
        outputs: clusters of at least two heads with similar outputs.
    """

    model: str
    tokens: int
    rows: int
    threshold: float
    heads: tuple[SimilarHead, ...]
    patterns: tuple[tuple[tuple[int, int], ...], ...]
    outputs: tuple[tuple[tuple[int, int], ...], ...]

    def table(self) -> rich.table.Table:
        """Return a table of the clusters, largest first."""
        title = f"{self.model}: heads that do the same, {self.tokens} tokens, distance at most {self.threshold:g}"
        table = number_table(title, ("by", "heads", "cluster"), left=("by", "cluster"))
        for by, clusters in (("patterns", self.patterns), ("outputs", self.outputs)):
            for cluster in clusters:
                table.add_row(by, str(len(cluster)), " ".join("{}.{}".format(*head) for head in cluster))
        if not table.row_count:
            table.caption = "no two heads are that close; take a larger threshold"
        return table

    def pairs_table(self, most: int = 10) -> rich.table.Table:
        """Return a table of the `most` heads closest to another, by patterns and then by outputs."""
        check_counts(most=most)
        table = number_table("closest heads", ("by", "head", "nearest", "distance, 0 to 1"), left=("by",))
        for by in ("pattern", "output"):
            near: dict[frozenset[tuple[int, int]], float] = {}
            for one in self.heads:
                other, distance = getattr(one, f"{by}_of"), getattr(one, by)
                if other is not None:
                    near[frozenset({(one.layer, one.head), other})] = distance
            for pair, distance in sorted(near.items(), key=lambda item: (item[1], sorted(item[0])))[:most]:
                table.add_row(f"{by}s", *("{}.{}".format(*head) for head in sorted(pair)), f"{distance:.3f}")
        return table

    @override
    def _tables(self) -> Iterable[rich.table.Table]:
        return self.table(), self.pairs_table()


def redundancy(
    model: nn.Module,
    ids: Any,
    *,
    threshold: float = 0.1,
    rows: int = ROWS,
    name: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Redundancy:
    """Find redundant heads on a text, by their patterns and by their outputs.

    - Patterns: the Jensen-Shannon divergence of the rows of two heads, in bits, mean over the rows; each row is
      smoothed with 0.001 of uniform weight (Clark et al. 2019, arXiv 1906.04341, who sum over rows, in nats). A sink
      column counts as a key.
    - Outputs: 1 - CKA of the heads' outputs over the tokens: 0 if one is a rotation, scaling and shift of the other.
      CKA is linear and debiased, so that unrelated heads have distance 1 even on short texts (Kornblith et al. 2019,
      arXiv 1905.00414; Nguyen et al. 2021, arXiv 2010.15327).

    Heads are clustered by average linkage: two clusters are joined while the mean distance between them is at most
    `threshold`. Only heads with equal numbers of queries and keys are compared: not self-attention with
    cross-attention.

    Args:
        model: A model that `headwise.nn.probe` accepts and ``model(ids)`` runs.
        ids: One text, (T,) or (1, T), or a processor's output for a picture, a sound or two texts.
        threshold: From 0 (equal) to 1.
        rows: The number of query rows at which patterns are compared, evenly spaced over the text; short texts use all.
        name: The name of the model in the record.
        progress: Called as ``progress(done, total)``.

    Raises:
        TypeError: not a model, or ids that are not integers.
        ValueError: several texts, fewer than 4 tokens, ids that do not fit, or a threshold outside 0 to 1.

    Example:
        >>> import headwise
        >>> model = nn.Sequential(nn.Embedding(97, 12), headwise.MultiHeadAttention(12, 3), nn.Linear(12, 97))
        >>> same = redundancy(model, [1, 2, 3, 5, 8, 13, 21, 34])
        >>> len(same.heads), same.tokens
        (3, 8)
    """
    check_numbers(threshold=threshold)
    check_counts(1, rows=rows)
    check_told(name, progress)
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is a distance from 0 to 1; got {threshold}")
    model = unwrap(model)
    if not isinstance(ids, Mapping):
        one_text(ids, LEAST, "heads are compared")
    [text] = all_readings(model, ids, loss=no_loss, mask_id=None, seed=0, labels=False)
    kinds, compared = kinds_of(model, text), []
    for calls in kinds:
        compared.append(_compared(calls, rows, threshold))
        if progress is not None:
            progress(len(compared), len(kinds))
    twins, patterns, outputs = (itertools.chain(*parts) for parts in zip(*compared, strict=True))
    return Redundancy(
        model=name or model_name(model),
        tokens=text.tokens,
        rows=max(min(rows, calls[0][0].query.shape[2]) for calls in kinds),
        threshold=threshold,
        heads=tuple(sorted(twins, key=lambda twin: (twin.layer, twin.head))),
        patterns=tuple(sorted(patterns, key=lambda group: (-len(group), group))),
        outputs=tuple(sorted(outputs, key=lambda group: (-len(group), group))),
    )


def _compared(
    calls: Sequence[tuple[AttentionCall, Tensor]], rows: int, threshold: float
) -> tuple[list[SimilarHead], list[Any], list[Any]]:
    """Return each head with its nearest heads, and both clusterings; all calls have equal query and key counts."""
    here = [(call.order, head) for call, _ in calls for head in range(call.query.shape[1])]
    outs = [out for _, out in calls]
    patterns, alike = _near(pattern_distances([call for call, _ in calls], rows), here, threshold)
    outputs, same = _near(output_distances(outs) if outs[0].shape[1] >= LEAST else None, here, threshold)
    twins = [SimilarHead(*place, *patterns[n], *outputs[n]) for n, place in enumerate(here)]
    return twins, alike, same


def kinds_of(model: nn.Module, text: Reading) -> list[list[tuple[AttentionCall, Tensor]]]:
    """Return the calls on a text with their outputs (H, T, V), grouped by their numbers of queries and keys."""
    kinds: dict[tuple[int, int], list[tuple[AttentionCall, Tensor]]] = {}

    def each(call: AttentionCall) -> Tensor:
        out = call.attend()
        kinds.setdefault((call.query.shape[2], call.key.shape[2]), []).append((call, out[0].float()))
        return out

    with in_eval_mode_without_grad(model), probe(model, each):
        text.output(model)
    return [*kinds.values()]


@torch.no_grad()
def pattern_distances(calls: Sequence[AttentionCall], rows: int = ROWS) -> Distances:
    """Return the Jensen-Shannon divergence (N, N) of all pairs of heads, in bits, mean over at most `rows` rows.

    The calls have equal numbers of queries and keys. Only a block of rows of all heads is in memory.
    """
    (_, _, T, _), S = calls[0].query.shape, calls[0].key.shape[2]
    heads = sum(call.query.shape[1] for call in calls)
    places = torch.arange(min(rows, T), device="cpu") * T // min(rows, T)
    columns = S + any(call.sinks is not None for call in calls)
    total, count = torch.zeros(2, heads, heads, dtype=torch.float64, device="cpu")
    for block in places.split(max(1, NUMBERS // (heads * columns))):
        P = torch.cat([_rows(call, block, columns) for call in calls])
        real = P.sum(-1) > 0.5  # a row without any allowed key has no distribution to compare
        P = SMOOTHING * P + (1 - SMOOTHING) / columns
        entropy = -torch.xlogy(P, P).sum(-1)
        for head in range(heads):
            middle = (P[head] + P[head:]) / 2
            apart = -torch.xlogy(middle, middle).sum(-1) - (entropy[head] + entropy[head:]) / 2
            both = real[head] & real[head:]
            total[head, head:] += (apart.clamp(min=0) * both).sum(-1).double().cpu()
            count[head, head:] += both.sum(-1).double().cpu()
    mean = total / count.clamp(min=1) / np.log(2)
    return np.asarray(mean + mean.triu(1).mT)


def _rows(call: AttentionCall, rows: Tensor, columns: int) -> Tensor:
    """Return the weights of some rows, (H, rows, columns); an additional column has the mass of the sinks."""
    P = weights(call.query, call.key, rows=rows.to(call.query.device), **call.scoring)[0]
    if columns == P.shape[-1]:
        return P
    rest = (1 - P.sum(-1, keepdim=True)).clamp(min=0) if call.sinks is not None else torch.zeros_like(P[..., :1])
    return torch.cat([P, rest], dim=-1)


@torch.no_grad()
def output_distances(outs: Sequence[Tensor]) -> Distances:
    """Return 1 - CKA (N, N), linear and debiased, of all pairs of heads; outs are (H, T, V) each, with equal T.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)); HSIC is the unbiased estimate, from K = X X^T and L = Y Y^T
    without their diagonals: (tr KL + 1'K1 1'L1 / ((n - 1)(n - 2)) - 2 / (n - 2) 1'KL1) / (n (n - 3)). K and L are never
    stored.
    """
    width = max(out.shape[-1] for out in outs)
    X = torch.cat([nn.functional.pad(out, (0, width - out.shape[-1])) for out in outs]).double()
    X = X - X.mean(1, keepdim=True)  # does not change HSIC and keeps its terms small
    n = X.shape[1]
    size = X.square().sum(-1)  # (N, n): the diagonals
    row = (X @ X.sum(1).unsqueeze(-1)).squeeze(-1) - size  # (N, n): K 1
    whole = row.sum(-1)
    hsic = torch.empty(len(X), len(X), dtype=torch.float64, device=X.device)
    for head in range(len(X)):
        trace = (X[head].mT @ X[head:]).square().sum((-2, -1)) - size[head:] @ size[head]
        rest = whole[head] * whole[head:] / ((n - 1) * (n - 2)) - 2 / (n - 2) * (row[head:] @ row[head])
        hsic[head, head:] = hsic[head:, head] = trace + rest
    own = hsic.diagonal().clamp(min=0).sqrt()
    scale = own[:, None] * own
    alike = torch.where(scale > 0, hsic / scale.clamp(min=torch.finfo(torch.float64).tiny), 0.0).clamp(0, 1)
    return np.asarray((1 - alike).fill_diagonal_(0).cpu())


def _near(
    distances: Distances | None, places: Sequence[tuple[int, int]], threshold: float
) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return for each head the smallest distance and the other head there, and the clusters of two heads or more."""
    if distances is None or len(places) < 2:
        return [(None, None)] * len(places), []
    others = distances + np.where(np.eye(len(places), dtype=bool), np.inf, 0.0)
    nearest = [(float(row.min()), places[int(row.argmin())]) for row in others]
    groups = linked(distances, threshold)
    return nearest, [tuple(places[n] for n in group) for group in groups if len(group) > 1]


def linked(distances: Distances, threshold: float) -> list[list[int]]:
    """Return clusters by average linkage up to a mean distance of `threshold`, sorted by their first members."""
    gap = distances.astype(float) + np.where(np.eye(len(distances), dtype=bool), np.inf, 0.0)
    groups = {n: [n] for n in range(len(gap))}
    while True:
        a, b = sorted(divmod(int(gap.argmin()), len(gap)))
        if gap[a, b] > threshold:
            return [*groups.values()]
        gap[a] = gap[:, a] = (len(groups[a]) * gap[a] + len(groups[b]) * gap[b]) / (len(groups[a]) + len(groups[b]))
        gap[a, a] = gap[b] = gap[:, b] = np.inf
        groups[a] = sorted(groups[a] + groups.pop(b))
