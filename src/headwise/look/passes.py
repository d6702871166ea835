"""The forward passes of a look: passages in, sums of every attention call out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..nn.probe import AttentionCall, probe
from . import inputs
from .inputs import IdFacts
from .measure import Sizes, Uniform, add_numbers, add_roles, looks_ahead, measure, quantised
from .neurons import Neurons, vectors_of
from .records import HeadMap
from .repeats import Repeated, Repeats, draw
from .roles import TEXT, Role
from .scene import Passage, Scene, Vocabulary
from .tally import LayerTally

Progress = Callable[[int, int], object]

SHORT = 1024
"""Most queries of a call whose vectors are kept: the weights among them come from whole rows, which cost time."""


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


@dataclass
class Reader:
    """One model, read passage by passage.

    Attributes:
        model: in eval mode.
        facts: what it says of its ids.
        words: the ids by what they are.
        roles: what is looked for.
        sizes: of the maps; a large one of 0 cells makes none.
        steps: of the progress.
        tallies: what was summed so far, by attention call.
        maps: the large maps of the last text.
        neurons: queries, keys and values of its first tokens, kept with the large maps where it is short.
    """

    model: nn.Module
    facts: IdFacts
    words: Vocabulary
    roles: Sequence[Role]
    sizes: Sizes
    steps: Steps
    tallies: list[LayerTally] = field(default_factory=list)
    maps: list[HeadMap] = field(default_factory=list)
    neurons: list[Neurons] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """What the model is, by where its queries may look."""
        parts = {tally.place["part"] for tally in self.tallies}
        return "encoder-decoder" if "cross" in parts else "encoder" if "encoder" in parts else "decoder"

    def read(self, passages: Sequence[Passage], reads: str, usual: Mapping[str, int] | None = None) -> None:
        """One forward pass over passages of one length, for the roles that read such."""
        roles = [role for role in self.roles if role.reads == reads]
        tensors = inputs.rows(self.model, _as_ids(self.model, [passage.ids for passage in passages]), self.facts)
        scenes: dict[tuple[int, int, bool | None], Scene] = {}
        uniform, again = Uniform(), Counter[str]()
        self.maps, self.neurons = [], []

        def each(call: AttentionCall) -> Tensor | None:
            inputs.check_heads(self.model.get_submodule(call.module), call)
            _check_rows(call, len(passages))
            ahead = looks_ahead(call)
            shape = (call.query.shape[2], call.key.shape[2], ahead)
            if shape not in scenes:
                scenes[shape] = _scene(tensors, shape, self.words, passages, usual or {})
            pool = max(self.sizes.small, self.sizes.large) if reads == TEXT else 1
            out, got = measure(call, scenes[shape], roles, pool, uniform)
            tally = self._tally(call, again[call.module], ahead)
            again[call.module] += 1
            add_roles(got, roles, tally)
            if reads == TEXT:
                add_numbers(got, tally, self.sizes.small)
                if self.sizes.large:
                    self.maps += [quantised(one) for one in got.rows.pooled[0]]
                    if shape[0] <= SHORT:
                        self.neurons.append(vectors_of(call))
            self.steps.step()
            return out

        with probe(self.model, each) as seen:
            self.steps.expect(len(seen.expected))
            try:
                inputs.run(self.model, tensors)
            except Exception as error:
                if seen.seen == 0:  # not even one call: the fault is none of what was measured
                    inputs.check_reads_nothing_else(self.model, error)
                raise

    def _tally(self, call: AttentionCall, again: int, ahead: bool | None) -> LayerTally:
        """The sums of a call, by its order in the forward."""
        part = "cross" if ahead is None else "encoder" if ahead else "decoder"
        if call.order == len(self.tallies):
            place = {"module": call.module, "call": again, "part": part}
            self.tallies.append(LayerTally(place, call.query.shape[1]))
        self.tallies[call.order].is_of(part)
        return self.tallies[call.order]


def _check_rows(call: AttentionCall, texts: int) -> None:
    if call.query.shape[0] != texts:
        raise ValueError(
            f"module {call.module!r} made {call.query.shape[0]} rows of {texts} text{'s' * (texts > 1)}; look reads "
            "models that keep a text in one row"
        )


def _scene(
    tensors: tuple[Tensor, ...],
    shape: tuple[int, int, bool | None],
    words: Vocabulary,
    passages: Sequence[Passage],
    usual: Mapping[str, int],
) -> Scene:
    """What stands behind a call's queries and keys: told by their number, which differs between encoder and decoder."""
    T, S, ahead = shape
    by_length = {ids.shape[1]: (ids.cpu(), place) for place, ids in reversed(list(enumerate(tensors)))}
    known = T in by_length and S in by_length
    blank = [torch.full((len(passages), n), -1) for n in (T, S)]
    queries, moved = by_length[T] if known else (blank[0], 0)
    keys, before = by_length[S] if known else (blank[1], 0)
    return Scene(queries, keys, ahead, words, tuple(passages), (moved, before), known, usual)


def random_copies(repeats: Repeats, facts: IdFacts, words: Vocabulary, *, ahead: bool) -> list[Passage]:
    """Random tokens repeated, begun (and, where the model looks ahead, ended) as the text was."""
    if repeats.vocabulary is not None:
        inputs.check_fits(repeats.vocabulary, facts.vocabulary, None)
    marks = {*facts.special.values(), *words.delimiters}
    every = range(facts.vocabulary or 0) if repeats.vocabulary is None else repeats.vocabulary
    avoided = {*marks, facts.first} if repeats.vocabulary is None else set()
    vocabulary = [i for i in every if i not in avoided]
    length = min(repeats.length, facts.positions or repeats.length)
    after = [facts.last] if ahead and facts.last in marks else []
    drawn: Iterable[Repeated] = draw(repeats, vocabulary, length, before=[facts.opener], after=after)
    return [Passage(one.ids, copies=one, text=n) for n, one in enumerate(drawn)]


def batches(passages: Iterable[Passage], most: int) -> Iterator[list[Passage]]:
    """Passages of equal length together, so that nothing is padded; at most `most` tokens at once, or one passage.

    Passages wait until their batch is full, at most 256 of them; the order within a batch is that of reading.
    """
    waiting: dict[int, list[Passage]] = {}
    held = 0
    for passage in passages:
        same = waiting.setdefault(len(passage.ids), [])
        same.append(passage)
        held += 1
        if (len(same) + 1) * len(passage.ids) > most:
            held -= len(same)
            yield waiting.pop(len(passage.ids))
        elif held >= 256:
            fullest = max(waiting, key=lambda n: len(waiting[n]) * n)
            held -= len(waiting[fullest])
            yield waiting.pop(fullest)
    yield from waiting.values()


def numbered(passages: Iterable[Passage]) -> Iterator[Passage]:
    """The passages, each with its number."""
    return (replace(passage, text=n) for n, passage in enumerate(passages))


def _as_ids(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, T) long on the model's device."""
    weight = next(model.parameters(), None)
    return torch.tensor([list(row) for row in rows], dtype=torch.long, device=None if weight is None else weight.device)
