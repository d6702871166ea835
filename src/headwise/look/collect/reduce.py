"""Reduction of an attention call to sums during the forward pass, together with the sums of uniform attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...nn.hooks.probe import AttentionCall
from ...ops.statistics.api import RowStatistics, StatisticsOptions, attention_sums, row_sums
from ...shapes import check_gate
from ..inputs.nonfinite import remedy
from ..records.head import HeadMap
from ..roles.call_tokens import CallTokens
from ..roles.measures import FAR, OFFSETS, CallStatistics, StatisticsRequest, device_of_mask, forbidden
from ..roles.role import Role
from .sums import MOST_SHOWN, LayerTally


def uniform(call: AttentionCall, scene: CallTokens, asks: StatisticsRequest) -> RowStatistics:
    """Return the statistics of uniform attention, one head: once for each mask of the pass that holds no tensor."""
    (B, _, T, _), S = call.query.shape, call.key.shape[2]
    mask = forbidden(call)

    def make() -> RowStatistics:
        zero = torch.zeros(B, 1, max(T, S), 1, device=call.query.device)
        options: StatisticsOptions = {"mask": mask, "offsets": OFFSETS, "pool": 1}
        options |= {"features": asks.features, "targets": asks.targets}
        measured = row_sums(zero[:, :, :T], zero[:, :, :S], **options)
        return measured.statistics(on_host(measured.sums))

    constant = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(mask))
    return scene.once(("uniform", repr(mask), B, T, S), make) if constant else make()


def looks_ahead(call: AttentionCall) -> bool | None:
    """Return whether a query may attend to a later position, tested on two rows; None in cross-attention (T != S)."""
    T, S = call.query.shape[2], call.key.shape[2]
    if T != S:
        return None
    device = device_of_mask(call)
    for i in {0, T // 2}:
        rows, later = slice(i, i + 1), slice(i + 1, S)
        seen = None if call.mask is None else call.mask.allowed(T, S, rows=rows, cols=later, device=device)
        if i + 1 < S and (seen is None or bool(seen.any())):
            return True
    return False


def measure(
    call: AttentionCall,
    scene: CallTokens,
    roles: Sequence[Role],
    pool: int,
    vectors: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor | None, CallStatistics]:
    """Return the attention output, if the call has values, and the row statistics for the roles, from one pass.

    The statistics are on the CPU; one copy takes them and `vectors` there.
    """
    asks = scene.once(("asks", *(role.name for role in roles)), lambda: _asks(scene, roles))
    options: StatisticsOptions = {**call.scoring, "offsets": OFFSETS, "pool": pool}
    options |= {"features": asks.features, "targets": asks.targets}
    out: Tensor | None = None
    if call.value is None:
        measured = row_sums(call.query, call.key, **options)
    else:
        out, measured = attention_sums(call.query, call.key, call.value, **options)
        out = out if call.gate is None else out * check_gate(call.gate, out.shape, out.device).to(out.dtype)
    sums, vectors = on_host((measured.sums, vectors))
    return out, CallStatistics(call, scene, measured.statistics(sums), uniform(call, scene, asks), vectors)


def on_host(tree: Any) -> Any:
    """Return the tensors in tuples and dicts on the CPU; those of a GPU are copied at once, so that it waits once."""
    leaves, shape = pytree.tree_flatten(tree)
    away = [x for x in leaves if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not away:
        return tree
    away.sort(key=lambda x: -x.itemsize)  # so that each begins at a multiple of its item's size
    memory = torch.cat([x.contiguous().flatten().view(torch.uint8) for x in away]).cpu()
    parts = memory.split([x.nbytes for x in away])
    copies = {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(away, parts, strict=True)}
    return pytree.tree_unflatten([copies.get(id(x), x) for x in leaves], shape)


def check_finite(got: CallStatistics, model: nn.Module) -> None:
    """Raise ValueError if the statistics of a pass are not finite."""
    call = got.call
    if not bool(got.rows.entropy.isfinite().all()):
        raise ValueError(
            f"layer {call.order} ({call.module!r}) has scores that are NaN or infinite in "
            f"{str(call.query.dtype).removeprefix('torch.')}; {remedy(model, call.query.dtype)}"
        )


def _asks(scene: CallTokens, roles: Sequence[Role]) -> StatisticsRequest:
    """Return the features and targets that all roles together need from the pass."""
    asks = [role.measure.asks(role.name, scene) for role in roles]
    return StatisticsRequest(
        {name: one for ask in asks for name, one in ask.features.items()},
        {name: one for ask in asks for name, one in ask.targets.items()},
    )


def add_roles(got: CallStatistics, roles: Sequence[Role], tally: LayerTally) -> None:
    """Add the sums of each role, text by text, with the evidence of the heads above its threshold."""
    heads = tally.heads
    for role in roles:
        sums = role.measure.read(role.name, got)
        if sums is None or not bool(sums.count.any()):
            continue
        total, count = (x.expand(-1, heads) for x in (sums.total, sums.count))
        nulls = [None if x is None else x.expand(-1, heads) for x in (sums.null, sums.against, sums.mass)]
        tally.role(role.name).add([passage.text for passage in got.scene.passages], total, count, *nulls)
        above = total > role.threshold * count
        if bool(above.any()):
            _add_evidence(got, role, above, tally)
            if sums.detail is not None:
                for b, h in above.nonzero().tolist():
                    tally.tell(role.name, h, sums.detail(b, h), int(count[b, h]))


def _add_evidence(got: CallStatistics, role: Role, above: Tensor, tally: LayerTally) -> None:
    """Add, for each text and head, the queries with the largest weights among those that show the role."""
    shown_by = role.measure.evidence(role.name, got)
    weights = got.weights_on(shown_by)
    best = weights.topk(min(MOST_SHOWN, weights.shape[-1]), dim=-1)
    values, queries = best.values.tolist(), best.indices.tolist()
    keys = shown_by.gather(2, best.indices).tolist()
    for b, h in above.nonzero().tolist():
        text = got.scene.passages[b].text
        shown = zip(values[b][h], queries[b][h], keys[b][h], strict=True)
        tally.show(role.name, h, [(-round(w, 4), text, i, j) for w, i, j in shown if w > 0])


def add_numbers(got: CallStatistics, tally: LayerTally, size: int) -> None:
    """Add the numbers that every head has: entropy, largest weight, distance, offset masses and the pooled map."""
    rows = got.rows
    (B, T), S = got.scene.queries.shape, got.scene.keys.shape[1]
    ahead = bool((got.uniform.offsets[..., FAR + 1 :] > 0).any())
    able = (got.uniform.offsets > 0).double() * T if got.scene.cross else got.able[:, None].expand(B, -1, -1)
    for b in range(len(got.scene.passages)):
        sums = {
            "entropy": rows.entropy[b].double().sum(-1),
            "largest": rows.largest[b].double().sum(-1),
            "distance": rows.distance[b].double().sum(-1),
            "rows": rows.rows[b],
            "offsets": rows.offsets[b].double() * able[b],
            "offset rows": able[b, 0],
            "ahead": float(ahead),
        }
        X, Y = min(T, size), min(S, size)
        cells, weight = pooled(rows, b, size)
        tally.add({**sums, f"map {X} {Y}": cells, f"map rows {X} {Y}": weight})
    tally.widest = max(tally.widest, (T, S))


def pooled(rows: RowStatistics, b: int, size: int) -> tuple[Tensor, Tensor]:
    """Return each head's map at `size` cells per side, as sums over queries (H, X, Y), and their number (H, X, 1)."""
    large, weight = rows.pooled[b].double(), rows.pooled_rows[b, :, :, None].double()
    _, R, C = large.shape
    down, across = (_bins(n, min(n, size), large.device) for n in (R, C))
    return down.mT @ (weight * large) @ across, down.mT @ weight


def quantised(weights: Tensor) -> list[HeadMap]:
    """Return the maps of heads (H, X, Y) with one byte per cell, in the encoding of `HeadMap`."""
    levels = (255 * weights.clamp(0, 1).sqrt()).round().to(torch.uint8).cpu()
    return [HeadMap(one.shape[0], one.shape[1], one.numpy().tobytes()) for one in levels]


def _bins(n: int, size: int, device: torch.device) -> Tensor:
    """Return (n, size) one-hot rows: index i falls into bin i * size // n."""
    bins = torch.arange(n, device=device) * size // max(n, 1)
    return (bins[:, None] == torch.arange(size, device=device)).double()
