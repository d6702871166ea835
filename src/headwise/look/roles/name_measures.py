"""The measure of name movers: attention to a name, and what the head's value of that name does to its logit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .measures import CallStatistics, OnLinks, ScoreSums


@dataclass(frozen=True)
class OnNames(OnLinks):
    """Mean of the sum of A[i, j] over the linked names j whose values have a sign (`CallTokens.copying`).

    With a sign of 1, W_O v_j raises the name's own logit to the highest, with -1 it lowers it to the lowest. With 0 all
    linked names count, in calls where the sign is not known, and only there.

    Null: as for links, with the same head on names of the same sign in `against`.
    """

    sign: int = 0

    def read(self, name: str, got: CallStatistics) -> ScoreSums | None:
        """Return the mass on names of the sign; None where the sign is known and not asked for, or the reverse."""
        sums = super().read(name, got) if (self._signs(got) is None) == (self.sign == 0) else None
        if sums is None or self.sign == 0:
            return sums
        links = self._links(name, got.scene)
        assert links is not None and self.against is not None
        others = self.against(links, got.scene)
        against = self._mass(name, got, others) / got.seeing(others).clamp(min=1) * sums.count
        return ScoreSums(self._mass(name, got, links), sums.count, sums.null, against)

    def counts(self, name: str, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the key is a name that comes next, of the sign."""
        return super().counts(name, got, keys) & self._of_sign(got, keys)

    def _mass(self, name: str, got: CallStatistics, links: Tensor) -> Tensor:
        """Return the mass on the linked keys of the sign, (B, H)."""
        B, H, T, _ = got.call.query.shape
        total = torch.zeros(B, H, dtype=torch.float64, device="cpu")
        rows = torch.arange(T, device=got.call.query.device)[None, None, :, None]
        for column in links.unbind(-1):
            keys = column[:, None].expand(B, H, T)
            seen = got.allowed(rows, keys[..., None].clamp(min=0).to(rows.device))[..., 0].cpu()
            total += torch.where(self._of_sign(got, keys) & seen, got.weights_on(keys), 0.0).double().sum(-1)
        return total

    def _of_sign(self, got: CallStatistics, keys: Tensor) -> Tensor:
        """Return whether the value of each key (B, H, T) has the sign; of -1 it does not count."""
        signs = self._signs(got)
        if signs is None or self.sign == 0:
            return keys >= 0
        return (signs.gather(2, keys.clamp(min=0)) == self.sign) & (keys >= 0)

    @staticmethod
    def _signs(got: CallStatistics) -> Tensor | None:
        """Return what the value of each key does to the logit of its token, (B, H, S); None if that is not known."""
        signs = got.scene.copying
        return None if signs is None else got.once("signs", lambda: signs(got.call, got.scene.keys))
