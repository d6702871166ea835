"""A head that is off by its mean: the mean is over all rows of its calls, however many a text has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.look import ablate

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3, 2]]


class Summarized(nn.Module):
    """A text with two rows of its own before its tokens, as registers stand before patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.own = nn.Embedding(11, 12), nn.Parameter(3 * torch.randn(2, 12))
        self.mha = headwise.MultiHeadAttention(12, 3)
        self.out = nn.Linear(12, 11)

    def forward(self, ids: Tensor) -> Tensor:
        own = self.own.expand(len(ids), -1, -1)
        x = torch.cat([own, self.words(ids)], 1)
        return self.out(self.mha(x, mask=headwise.causal())[:, 2:])


@pytest.mark.parametrize("head", range(3))
def test_the_mean_is_over_every_row_of_a_call_not_over_the_tokens_of_the_text(head: int) -> None:
    model = Summarized().eval()
    heads: list[Tensor] = []  # what the output projection reads, (T + 2, 12) of each text
    hook = model.mha.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0][0]))
    with torch.no_grad():
        for text in TEXTS:
            model(torch.tensor([text]))
    hook.remove()
    part = slice(4 * head, 4 * head + 4)
    mean = torch.cat(heads)[:, part].mean(0)

    def loss_with(fill: Tensor | None) -> float:
        losses = []
        for text, side_by_side in zip(TEXTS, heads, strict=True):
            changed = side_by_side.clone()
            if fill is not None:
                changed[:, part] = fill
            logits = model.out(model.mha.o_proj(changed))[2:]
            losses.append(nn.functional.cross_entropy(logits[:-1], torch.tensor(text[1:])))
        return float(torch.stack(losses).mean())

    with torch.no_grad():
        lost = ablate(model, TEXTS, [(0, head)], by="mean")
        assert lost.before == pytest.approx(loss_with(None), abs=1e-5)
        assert lost.after == pytest.approx(loss_with(mean), abs=1e-5)


@pytest.mark.unchecked
def test_heads_that_read_a_text_in_several_rows_are_not_switched_off() -> None:
    class Folded(Summarized):
        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.mha(self.words(ids.view(2, -1)), mask=headwise.causal())).view(1, ids.shape[1], -1)

    with pytest.raises(ValueError, match="module 'mha' made 2 rows of one text; its heads can be switched off only"):
        ablate(Folded(), [[1, 2, 3, 4]], heads=[(0, 1)])
