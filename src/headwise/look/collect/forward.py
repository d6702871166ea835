"""The forward passes of a measurement: passages in, sums of every attention call out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.probe import AttentionCall, probe
from ...ops.masks import keep
from ..inputs import ids as inputs
from ..inputs.ids import IdFacts
from ..inputs.model_input import Source, View, part_of
from ..inputs.repeated_tokens import Repeated, Repeats, draw
from ..records import axes
from ..records.axes import MIXED, NOWHERE, Axis
from ..records.head import HeadMap
from ..records.vectors import Neurons, neurons_of, numbers_of
from ..roles.call_tokens import CallTokens, NameSigns, Passage, Vocabulary
from ..roles.catalog import TEXT
from ..roles.role import Role
from ..roles.spatial_measures import only
from .moved import SHORT, MovedByLayer
from .reduce import add_numbers, add_roles, check_finite, looks_ahead, measure, quantised
from .sums import ON_PICTURE, LayerTally

OnProgress = Callable[[int, int], object]


@dataclass
class Reader:
    """A model in eval mode, measured passage by passage."""

    model: nn.Module
    facts: IdFacts
    words: Vocabulary
    roles: Sequence[Role]
    sizes: tuple[int, int]  # the cells per side of a record's map, and of the large maps (a multiple of it, or 0: none)
    tell: OnProgress | None = None
    passes: int = 1  # the number of passes that are planned, for the progress
    source: Source | None = None  # the input of the main pass, if that is more than one text
    tallies: list[LayerTally] = field(default_factory=list)  # the sums so far, by attention call
    maps: list[HeadMap] = field(default_factory=list)  # of the last text
    neurons: list[Neurons] = field(default_factory=list)  # kept with the maps if the text is short
    moved: list[HeadMap] = field(default_factory=list)  # by what weights move; without cells where that is not known
    copying: NameSigns | None = None  # what heads do to the logits of the names in the annotated sentences
    done: int = 0  # the attention calls measured so far

    @property
    def kind(self) -> str:
        """The kind of the model, by the keys that its queries may attend to."""
        parts = {tally.place["part"] for tally in self.tallies}
        if "cross" in parts:
            return "encoder-decoder"
        if len(parts) > 1 and self.source is not None and self.source.call:
            return "encoder and decoder"
        return "encoder" if "encoder" in parts else "decoder"

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the calls on the main text, pictures and sound; empty if the input is one text only."""
        plain = self.source is None or not (self.source.call or self.source.own)
        return () if plain or self.source is None else tuple(self.source.axes)

    def read(self, passages: Sequence[Passage], reads: str, usual: Mapping[str, int] | None = None) -> None:
        """Run one forward pass over passages of equal length, for the roles that read this kind."""
        self.pass_over(Source.of_rows(self.model, passages, self.facts, self.source), reads, usual)

    def pass_over(self, source: Source, reads: str, usual: Mapping[str, int] | None = None) -> None:
        """Run one forward pass over the input of a source."""
        roles = [role for role in self.roles if role.reads == reads]
        scenes: dict[object, CallTokens] = {}
        again, pair = Counter[str](), inputs.is_pair(self.model)
        (small, large), total = self.sizes, 0
        pool = max(small, large) if reads == TEXT else 1
        self.maps, self.neurons, moving = [], [], MovedByLayer(self.model, pool)
        self.moved = moving.maps

        def each(call: AttentionCall) -> Tensor | None:
            inputs.check_heads(self.model.get_submodule(call.module), call)
            part = part_of(call, self.model, pair=pair)
            view = source.view(call, part, again[call.module])
            again[call.module] += 1
            ahead = None if part == "cross" else looks_ahead(call)
            tokens, passages = view.tokens, view.tokens.passages
            about = (view.over, ahead, tokens.moved, len(passages), passages[0].text)
            if about not in scenes:
                scenes[about] = replace(tokens, ahead=ahead, words=self.words, usual=usual or {}, copying=self.copying)
            scene = scenes[about]
            mixed = MIXED in scene.kinds
            here = [role for role in roles if (MIXED in role.over if mixed else scene.kinds <= role.over)]
            tally, first = self._tally(call, view, part, reads)
            if mixed:
                self._of_text(call, scene, [role for role in roles if MIXED not in role.over], tally)
            kept = bool(reads == TEXT and large and first)
            vectors = numbers_of(call) if kept and call.query.shape[2] <= SHORT else None
            out, got = measure(call, scene, here, pool, vectors)
            check_finite(got, self.model)
            add_roles(got, here, tally)
            if reads == TEXT:
                add_numbers(got, tally, small)
                if kept:
                    self.maps += quantised(got.rows.pooled[0])
                    moving.add(call, tally)
                if got.vectors is not None:
                    self.neurons.append(neurons_of(call, got.vectors))
            self.done += 1
            if self.tell is not None:
                self.tell(self.done, max(total, self.done))  # shared layers make more calls than modules
            if search is not None and out is not None:
                search.next(call.module, out)
            return out

        with_moved = reads == TEXT and large
        with probe(self.model, each) as seen, moving.search() if with_moved else nullcontext() as search:
            total = len(seen.expected) * self.passes
            try:
                source.run()
            except Exception as error:
                if seen.seen == 0 and not source.call:  # no call was reached: not an error of the measurement
                    inputs.check_reads_nothing_else(self.model, error)
                raise

    def kept(self) -> dict[str, tuple[Any, ...]]:
        """Return the maps and vectors of the last text, by the names of `headwise.look.Look`."""
        moved = self.moved if any(one.data for one in self.moved) else ()
        return {"maps": tuple(self.maps), "neurons": tuple(self.neurons), "moved": tuple(moved)}

    def _of_text(self, call: AttentionCall, scene: CallTokens, roles: Sequence[Role], tally: LayerTally) -> None:
        """Add the roles of text for a text that contains pictures: only queries that are not patches count."""
        words = torch.tensor([cell == NOWHERE for cell in scene.axes[0].cells], device="cpu")[None]
        among = keep(words[:, None, :, None].to(call.query.device))
        alone = replace(call, value=None, mask=among if call.mask is None else call.mask & among)
        roles = [role for role in roles if axes.TEXT in role.over]
        _, got = measure(alone, replace(scene, among=words, kept={}), roles, 1)
        check_finite(got, self.model)
        add_roles(got, roles, tally)
        mass, count = only(got, words.expand(call.query.shape[0], -1), ~words.expand(call.query.shape[0], -1))
        tally.add({ON_PICTURE: (mass * count).sum(0), f"{ON_PICTURE}, rows": count.sum(0)})

    def _tally(self, call: AttentionCall, view: View, part: str, reads: str) -> tuple[LayerTally, bool]:
        """Return the sums of a module's call, and whether this is its first call in the pass over the main text."""
        about = (call.module, view.again)
        tally = next((one for one in self.tallies if (one.place["module"], one.place["call"]) == about), None)
        if tally is None:
            place = {"module": call.module, "call": view.again, "part": part}
            tally = LayerTally(place, call.query.shape[1])
            self.tallies.append(tally)
        tally.is_of(part)
        first = tally.over is None
        if reads == TEXT and first:
            tally.over = view.over
        return tally, first


def random_copies(repeats: Repeats, facts: IdFacts, words: Vocabulary, *, ahead: bool) -> list[Passage]:
    """Return passages of repeated random tokens that begin (and, if the model looks ahead, end) like the text."""
    if repeats.vocabulary is not None:
        inputs.check_fits(repeats.vocabulary, facts.vocabulary, None)
    marks = {*facts.special.values(), *facts.apart, *words.delimiters}
    every = range(facts.vocabulary or 0) if repeats.vocabulary is None else repeats.vocabulary
    avoided = {*marks, facts.first} if repeats.vocabulary is None else set()
    vocabulary = [i for i in every if i not in avoided]
    length = min(repeats.length, facts.positions or repeats.length)
    after = [facts.last] if ahead and facts.last in marks else []
    drawn: Iterable[Repeated] = draw(repeats, vocabulary, length, before=[facts.opener], after=after)
    return [Passage(one.ids, copies=one, text=n) for n, one in enumerate(drawn)]


def batches(passages: Iterable[Passage], most: int) -> Iterator[list[Passage]]:
    """Yield batches of passages of equal length, without padding; at most `most` tokens, or one passage.

    Passages wait until their batch is full, at most 256 of them; a batch keeps the order of the input.
    """
    waiting: dict[int, list[Passage]] = {}
    count = 0
    for passage in passages:
        same = waiting.setdefault(len(passage.ids), [])
        same.append(passage)
        count += 1
        if (len(same) + 1) * len(passage.ids) > most:
            count -= len(same)
            yield waiting.pop(len(passage.ids))
        elif count >= 256:
            fullest = max(waiting, key=lambda n: len(waiting[n]) * n)
            count -= len(waiting[fullest])
            yield waiting.pop(fullest)
    yield from waiting.values()
