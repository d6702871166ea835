"""Switching heads off: many ablations side by side, each as one row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import AttentionCall, probe
from ...shapes.arguments import shown, whole_numbers
from ..inputs.nonfinite import remedy
from .losses import Reading
from .unchanged import Unchanged

ROWS, TOKENS, NUMBERS = 32, 8192, 1 << 26
"""The most rows of a batch of ablations, tokens in it, and logits of it."""

MANY = 8
"""The fewest groups of heads for which the layers before them are kept."""

WAYS = ("zero", "mean")
"""The output of a head that is off: zero, or its mean over all tokens of all texts."""

LayerHead = tuple[int, int]

Place = tuple[int, ...]
"""(layer, head), or (layer, head, position) for a head at one query position of a text."""


@dataclass(frozen=True)
class Site:
    """An attention call in a forward pass; `call` counts the earlier calls of its module."""

    module: str
    call: int
    layer: int
    num_heads: int
    num_kv_heads: int


@dataclass
class Survey:
    """The result of a first pass over all texts without ablation: the calls, losses and mean head outputs."""

    sites: list[Site] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sums: dict[int, Tensor] = field(default_factory=dict)
    tokens: int = 0
    rows: dict[int, int] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The mean over the texts."""
        return sum(self.losses) / len(self.losses)

    @property
    def heads(self) -> list[LayerHead]:
        """Every head, as (layer, head)."""
        return [(site.layer, head) for site in self.sites for head in range(site.num_heads)]

    def mean(self, layer: int) -> Tensor:
        """Return the mean output of each head of a layer over all tokens of all texts, (H, 1, V) float32."""
        return (self.sums[layer] / self.rows[layer])[:, None]

    def instead(self, by: str) -> Callable[[int], Tensor] | None:
        """Return what a head that is off outputs, for `off`: None for ``"zero"``, the mean for ``"mean"``."""
        return self.mean if by == "mean" else None

    def check(self, heads: Iterable[Sequence[int]]) -> list[LayerHead]:
        """Return the pairs (layer, head); raise TypeError or ValueError if the model has not each, or one is twice."""
        rule = "heads are pairs (layer, head)"
        try:
            rows = [whole_numbers("a head's layer and number", pair) for pair in heads]
        except TypeError:
            raise TypeError(f"{rule} of whole numbers; got {shown(heads)}") from None
        if any(len(row) != 2 for row in rows):
            raise ValueError(f"{rule}; got {shown(heads)}")
        pairs = [(layer, head) for layer, head in rows]
        sizes = {site.layer: site.num_heads for site in self.sites}
        for layer, head in pairs:
            if layer not in sizes:
                raise ValueError(f"layers of this model are 0 to {len(sizes) - 1}; got head {layer}.{head}")
            if not 0 <= head < sizes[layer]:
                raise ValueError(f"heads of layer {layer} are 0 to {sizes[layer] - 1}; got head {layer}.{head}")
        if not pairs or len(set(pairs)) < len(pairs):
            raise ValueError(f"name at least one head, each once, as (layer, head); got {shown(pairs)}")
        return pairs


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, but with gradients."""
    with in_eval_mode_without_grad(model), torch.enable_grad():
        yield


def survey(
    model: nn.Module, texts: Sequence[Reading], also: Callable[[AttentionCall, Tensor], object] | None = None
) -> Survey:
    """Read all texts once without ablation; `also` is called with each call and its output."""
    result = Survey()

    def each(call: AttentionCall) -> Tensor:
        out = call.attend()
        if out.shape[0] != 1:
            raise ValueError(
                f"module {call.module!r} made {out.shape[0]} rows of one text; its heads can be switched off only in "
                "models that keep a text in one row"
            )
        if call.order == len(result.sites):
            again = sum(site.module == call.module for site in result.sites)
            result.sites.append(Site(call.module, again, call.order, out.shape[1], call.key.shape[1]))
        total = out[0].float().sum(1)
        result.sums[call.order] = result.sums[call.order] + total if call.order in result.sums else total
        result.rows[call.order] = result.rows.get(call.order, 0) + out.shape[2]
        if also is not None:
            also(call, out)
        return out

    with in_eval_mode_without_grad(model):
        for text in texts:
            with probe(model, each):
                result.losses.append(float(text.losses(model)))
            result.tokens += text.tokens
    if not torch.tensor(result.losses, device="cpu").isfinite().all():
        dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
        raise ValueError(f"the loss, or the metric of a patch, is {shown(result.losses)}; {remedy(model, dtype)}")
    return result


def gates_of(base: Survey, groups: Sequence[Sequence[Place]]) -> dict[int, Tensor]:
    """Return layer -> (rows, H) bool, False for the heads of each row's group; (rows, H, T) if they name positions."""
    sizes = {site.layer: site.num_heads for site in base.sites}
    gates: dict[int, Tensor] = {}
    for row, group in enumerate(groups):
        for layer, *place in group:
            if layer not in gates:
                positions = (base.rows[layer],) * (len(place) - 1)
                gates[layer] = torch.ones(len(groups), sizes[layer], *positions, dtype=torch.bool, device="cpu")
            gates[layer][(row, *place)] = False
    return gates


def off(
    gates: Mapping[int, Tensor], instead: Callable[[int], Tensor] | None = None
) -> Callable[[AttentionCall], Tensor | None]:
    """Return a probe function that replaces the outputs of heads, where `gates_of` gives False.

    `instead` returns for a layer what its heads output, (H, 1, V) or (H, T, V); zero without it.
    """

    def each(call: AttentionCall) -> Tensor | None:
        gate = gates.get(call.order)
        if gate is None:
            return None
        out = call.attend()
        there = torch.zeros((), device="cpu") if instead is None else instead(call.order)
        return torch.where(gate.reshape(*gate.shape[:2], -1, 1).to(out.device), out, there.to(out))

    return each


def counter(progress: Callable[[int, int], object] | None, done: int, total: int) -> Callable[[int], None]:
    """Report that `done` of `total` steps are done, and return a function that reports a number of further steps."""

    def step(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    step(0)
    return step


def rises(
    model: nn.Module,
    texts: Sequence[Reading],
    base: Survey,
    groups: Sequence[Sequence[Place]],
    instead: Callable[[int], Tensor] | None,
    step: Callable[[int], object] = lambda heads: None,
) -> list[float]:
    """Return the rise of the loss when each group of heads is replaced as by `off`, as the mean over the texts."""
    risen = [0.0] * len(groups)
    with in_eval_mode_without_grad(model):
        for text, before in zip(texts, base.losses, strict=True):
            logits = (1 if text.last else text.width) * text.vocabulary
            rows = max(1, min(ROWS, TOKENS // text.width, NUMBERS // logits)) if text.many else 1
            modules = {site.layer: site.module for site in base.sites}
            known = Unchanged.of(model, text, modules) if len(groups) >= MANY and rows > 1 else Unchanged(model)
            for first in range(0, len(groups), rows):
                chunk = groups[first : first + rows]
                changed = min((place[0] for group in chunk for place in group), default=0)
                with probe(model, off(gates_of(base, chunk), instead)) as seen, known.before(changed, len(chunk), seen):
                    losses = text.losses(model, len(chunk))
                for row, loss in enumerate(losses.tolist()):
                    risen[first + row] += (loss - before) / len(texts)
                step(len(chunk))
    return risen
