r"""What the weights move: the weight of a key times the length of what the head writes from it, as a share of the row.

$P_{ij} \lVert W_O v_j \rVert / \sum_k P_{ik} \lVert W_O v_k \rVert$ (Kobayashi et al. 2020, arXiv 2004.10102) is the
softmax of the scores plus $\log \lVert W_O v_j \rVert$: attention with a bias for each key. So the statistics of
attention give its maps and masses too, and no attention matrix is stored.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ...nn.hooks.output_projections import ProjectionSearch
from ...nn.hooks.probe import AttentionCall
from ...nn.hooks.projections import plain_weight
from ...nn.hooks.unwrap import split_over
from ...ops.masks import bias
from ...ops.statistics.api import RowStatistics, row_sums
from ..records.head import HeadMap
from ..weights.head_matrices import written_by
from .reduce import on_host, quantised
from .sums import LayerTally

SHORT = 1024
"""The most queries of a call whose vectors are kept, and whose scores are computed a second time by what they move."""


class MovedByLayer:
    """Measures what the weights move, each call right before its output projection runs."""

    def __init__(self, model: nn.Module, pool: int) -> None:
        self.model, self.pool = model, pool
        self.maps: list[HeadMap] = []  # of each head, in the order of the calls; empty where it is not measured
        self._last: tuple[AttentionCall, LayerTally, int] | None = None

    def search(self) -> AbstractContextManager[ProjectionSearch | None]:
        """Return the context in which the model runs; heads split over ranks are not measured, as no W_O is whole."""
        whole = split_over(self.model) == 1
        return ProjectionSearch(self.model, self._found, by_place=True) if whole else nullcontext()

    def add(self, call: AttentionCall, tally: LayerTally) -> None:
        """Take a call; it is measured if its heads are not gated and it is short, because it takes a second pass."""
        at = len(self.maps)
        self.maps += [HeadMap(0, 0, b"")] * tally.heads
        long = call.query.shape[2] > SHORT
        self._last = None if call.value is None or call.gate is not None or long else (call, tally, at)

    def _found(self, attention: str, projection: str) -> None:
        last, self._last = self._last, None
        if last is None or last[0].module != attention:
            return
        call, tally, at = last
        rows = moved(call, self.model.get_submodule(projection), self.pool)
        if not bool(rows.entropy.isfinite().all()):  # the values are not
            return
        count = (rows.keys[:, :, 1:] > 0).sum(-1)
        for share, number in zip(rows.targets["first"] * count, count, strict=True):  # text by text
            tally.add({"first moved": share, "first moved, rows": number})
        self.maps[at : at + tally.heads] = quantised(rows.pooled[0])


def lengths(call: AttentionCall, projection: nn.Module) -> Tensor:
    """Return the length of what each head of a call writes from each key, |v_j W_O|, (B, H, S) float32.

    A text's lengths do not depend on the other texts of the batch.
    """
    assert call.value is not None  # both callers leave out or refuse calls without values
    H, (_, K, _, V) = call.query.shape[1], call.value.shape
    plain = plain_weight(projection)
    W = written_by(projection, H, V, call.value) if plain is None else plain.detach().float().mT.unflatten(0, (H, V))
    gram = W @ W.mT  # |v W|^2 = v (W W^T) v^T, without the vectors of the model's width
    rows = []
    for value in call.value:
        each = value.float().repeat_interleave(H // K, 0)
        rows.append(((each @ gram) * each).sum(-1).clamp(min=0).sqrt())
    return torch.stack(rows)


@torch.no_grad()
def moved(call: AttentionCall, projection: nn.Module, pool: int) -> RowStatistics:
    """Return the statistics of a call's weights by what they move, on the CPU.

    The target ``"first"`` is the first key, of the queries after the first, which alone may have no choice.
    """
    by_key = bias(lengths(call, projection).log()[:, :, None, :])
    first = torch.zeros(call.query.shape[2], 1, dtype=torch.long, device="cpu")
    first[0] = -1
    measured = row_sums(
        call.query,
        call.key,
        mask=by_key if call.mask is None else call.mask & by_key,
        scale=call.scale,
        softcap=call.softcap,
        offsets=(),
        targets={"first": first},
        pool=pool,
    )
    return measured.statistics(on_host(measured.sums))
