"""Roles of a choice: whether the key that a query attends most, among some, is one that it is linked to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.masks import Mask, keep, window
from ...ops.options import ScoringOptions
from ...ops.statistics.top_keys import top_keys
from .call_tokens import CallTokens
from .controls import other_queries
from .measures import NOTHING, CallStatistics, ScoreSums, StatisticsRequest


@dataclass(frozen=True)
class Argmax:
    """Share of the linked queries whose largest weight lies on a link (Clark et al.'s accuracy).

    The choice is among the candidates, links of their own name; without any, among all keys but the query's own and
    special tokens. Null: the share that is right by the baseline, links of their own name with one key each; without
    any, by one fixed offset, the best over all texts that were read. Against: a choice among the candidates at random;
    without any, the choice of another query, drawn from those that may attend the link too, so that a head which
    attends a word from everywhere gains nothing.
    """

    name: str
    candidates: str = ""
    baseline: str = ""

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Nothing of the pass: the largest keys are chosen apart."""
        return NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return how often the best key is a link."""
        links = got.scene.links(self.name)
        if got.scene.cross or links is None:
            return None
        linked = (links >= 0).any(-1)
        count = linked.sum(-1, keepdim=True).double()
        right = (self.hits(name, got) >= 0).double().sum(-1)
        null = self._baseline(links, got.scene).double().sum(-1, keepdim=True)
        if self.candidates:
            among = got.scene.links(self.candidates)
            some = torch.ones_like(count) if among is None else (among >= 0).sum(-1).clamp(min=1)
            return ScoreSums(right, count, null, ((links >= 0).sum(-1) / some).double().sum(-1, keepdim=True))
        other = got.scene.once(("other query", self.name), lambda: other_queries(links, got.scene))
        best = self._best(got).gather(2, other[:, None].expand(-1, right.shape[1], -1))
        elsewhere = (best[..., None] == links[:, None]).any(-1) & linked[:, None] & (best >= 0)
        return ScoreSums(right, count, null, elsewhere.double().sum(-1))

    def _baseline(self, links: Tensor, scene: CallTokens) -> Tensor:
        """(B, T) bool: which queries the baseline gets right."""
        if self.baseline:
            chosen = scene.links(self.baseline)
            if chosen is None:
                return torch.zeros(links.shape[:2], dtype=torch.bool, device="cpu")
            return ((links[..., None] == chosen[:, :, None]) & (links >= 0)[..., None]).any(-1).any(-1)
        back = torch.arange(links.shape[1], device="cpu")[:, None] - links
        usual = scene.usual.get(f"{self.name}, earlier" if scene.ahead is False else self.name, 0)
        return ((back == usual) & (links >= 0)).any(-1)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the best key among the candidates, where it is a link."""
        links, best = got.scene.links(self.name), self._best(got)
        if links is None:
            return torch.full_like(best, -1)
        return torch.where((best[..., None] == links[:, None]).any(-1), best, -1)

    def _best(self, got: CallStatistics) -> Tensor:
        """(B, H, T) long: the candidate of greatest weight, -1 where there is none; one for all relations."""
        return got.once(("best", self.candidates), lambda: self._choose(got))

    def _choose(self, got: CallStatistics) -> Tensor:
        call, among = got.call, self._among(got.scene, got.call.query.device)
        options: ScoringOptions = {**call.scoring, "mask": among if call.mask is None else call.mask & among}
        return top_keys(call.query, call.key, 1, **options).keys[..., 0].cpu()

    def _among(self, scene: CallTokens, device: torch.device) -> Mask:
        """Return the keys among which a query chooses."""
        (B, T), S = scene.queries.shape, scene.keys.shape[1]
        if self.candidates:
            links = scene.links(self.candidates)
            allowed = torch.zeros(B, T, S + 1, dtype=torch.bool, device="cpu")
            chosen = (allowed if links is None else allowed.scatter(2, links % (S + 1), True))[..., :S]
            return keep(chosen[:, None].to(device))
        plain = ~torch.isin(scene.keys, torch.tensor(sorted(scene.words.special), dtype=torch.long, device="cpu"))
        return keep(plain[:, None, None].to(device)) & ~window(1)
