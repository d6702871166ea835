"""The copying of names through W_V and W_O: does a head's value of a name raise the name's own logit, or lower it?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import resting
from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.probe import AttentionCall
from ...nn.hooks.unwrap import split_over
from ..interventions.gates import learning
from ..interventions.losses import no_loss, readings
from .attribution import ending_of, frozen_norm, observed, way
from .head_matrices import written_by

SHORT = 8
"""The number of tokens on which the end of the model is found."""

FEWEST = 3
"""The fewest names: of two the one is above the other in any head."""


@dataclass(frozen=True, eq=False)
class Copying:
    """The logits of some tokens, the names, as functions of what a head writes.

    Attributes:
        ids: (n,) long, the tokens.
        towards: by layer, (H, V, n): how the logit of each token, through W_O, the linear part of the final norm and
            the unembedding, depends on each number of a head's output, up to one positive factor per query. A layer
            whose heads do not reach the logits by addition is left out.
    """

    ids: Tensor
    towards: Mapping[int, Tensor]

    @classmethod
    def of(cls, model: nn.Module, text: Sequence[int], ids: Collection[int]) -> Copying | None:
        """Measure it on the first tokens of a text; None if there are fewer than 3 tokens or the model has no logits.

        None too for a model that is split over processes: each has a part of W_O alone.
        """
        if len({*ids}) < FEWEST or split_over(model) > 1:
            return None
        [short] = readings(model, [text[:SHORT]], loss=no_loss, mask_id=None, seed=0)
        ending = ending_of(model, short)
        if ending is None or not ending.factors or max(ids) >= ending.outputs:
            return None
        with learning(model):
            projections = output_projections(model, lambda model: short.output(model))
        outs, read = observed(model, ending, short)
        chosen = torch.tensor(sorted({*ids}), dtype=torch.long, device="cpu")
        towards: dict[int, Tensor] = {}
        with resting(model):
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
        return cls(chosen, towards) if towards else None

    def signs(self, call: AttentionCall, keys: Tensor) -> Tensor | None:
        """Return for each key, given its token (B, S), what its value does to its token's logit: (B, H, S) long.

        1 if no other name's logit rises more, -1 if no other name's falls more, 0 otherwise and for other tokens. None
        for a call whose heads have no such logits.
        """
        towards = self.towards.get(call.order)
        if towards is None or call.value is None:
            return None
        value = call.value.float().repeat_interleave(len(towards) // call.value.shape[1], 1)
        logits = (value @ towards.to(value.device)).cpu()  # (B, H, S, n)
        own = (keys[..., None] == self.ids)[:, None]
        mine = torch.where(own, logits, 0.0).sum(-1, keepdim=True)
        others = torch.where(own, torch.nan, logits)
        above, below = ((sign * mine > sign * others) | own for sign in (1, -1))
        return (above.all(-1).long() - below.all(-1).long()) * own.any(-1)


def _rows(unembedding: nn.Module, read: Tensor, ids: Tensor) -> Tensor:
    """Return the derivative of the logit of each id by the input of the unembedding, (n, M) float32."""
    with torch.enable_grad():
        leaf = torch.zeros_like(read[:1, :1]).requires_grad_()
        logits = unembedding(leaf)[0, 0, ids.to(leaf.device)]
        eye = torch.eye(len(ids), dtype=logits.dtype, device=logits.device)
        [grad] = torch.autograd.grad(logits, leaf, eye, is_grads_batched=True)
    return grad[:, 0, 0].float()
