"""One text for a model, its labels, and the loss on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...nn.hooks.eval_mode import in_eval_mode_without_grad
from ...nn.hooks.probe import AttentionCall, probe
from ...shapes import describe
from ...shapes.arguments import check_counts, shown
from ..collect.reduce import looks_ahead
from ..inputs import ids as inputs
from ..inputs.ids import IGNORED, TEXTS, IdFacts
from .outputs import Kind, along_directions, as_classes, drift, embedding, kind_of

Loss: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(output of the model, ids (B, T)) -> (B,), the loss of each row."""

FEW = 8
SHORT = 8
"""The number of tokens of a text on which the parts of a model, such as its output projections, are found."""

MASKED = 0.15
"""The share of words that are masked for an encoder, as in its training (Devlin et al. 2019)."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One text for one model, or one picture or sound."""

    inputs: tuple[Tensor, ...]  # (1, T): the ids, and for an encoder-decoder those of its decoder; or all is in `call`
    labels: Tensor  # (1, T') long: the correct id for the logits at each position; -100 at positions without a loss
    vocabulary: int = 1  # the number of ids of the model, or 1 if unknown
    loss: Loss | None = None  # the user's function, instead of cross entropy with the labels
    call: Mapping[str, Tensor] = field(default_factory=dict)  # the model's arguments, if they are more than a text
    classes: bool = False  # whether the logits are of classes, and the labels the predictions of the unchanged model
    embedded: Tensor | None = None  # (1, M): the embedding of the unchanged model, from which the loss is the drift
    last: bool = False  # whether only the logits of the last position are needed

    def output(self, model: nn.Module, rows: int = 1) -> Any:
        """Return the output of the model for the text, repeated in `rows` rows."""
        call = {name: x.expand(rows, *x.shape[1:]) if rows > 1 else x for name, x in self.call.items()}
        ids, target = (*(ids.expand(rows, -1) for ids in self.inputs), None, None)[:2]
        return inputs.forward(model, ids, target, call, last=self.last)

    def losses(self, model: nn.Module, rows: int = 1) -> Tensor:
        """Return the mean loss of each row, (rows,) float32, with gradients."""
        output = self.output(model, rows)
        if self.loss is not None:
            return checked_losses(self.loss(output, self.inputs[0].expand(rows, -1)), rows)
        if self.embedded is not None:
            return drift(embedding(output), self.embedded)
        return self.cross_entropy(logits_of(output, self.labels.shape[1], classes=self.classes or bool(self.call)))

    @property
    def measure(self) -> str:
        """What the losses are: ``"drift"`` of an embedding, or ``"loss"``."""
        return "drift" if self.embedded is not None and self.loss is None else "loss"

    def scalars(self, model: nn.Module) -> list[Tensor]:
        """Return scalars to differentiate: the loss, or embedding components (the drift's gradient is 0)."""
        if self.embedded is not None and self.loss is None:
            return along_directions(embedding(self.output(model)))
        return [self.losses(model).sum()]

    def halves(self, model: nn.Module) -> list[Tensor]:
        """Return the parts of the loss from the first and the second half of the counted positions; they sum to it."""
        places = self.counted.tensor_split(2)
        logits = logits_of(self.output(model), self.labels.shape[1], classes=self.classes or bool(self.call))[0].float()
        total = sum(map(len, places))
        return [
            nn.functional.cross_entropy(logits[half], self.labels[0, half], reduction="sum") / total for half in places
        ]

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross entropy (B,) over the counted positions, in nats; logits are (B, T', vocabulary)."""
        counted = self.labels[0] != IGNORED
        rows = [nn.functional.cross_entropy(row[counted].float(), self.labels[0, counted]) for row in logits]
        return torch.stack(rows)

    @property
    def counted(self) -> Tensor:
        """The positions whose loss counts."""
        return (self.labels[0] != IGNORED).nonzero().flatten()

    @property
    def width(self) -> int:
        """The number of tokens of a row; for a picture or sound, the longest axis of its tensor."""
        return max([ids.shape[1] for ids in self.inputs] + [max(x.shape[1:], default=1) for x in self.call.values()])

    @property
    def tokens(self) -> int:
        """The number of tokens of text: the encoder's, or the decoder's if only the decoder reads a text."""
        ids = [*self.inputs, *(self.call[name] for name in TEXTS if name in self.call)]
        return ids[0].shape[1] if ids else 0

    @property
    def many(self) -> bool:
        """True if copies can run in one batch; classifiers need a padding id for that, to find the last token."""
        return not self.classes and all(x.shape[0] == 1 for x in self.call.values())

    @property
    def names_words(self) -> bool:
        """True if the loss is over words that the model predicts."""
        return self.loss is None and not self.classes and self.embedded is None


def logits_of(output: Any, length: int, *, classes: bool = False) -> Tensor:
    """Return the logits (B, T, vocabulary) of an output, with `classes` also (B, classes), or raise ValueError."""
    logits = logits_in(output)
    if classes and isinstance(logits, Tensor) and logits.ndim in (2, 3):
        logits = as_classes(logits)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] != length:
        got = describe(logits) if isinstance(logits, Tensor) else type(output).__name__
        raise ValueError(
            f"a loss on the next token needs logits (B, T, vocabulary) with T = {length}; the model gave {got}; load "
            "it with its language-modelling head, or give loss=, a function (output, ids) -> (B,)"
        )
    return logits


def logits_in(output: Any) -> Any:
    """Return the value in place of the logits: the output itself, its ``logits``, or the first of a tuple."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", output)
    return logits[0] if isinstance(logits, tuple) and logits else logits


def checked_losses(losses: object, rows: int) -> Tensor:
    """Return the result of the user's loss; raise ValueError if it is not one float for each row."""
    if not isinstance(losses, Tensor) or losses.shape != (rows,) or not losses.is_floating_point():
        raise ValueError(
            f"a loss or metric gives a float for each row of the batch, ({rows},), as several run side by side; got "
            f"{shown(losses)}; reduce over tokens alone"
        )
    return losses.float()


def texts_of(ids: object) -> list[list[int]]:
    """Return one text or several as lists of ids: ids (T,) or (N, T), or a list of texts; raise as `as_row` does."""
    rows: Any = [*ids] if getattr(ids, "ndim", 0) == 2 else ids  # type: ignore[misc]
    first = rows[0] if isinstance(rows, Sequence) and not isinstance(rows, str) and rows else None
    if getattr(first, "ndim", isinstance(first, Sequence)):
        return [inputs.as_row(text) for text in rows]
    return [inputs.as_row(ids)]


def one_text(ids: object, least: int, what: str) -> list[int]:
    """Return one text of at least `least` tokens; raise ValueError, which says what is measured, for others."""
    texts = texts_of(ids)
    if len(texts) == 1 and len(texts[0]) >= least:
        return texts[0]
    got = ", ".join(str(len(text)) for text in texts)
    out = f"{got}; give a longer text" if len(texts) == 1 else f"{len(texts)} texts, of {got} tokens; give one of them"
    raise ValueError(f"{what} on one text of at least {least} tokens; got {out}")


def readings(
    model: nn.Module, texts: Sequence[Sequence[int]], *, loss: Loss | None, mask_id: int | None, seed: int
) -> list[Reading]:
    """Return a reading of each text; raise TypeError or ValueError for what does not fit the model.

    The decoder of an encoder-decoder repeats the text; a decoder predicts the next token; for an encoder with a
    `mask_id`, 15 % of the words (at least one, never the first or last token) are masked and predicted. A classifier
    must predict the same classes as with all heads, an encoder without a head must give the same embedding.
    """
    inputs.check_reads_text(model)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss is a function (output, ids) -> (B,), or None; got {shown(loss)}")
    check_counts(seed=seed)
    if mask_id is not None:
        check_counts(mask_id=mask_id)
    made: list[Reading] = []
    kind: Kind = "words"
    generator = random.Random(seed)
    for row in texts:
        facts = IdFacts.of(model, row)
        inputs.check_fits([*row, *([] if mask_id is None else [mask_id])], facts.vocabulary, None)
        inputs.check_fits(row, facts.vocabulary, facts.positions)
        if len(row) < 3 and loss is None:
            raise ValueError(f"a loss needs a text of at least 3 tokens; got {len(row)}; give a longer text")
        ids = torch.tensor([row], dtype=torch.long, device=inputs.device_of(model))
        if loss is None and not made:
            kind = _kind(model, ids, facts, mask_id)
        if kind == "words":
            made.append(Reading(*_said(model, ids, facts, mask_id, generator), facts.vocabulary or 1, loss))
        else:
            made.append(_as_whole(model, ids, kind))
    return made


def _said(
    model: nn.Module, ids: Tensor, facts: IdFacts, mask_id: int | None, generator: random.Random
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs of the model, and the labels of its logits."""
    _, target = inputs.rows(model, ids, facts)
    if target is not None:  # the decoder reads its start id, then the text
        return (ids, target), ids[:, : target.shape[1]]
    labels = torch.full_like(ids, IGNORED)
    if mask_id is None:
        labels[:, :-1] = ids[:, 1:]
        return (ids,), labels
    T = ids.shape[1]
    places = sorted(generator.sample(range(1, T - 1), max(1, round(MASKED * (T - 2)))))
    labels[:, places] = ids[:, places]
    masked = ids.clone()
    masked[:, places] = mask_id
    return (masked,), labels


def _kind(model: nn.Module, ids: Tensor, facts: IdFacts, mask_id: int | None) -> Kind:
    """Return the kind of the model's output for a text; raise ValueError for an encoder of words without `mask_id`."""
    if inputs.is_pair(model):
        return "words"
    ahead: list[str] = []

    def each(call: AttentionCall) -> None:
        if looks_ahead(call):
            ahead.append(call.module)

    few = Reading((ids[:, :FEW],), ids)
    with torch.no_grad(), probe(model, each):
        output = few.output(model)
    kind = kind_of(output, few.inputs[0].shape[1], facts.vocabulary, is_encoder=bool(ahead))
    if kind == "words" and ahead and mask_id is None and isinstance(logits_in(output), Tensor):
        raise ValueError(
            f"{type(model).__name__} is an encoder: in {ahead[0]!r} a token sees those after it, so it has no next "
            "token to name; name its mask token (mask_token) in tokenizer_config.json, or in Python give mask_id=, the "
            "id of that token, or loss=, a function (output, ids) -> (B,)"
        )
    return kind


def _as_whole(model: nn.Module, ids: Tensor, kind: Kind) -> Reading:
    """Return a text with the result of the unchanged model: its classes as labels, or its embedding."""
    text = Reading((ids,), torch.zeros(1, 0, dtype=torch.long, device=ids.device))
    with in_eval_mode_without_grad(model), probe(model, lambda call: None):
        output = text.output(model)
    if kind == "embedding":
        return replace(text, embedded=embedding(output))
    logits = as_classes(logits_in(output))
    return replace(text, labels=logits.argmax(-1), vocabulary=logits.shape[-1], classes=True)


def no_loss(output: Any, ids: Tensor) -> Tensor:
    """Return 0 for each row: the loss of a run whose loss is not read."""
    return torch.zeros(len(ids), device="cpu")
