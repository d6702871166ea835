"""Measures of a choice: whether the key with the largest weight of a query, among candidates, is one of its links."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.masks import Mask, keep, window
from ...ops.options import ScoreKeywords
from ...ops.statistics.top_keys import top_keys
from .call_tokens import CallTokens
from .controls import other_queries
from .measures import CallStatistics, Measure, ScoreSums, is_link


@dataclass(frozen=True)
class Argmax(Measure):
    """Share of the linked queries whose largest weight is on a link (Clark et al.'s accuracy).

    The choice is among the candidates, links of that name; without a name, among all keys except the query's own, the
    first and special tokens. A query with one candidate has no choice and does not count. Null: the share that the
    baseline gets right, links of that name with one key each; without a name, one fixed offset, the best over all texts
    that were read. Against: a random choice among the candidates; without candidates, the choice of another query,
    drawn from those that may attend to the link too, so that a head which attends to a word from everywhere gains
    nothing.

    The mass is the weight of the query on its choice, where that is right: which of a few candidates is largest says
    little about a head that gives all of them together next to nothing.
    """

    name: str
    candidates: str = ""
    baseline: str = ""

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the sums of the queries whose best key is a link."""
        links = got.scene.links(self.name)
        if got.scene.cross or links is None:
            return None
        best = self.judged(got)
        linked = (links >= 0).any(-1)[:, None] & self._choosing(got)
        chosen = self.counts(name, got, best)
        count, right = (rows.double().sum(-1) for rows in (linked, chosen))
        mass = torch.where(chosen, self._weights(got), 0.0).double().sum(-1)
        null = (self._baseline(links, got.scene)[:, None] & linked).double().sum(-1)
        if self.candidates:
            among = got.scene.links(self.candidates)
            some = torch.ones(links.shape[:2], device="cpu") if among is None else (among >= 0).sum(-1).clamp(min=1)
            by_chance = (((links >= 0).sum(-1) / some)[:, None] * linked).double().sum(-1)
            return ScoreSums(right, count, null, by_chance, mass=mass)
        other = got.scene.once(("other query", self.name), lambda: other_queries(links, got.scene))
        elsewhere = is_link(best.gather(2, other[:, None].expand(-1, best.shape[1], -1)), links) & linked
        return ScoreSums(right, count, null, elsewhere.double().sum(-1), mass=mass)

    def _baseline(self, links: Tensor, scene: CallTokens) -> Tensor:
        """Return (B, T) bool: the queries that the baseline gets right."""
        if self.baseline:
            chosen = scene.links(self.baseline)
            if chosen is None:
                return torch.zeros(links.shape[:2], dtype=torch.bool, device="cpu")
            return ((links[..., None] == chosen[:, :, None]) & (links >= 0)[..., None]).any(-1).any(-1)
        back = torch.arange(links.shape[1], device="cpu")[:, None] - links
        usual = scene.usual.get(f"{self.name}, earlier" if scene.ahead is False else self.name, 0)
        return ((back == usual) & (links >= 0)).any(-1)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is a link of a query that has a choice."""
        links = got.scene.links(self.name)
        assert links is not None
        return is_link(keys, links) & self._choosing(got)

    def judged(self, got: CallStatistics) -> Tensor:
        """Return the candidate with the largest weight, (B, H, T) long, else -1; shared by all relations."""
        return self._best(got)[..., 0]

    def _weights(self, got: CallStatistics) -> Tensor:
        """Return the weight of each query on its choice, (B, H, T); shared by all relations."""
        return got.once(("weights", self.candidates), lambda: got.weights_on(self.judged(got)))

    def _choosing(self, got: CallStatistics) -> Tensor:
        """Return whether a query has at least two candidates, (B, H, T) bool."""
        return self._best(got)[..., 1:].ge(0).any(-1)

    def _best(self, got: CallStatistics) -> Tensor:
        """Return the two candidates with the largest weights, (B, H, T, 2) long, -1 where there is none."""
        call = got.call

        def choose() -> Tensor:
            among = self._among(got.scene, call.query.device)
            options: ScoreKeywords = {**call.scoring, "mask": among if call.mask is None else call.mask & among}
            return top_keys(call.query, call.key, 2, **options).keys.cpu()

        return got.once(("best", self.candidates), choose)

    def _among(self, scene: CallTokens, device: torch.device) -> Mask:
        """Return the keys among which a query chooses."""
        (B, T), S = scene.queries.shape, scene.keys.shape[1]
        if self.candidates:
            links = scene.links(self.candidates)
            allowed = torch.zeros(B, T, S + 1, dtype=torch.bool, device="cpu")
            chosen = (allowed if links is None else allowed.scatter(2, links % (S + 1), True))[..., :S]
            return keep(chosen[:, None].to(device))
        plain = ~torch.isin(scene.keys, torch.tensor(sorted(scene.words.special), dtype=torch.long, device="cpu"))
        plain[:, :1] = False  # a sink if it is no special token
        return keep(plain[:, None, None].to(device)) & ~window(1)
