"""The two forward passes of a look: the text, and random tokens repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..nn.probe import AttentionCall, probe
from . import inputs
from .inputs import IdFacts
from .measure import Measured, Sizes, Uniform, looks_ahead, of_call, summary
from .records import HeadRecord
from .repeats import Repeated, Repeats, as_tensors, draw

Progress = Callable[[int, int], object]


@dataclass
class Steps:
    """Tells the user's callback how far the passes have come."""

    tell: Progress | None
    passes: int
    total: int = 0
    done: int = 0

    def expect(self, modules: int) -> None:
        """A pass begins in which so many modules will be called once (those of shared layers more often)."""
        self.total = modules * self.passes

    def step(self) -> None:
        """An attention call was measured."""
        self.done += 1
        self.total = max(self.total, self.done)
        if self.tell is not None:
            self.tell(self.done, self.total)


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """The model in eval mode and without gradients; each module's own mode is put back at the end.

    Not `torch.inference_mode`: what a model keeps of its first forward (tables of rotary angles, say) would then be
    inference tensors, and training it later would fail.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def read_text(
    model: nn.Module, row: Sequence[int], facts: IdFacts, marks: Collection[int], sizes: Sizes, steps: Steps
) -> list[Measured]:
    """The first pass: every attention call on the text, in order."""
    tensors = inputs.rows(model, _as_ids(model, [row]), facts)
    delimiters = {ids.shape[1]: _delimiters(ids[0], marks) for ids in tensors}
    again: Counter[str] = Counter()
    uniform = Uniform()
    measured: list[Measured] = []

    def each(call: AttentionCall) -> None:
        inputs.check_heads(model.get_submodule(call.module), call)
        S = call.key.shape[2]
        at_keys = delimiters.get(S)
        if at_keys is None:
            at_keys = torch.zeros(S, dtype=torch.bool)
        measured.append(summary(call, again[call.module], at_keys.to(call.query.device), sizes, uniform))
        again[call.module] += 1
        steps.step()

    with probe(model, each) as seen:
        steps.expect(len(seen.expected))
        try:
            inputs.run(model, tensors)
        except Exception as error:
            if seen.seen == 0:  # not even one call: the fault is none of what was measured
                inputs.check_reads_nothing_else(model, error)
            raise
    return measured


def random_copies(repeats: Repeats, facts: IdFacts, marks: Collection[int], *, ahead: bool) -> list[Repeated]:
    """The sequences of the second pass, begun (and, where the model looks ahead, ended) as the text was."""
    if repeats.vocabulary is not None:
        inputs.check_fits(repeats.vocabulary, facts.vocabulary, None)
    avoided = {*facts.special.values(), *marks, facts.first}
    every = range(facts.vocabulary or 0) if repeats.vocabulary is None else repeats.vocabulary
    vocabulary = [i for i in every if repeats.vocabulary is not None or i not in avoided]
    length = min(repeats.length, facts.positions or repeats.length)
    after = [facts.last] if ahead and facts.last in {*facts.special.values(), *marks} else []
    return draw(repeats, vocabulary, length, before=[facts.opener], after=after)


def read_copies(
    model: nn.Module, drawn: Sequence[Repeated], facts: IdFacts, calls: list[Measured], steps: Steps
) -> list[Measured]:
    """The second pass: the calls again, now with duplicate-token and induction; unchanged where nothing was drawn."""
    if not drawn:
        return calls
    tensors = inputs.rows(model, _as_ids(model, [sequence.ids for sequence in drawn]), facts)
    read = {ids.shape[1]: [replace(s, ids=row) for s, row in zip(drawn, ids.tolist(), strict=True)] for ids in tensors}
    targets = {(T, ahead): as_tensors(rows, ahead=ahead) for T, rows in read.items() for ahead in (False, True)}
    uniform = Uniform()
    measured = list(calls)

    def each(call: AttentionCall) -> None:
        ahead = looks_ahead(call)
        copies = None if ahead is None else targets.get((call.query.shape[2], ahead))
        if copies is not None:
            measured[call.order] = _with_copies(calls[call.order], call, copies, uniform)
        steps.step()

    with probe(model, each) as seen:
        steps.expect(len(seen.expected))
        inputs.run(model, tensors)
    return measured


def _with_copies(before: Measured, call: AttentionCall, targets: dict[str, Tensor], uniform: Uniform) -> Measured:
    """The call's records with their scores on copies; None where no row may attend a target (a short window, say)."""
    null = uniform.of(call, {}, targets)
    level = {name: _mean(mass) for name, mass in null.targets.items() if bool(mass.any())}
    heads = of_call(call, {}, {name: targets[name] for name in level}, pool=1)
    scores = [{name: _mean(mass[:, h]) for name, mass in heads.targets.items()} for h in range(len(before.heads))]

    def filled(head: HeadRecord, score: Callable[[str], float | None]) -> HeadRecord:
        return replace(head, duplicate=score("duplicate"), induction=score("induction"))

    return replace(
        before,
        heads=tuple(filled(head, scores[head.head].get) for head in before.heads),
        uniform=filled(before.uniform, level.get),
    )


def _mean(mass: Tensor) -> float:
    return round(float(mass.double().mean()), 6)


def _delimiters(ids: Tensor, marks: Collection[int]) -> Tensor:
    """(S,) bool: which keys are delimiters; the first never is, it is the sink's."""
    is_mark = torch.isin(ids.cpu(), torch.tensor(sorted(marks), dtype=ids.dtype))
    is_mark[:1] = False
    return is_mark


def _as_ids(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, T) long on the model's device."""
    weight = next(model.parameters(), None)
    return torch.tensor(rows, dtype=torch.long, device=None if weight is None else weight.device)
