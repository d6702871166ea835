r"""What the weights move: the weight of a key times the length of what the head writes from it, as a share of the row.

$P_{ij} \lVert W_O v_j \rVert / \sum_k P_{ik} \lVert W_O v_k \rVert$ (Kobayashi et al. 2020, arXiv 2004.10102) is the
softmax of the scores plus $\log \lVert W_O v_j \rVert$: attention with a bias for each key. So the statistics of
attention give its maps and masses too, and no attention matrix is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.probe import AttentionCall
from ...nn.hooks.projections import plain_weight
from ...ops.masks import bias
from ...ops.statistics.api import RowStatistics, row_statistics
from ..weights.head_matrices import written_by
from .sums import LayerTally


def projections(model: nn.Module, run: Callable[[], object]) -> dict[str, str]:
    """Return the output projection of each attention module by name; none if the heads are split over ranks."""
    try:
        return output_projections(model, lambda _: run())
    except ValueError:
        return {}


def lengths(call: AttentionCall, projection: nn.Module) -> Tensor:
    """Return the length of what each head of a call writes from each key, |v_j W_O|, (B, H, S) float32.

    A text's lengths do not depend on the other texts of the batch.
    """
    if call.value is None:
        raise ValueError(f"module {call.module!r} has no values, so its heads write nothing")
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
    """Return the statistics of a call's weights by what they move.

    The target ``"first"`` is the first key, of the queries after the first, which alone may have no choice.
    """
    by_key = bias(lengths(call, projection).log()[:, :, None, :])
    first = torch.zeros(call.query.shape[2], 1, dtype=torch.long)
    first[0] = -1
    return row_statistics(
        call.query,
        call.key,
        mask=by_key if call.mask is None else call.mask & by_key,
        scale=call.scale,
        softcap=call.softcap,
        offsets=(),
        targets={"first": first},
        pool=pool,
    )


def add_moved(rows: RowStatistics, tally: LayerTally) -> None:
    """Add the share of the first key, text by text."""
    count = (rows.keys[:, :, 1:] > 0).sum(-1)
    for share, number in zip((rows.targets["first"] * count).cpu(), count.cpu(), strict=True):
        tally.add({"first moved": share, "first moved, rows": number})
