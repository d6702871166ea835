"""Choose the heads that stay in every layer, from a list of heads, a fraction or a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from ...plan.costs.totals import cache_bytes
from ...plan.model.model import model_of
from ...plan.shape import short
from ...plan.units import show_bytes
from ...shapes.arguments import is_finite
from ..layout.families import CheckpointLayout, Layer
from ..layout.head_axes import KeptHeads
from ..layout.protocol import CheckpointSource, Entry
from ..layout.target_class import Target, loads, target
from ..write.verify import planned
from ..write.writer import Planned
from . import selection as choose
from .selection import OR_ZERO, Count, HeadScores

Chosen = tuple[dict[str, KeptHeads], tuple[str, ...]]
"""The heads that stay, by layer, and notes on the choice."""


@dataclass(frozen=True)
class Budget:
    """A limit in megabytes (1,000,000 bytes each) for the weights and the key-value cache of one text.

    Attributes:
        megabytes: The limit.
        context: Tokens of the text; 0 leaves the cache out.

    Raises:
        ValueError: `megabytes` is not a finite number above 0, or `context` is not a number of tokens.

    Example:
        >>> import headwise.hf, headwise.models
        >>> from headwise import reshape
        >>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
        ...     budget = reshape.Budget(7.0, context=512)
        ...     plan = reshape.plan_prune(opened, budget=budget, scores=reshape.random_scores())
        >>> {len(heads) for heads in plan.gone.values()}
        {5}
    """

    megabytes: float | int
    context: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.megabytes, bool) or not isinstance(self.megabytes, (int, float)) or not self.megabytes > 0:
            raise ValueError(f"a budget is a number of megabytes above 0; got {short(self.megabytes)}")
        if not is_finite(self.megabytes):
            raise ValueError(f"a budget is a finite number of megabytes; got {short(self.megabytes)}")
        if isinstance(self.context, bool) or not isinstance(self.context, int) or not 0 <= self.context <= 10**8:
            raise ValueError(f"context is a whole number of tokens; got {short(self.context)}")


def select(
    family: CheckpointLayout,
    tensors: Mapping[str, Entry],
    gone: Mapping[str, set[int]],
    scores: HeadScores | None,
    *,
    keep_fraction: float | int | None,
    budget: Budget | None,
    zero: bool,
) -> Chosen:
    """Return the heads that stay, and notes on the choice; the arguments are those of `plan_prune`, checked.

    Raises:
        ValueError: in one line, why no heads fulfil the request.
    """
    if budget is not None and zero:
        raise ValueError("zeroed heads weigh what they did, so no budget is met by them; leave out zero=True")
    if keep_fraction is None and budget is None:
        if zero:
            return {layer.key: _all_but(layer, gone[layer.key]) for layer in family.layers}, ()
        if scores is None:
            return choose.exactly(family, gone), ()
        return _completed(family, gone, scores)
    if scores is None:
        raise ValueError("which heads of a layer stay is chosen by score; give scores (--by)")
    if budget is not None:
        return _within(family, tensors, budget, scores)
    assert keep_fraction is not None
    return _fraction(family, keep_fraction, scores, zero=zero)


def _all_but(layer: Layer, gone: set[int]) -> KeptHeads:
    """Return all heads except `gone`, in any combination; for zeroing, which keeps all sizes."""
    return KeptHeads(tuple(head for head in range(layer.sizes.H) if head not in gone), tuple(range(layer.sizes.K)))


def counts_of(family: CheckpointLayout, chosen: Mapping[str, KeptHeads]) -> dict[str, Count]:
    """Return the numbers (query heads, key-value heads) by config field."""
    first = {field: chosen[layers[0].key] for field, layers in family.counts.items()}
    return {field: (len(some.query), len(some.kv)) for field, some in first.items()}


def _only(family: CheckpointLayout, field: str, count: Count) -> dict[str, Count]:
    """Return the numbers of heads with `count` in one field and the present numbers in all others."""
    now = {name: (layers[0].sizes.H, layers[0].sizes.K) for name, layers in family.counts.items()}
    return {**now, field: count}


def _best(family: CheckpointLayout, counts: Mapping[str, Count], scores: HeadScores) -> dict[str, KeptHeads]:
    """Return the heads with the best scores in every layer, as many as `counts` states."""
    best = choose.choose(family, counts, {layer.key: set() for layer in family.layers}, scores)
    assert best is not None
    return best


def loadable(family: CheckpointLayout, field: str) -> list[Count]:
    """Return the numbers of heads that pruning can leave and that some class loads, in descending order."""
    sizes = family.counts[field][0].sizes
    return [count for count in choose.possible(sizes) if loads(family, _only(family, field, count))]


def _fraction(family: CheckpointLayout, fraction: float | int, scores: HeadScores, *, zero: bool) -> Chosen:
    """Keep a number of heads nearest to the fraction in each field; of equal numbers, the one with the best scores."""
    counts: dict[str, Count] = {}
    notes = []
    for field, layers in family.counts.items():
        sizes = layers[0].sizes
        near = choose.nearest(sizes, choose.possible(sizes) if zero else loadable(family, field), fraction)
        kept = {count: _best(family, _only(family, field, count), scores) for count in near}
        heads, kv = counts[field] = max(near, key=lambda count: choose.total(kept[count], scores))
        if heads == sizes.H and 2 * (1 - Fraction(str(fraction))) * sizes.H >= 1:  # as `nearest` reads it
            raise ValueError(_no_such_part(family, field, fraction))
        shared = "" if sizes.group == 1 else f", which read {kv} of {sizes.K} key-value heads"
        name = family.field_name(field)
        notes.append(
            f"{fraction:g} of {sizes.H} ({name}) is {fraction * sizes.H:g}; {heads} stay in each layer{shared}"
        )
    return _best(family, counts, scores), tuple(dict.fromkeys(notes))


def _no_such_part(family: CheckpointLayout, field: str, fraction: float | int) -> str:
    """Return the message for a fraction that removes no heads although it should."""
    sizes = family.counts[field][0].sizes
    wanted = f"{fraction:g} of {sizes.H} heads is {fraction * sizes.H:g}"
    fewer = [count[0] / sizes.H for count in loadable(family, field) if count[0] < sizes.H]
    if fewer:
        return f"{wanted}, and no number of them that loads is nearer to it than all; keep {max(fewer):g}, {OR_ZERO}"
    try:
        target(family, _only(family, field, choose.nearest(sizes, choose.possible(sizes), fraction)[0]))
    except ValueError as none:
        return f"{wanted}; {none}; {OR_ZERO.removeprefix('or ')}"
    return f"{wanted}, and its {sizes.K} groups of {sizes.group} allow no fewer than all; {OR_ZERO.removeprefix('or ')}"


def _completed(family: CheckpointLayout, gone: Mapping[str, set[int]], scores: HeadScores) -> Chosen:
    """Remove the named heads and, by lowest score, as few others as one config for all layers requires."""
    counts: dict[str, Count] = {}
    for field, layers in family.counts.items():
        mine = {layer.key for layer in layers}
        lost = {layer.key: gone[layer.key] if layer.key in mine else set() for layer in family.layers}
        fits: dict[Count, float] = {}
        for count in loadable(family, field):
            kept = choose.choose(family, _only(family, field, count), lost, scores)
            if kept is not None:
                fits[count] = choose.total(kept, scores)
        if not fits:
            raise ValueError(
                f"without those heads no number is left that a class of transformers loads; name fewer, {OR_ZERO}"
            )
        counts[field] = max(fits, key=lambda count: (count[0], fits[count]))
    heads = choose.choose(family, counts, gone, scores)
    assert heads is not None
    more = [
        f"{layer.key}.{head}"
        for layer in family.layers
        for head in range(layer.sizes.H)
        if head not in heads[layer.key].query and head not in gone[layer.key]
    ]
    remark = f"more heads that go, the worst by score, so that one number counts all layers: {', '.join(more)}"
    return heads, (remark,) if more else ()


# --- the budget -------------------------------------------------------------------------------------------------------


def bytes_of(tensors: Iterable[Entry | Planned]) -> int:
    """Return the bytes of all these tensors."""
    return sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def size_facts(
    source: CheckpointSource, family: CheckpointLayout, goal: Target, tensors: Iterable[Planned], context: int
) -> dict[str, Any]:
    """Return class, bytes and the counts of `headwise.plan` before and after a change, as plain data."""
    configs = (family.whole(family.config), goal.config)
    return {
        "model_type": [family.model_type, goal.model_type],
        "weight_bytes": [bytes_of(source.tensors.values()), bytes_of(tensors)],
        "context": context,
        "plan": [planned(config, context) for config in configs],
    }


def _steps(family: CheckpointLayout) -> list[dict[str, Count]]:
    """Return all numbers of heads that load, in descending order; several fields shrink by the same fraction."""
    fields = {field: loadable(family, field) for field in family.counts}
    if len(fields) == 1:
        [(field, counts)] = fields.items()
        return [{field: count} for count in counts]
    most = max(layers[0].sizes.H for layers in family.counts.values())
    steps: list[dict[str, Count]] = []
    for n in range(most, 0, -1):
        step = {
            field: choose.nearest(family.counts[field][0].sizes, counts, n / most)[0]
            for field, counts in fields.items()
        }
        steps += [step] if step not in steps else []
    return steps


def _within(family: CheckpointLayout, tensors: Mapping[str, Entry], budget: Budget, scores: HeadScores) -> Chosen:
    """Return the largest number of heads within the budget; of equal numbers, the heads with the best scores."""
    best: tuple[float, dict[str, KeptHeads], int] | None = None
    enough, least = 0, 0
    for counts in _steps(family):
        heads = sum(count[0] for count in counts.values())
        if heads < enough:
            break
        kept = _best(family, counts, scores)
        cost = least = weight_bytes(family, tensors, kept) + cache_of(family, tensors, counts, budget.context)
        value = choose.total(kept, scores)
        # Divided, since the quotient is the float that the decimal number is read as; a product may be a byte short.
        if cost / 1e6 <= budget.megabytes and (best is None or value > best[0]):
            best, enough = (value, kept, cost), heads
    if best is None:
        for field in family.counts:
            if len(loadable(family, field)) == 1 and family.counts[field][0].sizes.H > 1:
                raise ValueError(_no_such_part(family, field, 0.5))
        raise ValueError(
            f"a budget of {budget.megabytes:g} MB (1,000,000 bytes each) is below {least / 1e6:.4g} MB, which weights "
            "and cache come to with the fewest heads; give more, or a shorter context"
        )
    _, kept, cost = best
    counts = counts_of(family, kept)
    numbers = (f"{heads} of {family.counts[field][0].sizes.H}" for field, (heads, _) in counts.items())
    heads_text = ", ".join(dict.fromkeys(numbers))
    return kept, (
        f"{budget.megabytes:g} MB allow {heads_text} heads a layer: {cost / 1e6:.1f} MB ({show_bytes(float(cost))})",
    )


def weight_bytes(family: CheckpointLayout, tensors: Mapping[str, Entry], kept: Mapping[str, KeptHeads]) -> int:
    """Return the bytes of all weights with only these heads."""
    forms = {name: (layer, form) for layer in family.layers for name, form in layer.tensors.items()}
    total = 0
    for name, entry in tensors.items():
        layer, form = forms.get(name, (None, None))
        shape = entry.shape if layer is None or form is None else form.shape(entry.shape, layer.sizes, kept[layer.key])
        total += prod(shape) * entry.dtype.itemsize
    return total


def cache_of(family: CheckpointLayout, tensors: Mapping[str, Entry], counts: Mapping[str, Count], context: int) -> int:
    """Return the bytes of the cache of one text, in the dtype of the weights; 0 for a model with only an encoder."""
    if not context or all(layer.role == "encoder" for layer in family.layers):
        return 0
    width = max(tensors[name].dtype.itemsize for layer in family.layers for name in layer.tensors)
    return cache_bytes(model_of(target(family, counts).config), context, width)
