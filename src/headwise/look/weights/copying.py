"""The copying of names through W_V and W_O: does a head's value of a name raise the name's own logit, or lower it?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.probe import AttentionCall
from ...nn.hooks.unwrap import split_over
from ..interventions.gates import learning
from ..interventions.losses import SHORT, no_loss, readings
from .attribution import ending_of, frozen_norm, observed, way
from .head_matrices import written_by

FEWEST, MOST = 10, 512
"""The fewest and the most tokens that a name is compared with: among a few, one of them is the first in any head."""

HIGHEST = 0.01
"""The share of tokens that count as the highest, and as the lowest; one token at least."""


@dataclass(frozen=True, eq=False)
class Copying:
    """The logits of some tokens, names among them, as functions of what a head writes.

    Attributes:
        ids: (n,) long, the tokens.
        names: (n,) bool, those that are names.
        towards: by layer, (H, V, n): how the logit of each token, through W_O, the linear part of the final norm and
            the unembedding, depends on each number of a head's output, up to one positive factor per query. A layer
            whose heads do not reach the logits by addition is left out.
    """

    ids: Tensor
    names: Tensor
    towards: Mapping[int, Tensor]

    @classmethod
    def of(
        cls, model: nn.Module, text: Sequence[int], names: Collection[int], among: Collection[int]
    ) -> Copying | None:
        """Measure the logits of names and of other tokens on the first tokens of a text.

        Of more than 512 tokens, the names and evenly chosen others are compared. None if there are fewer than 10, if
        the model has no logits of them, or if it is split over processes, each of which has a part of W_O alone.
        """
        ids = _chosen({*names}, {*among})
        if len(ids) < FEWEST or split_over(model) > 1:
            return None
        [short] = readings(model, [text[:SHORT]], loss=no_loss, mask_id=None, seed=0)
        ending = ending_of(model, short)
        if ending is None or not ending.factors or ids[-1] >= ending.outputs:
            return None
        with learning(model):
            projections = output_projections(model, short.output)
        outs, read = observed(model, ending, short)
        chosen = torch.tensor(ids, dtype=torch.long, device="cpu")
        towards: dict[int, Tensor] = {}
        with in_eval_mode_without_grad(model):
            rows = _rows(model.get_submodule(ending.unembedding), read[ending.unembedding], chosen)
            if ending.norm is not None:
                frozen = frozen_norm(model.get_submodule(ending.norm), read[ending.norm])
                if frozen is None:
                    return None
                rows = rows @ frozen[0]
            for layer, (module, out, _) in outs.items():
                if module not in projections:
                    continue
                W = written_by(model.get_submodule(projections[module]), len(out), out.shape[2], out)
                factor, linear, _ = way(model, ending, layer, W, read)
                if factor is not None:
                    towards[layer] = factor * (W @ (rows @ linear).mT)
        return cls(chosen, torch.isin(chosen, torch.tensor([*names], device="cpu")), towards) if towards else None

    def signs(self, call: AttentionCall, keys: Tensor) -> Tensor | None:
        """Return for each key, given its token (B, S), what its value does to its token's logit: (B, H, S) long.

        1 for a name whose logit is then among the highest hundredth of all tokens, -1 for one among the lowest, 0
        otherwise and for other tokens. None for a call whose heads have no such logits.
        """
        towards = self.towards.get(call.order)
        if towards is None or call.value is None:
            return None
        H = len(towards)
        signs = torch.zeros(keys.shape[0], H, keys.shape[1], dtype=torch.long, device="cpu")
        places = torch.isin(keys, self.ids[self.names]).nonzero()
        if not len(places):
            return signs
        b, s = places.unbind(-1)
        value = call.value.transpose(1, 2)[b.to(call.value.device), s.to(call.value.device)].float()  # (P, K, V)
        value = value.repeat_interleave(H // value.shape[1], 1)
        logits = torch.einsum("phv,hvn->phn", value, towards).cpu()
        own = torch.searchsorted(self.ids, keys[b, s])[:, None, None].expand(-1, H, 1)
        mine, few = logits.gather(2, own), math.ceil(HIGHEST * len(self.ids))
        above, below = ((sign * logits >= sign * mine).sum(-1) <= few for sign in (1, -1))  # itself is one of them
        signs[b, :, s] = above.long() - below.long()
        return signs


def _chosen(names: set[int], among: set[int]) -> list[int]:
    """Return the names and the other tokens, sorted; of too many others, evenly chosen ones."""
    others = sorted(among - names)
    room = MOST - len(names)
    if len(others) > room:
        others = [others[n * len(others) // room] for n in range(room)]
    return sorted(names.union(others))


def _rows(unembedding: nn.Module, read: Tensor, ids: Tensor) -> Tensor:
    """Return the derivative of the logit of each id by the input of the unembedding, (n, M) float32."""
    with torch.enable_grad():
        leaf = torch.zeros_like(read[:1, :1]).requires_grad_()
        logits = unembedding(leaf)[0, 0, ids.to(leaf.device)]
        eye = torch.eye(len(ids), dtype=logits.dtype, device=logits.device)
        [grad] = torch.autograd.grad(logits, leaf, eye, is_grads_batched=True)
    return grad[:, 0, 0].float()
