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
from .measures import NOTHING, CallStatistics, ScoreSums, StatisticsRequest


@dataclass(frozen=True)
class Argmax:
    """Share of the linked queries whose largest weight is on a link (Clark et al.'s accuracy).

    The choice is among the candidates, links of that name; without a name, among all keys except the query's own and
    special tokens. Null: the share that the baseline gets right, links of that name with one key each; without a name,
    one fixed offset, the best over all texts that were read. Against: a random choice among the candidates; without
    candidates, the choice of another query, drawn from those that may attend to the link too, so that a head which
    attends to a word from everywhere gains nothing.
    """

    name: str
    candidates: str = ""
    baseline: str = ""

    def asks(self, name: str, scene: CallTokens) -> StatisticsRequest:
        """Return no request: the top keys are computed separately."""
        return NOTHING

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the sums of the queries whose best key is a link."""
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
        """Return (B, T) bool: the queries that the baseline gets right."""
        if self.baseline:
            chosen = scene.links(self.baseline)
            if chosen is None:
                return torch.zeros(links.shape[:2], dtype=torch.bool, device="cpu")
            return ((links[..., None] == chosen[:, :, None]) & (links >= 0)[..., None]).any(-1).any(-1)
        back = torch.arange(links.shape[1], device="cpu")[:, None] - links
        usual = scene.usual.get(f"{self.name}, earlier" if scene.ahead is False else self.name, 0)
        return ((back == usual) & (links >= 0)).any(-1)

    def hits(self, name: str, got: CallStatistics) -> Tensor:
        """Return the best key among the candidates if it is a link, else -1."""
        links, best = got.scene.links(self.name), self._best(got)
        if links is None:
            return torch.full_like(best, -1)
        return torch.where((best[..., None] == links[:, None]).any(-1), best, -1)

    def _best(self, got: CallStatistics) -> Tensor:
        """Return the candidate with the largest weight, (B, H, T) long, else -1; shared by all relations."""
        return got.once(("best", self.candidates), lambda: self._choose(got))

    def _choose(self, got: CallStatistics) -> Tensor:
        call, among = got.call, self._among(got.scene, got.call.query.device)
        options: ScoreKeywords = {**call.scoring, "mask": among if call.mask is None else call.mask & among}
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
