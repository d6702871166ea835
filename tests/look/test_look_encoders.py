"""The loss of models that name no words: drift of an embedding, the classes of a classifier; against plain calls."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_models import _BERT, BY_NAME, PAD, Row
from test_importance import TEXT, cut, projections
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import PreTrainedModel

from headwise.look import ablate, importance
from headwise.look.interventions.outputs import DIRECTIONS, along_directions

OTHER = [1, 13, 3, 43, 17, 13, 3]


@functools.cache
def built(head: str = "Model", **sizes: Any) -> PreTrainedModel:
    return Row("BERT", f"Bert{head}", "BertConfig", 2, "encoder", _BERT | sizes).build()


def pooled(model: Any, text: list[int]) -> Tensor:
    return model(torch.tensor([text])).last_hidden_state[0].mean(0)


def test_the_loss_of_a_bare_encoder_is_the_drift_of_its_embedding() -> None:
    model = built()
    result = importance(model, [TEXT, OTHER], by=("zero", "mean"), mask_id=3)
    assert result.loss == 0 and len(result.heads) == 8
    with torch.no_grad():
        whole = [pooled(model, text) for text in (TEXT, OTHER)]
        for head in result.heads:
            with cut(model, head.module, head.head, 4, 0.0):
                drifts = [
                    1 - cosine_similarity(pooled(model, t), w, 0) for t, w in zip((TEXT, OTHER), whole, strict=True)
                ]
            assert head.zero == pytest.approx(float(sum(drifts)) / 2, abs=1e-5)
            assert head.zero > 1e-3
    lost = ablate(model, TEXT, [(0, 1), (1, 2)])
    first, second = (cut(model, result.heads[n].module, n % 4, 4, 0.0) for n in (1, 6))
    with torch.no_grad(), first, second:
        both = float(1 - cosine_similarity(pooled(model, TEXT), whole[0], 0))
    assert lost.before == 0 and lost.after == pytest.approx(both, abs=1e-5) and lost.kl is None and not lost.places
    assert "drift of the embedding" in str(result) and "loss" not in str(result)
    assert "drift of the embedding" in str(lost) and "drift" in lost.to_json() and "loss" not in str(lost)


def test_the_slope_of_an_embedding_is_how_fast_it_turns() -> None:
    """The drift itself has no slope where all heads are on; to second order it is half the square of this number."""
    model = Row("BERT", "BertModel", "BertConfig", 2, "encoder", _BERT | dict(hidden_size=12)).build()
    result = importance(model, [TEXT, OTHER])
    assert model.config.hidden_size <= DIRECTIONS, "all directions are taken, so the number is exact"
    step = 1e-2
    for head in result.heads:
        speeds = []
        for text in (TEXT, OTHER):
            sides = []
            for sign in (1, -1):
                with torch.no_grad(), cut(model, head.module, head.head, 4, 1 + sign * step):
                    sides.append(torch.nn.functional.normalize(pooled(model, text).double(), dim=0))
            speeds.append(float((sides[0] - sides[1]).norm()) / (2 * step))
        assert head.gradient_raw == pytest.approx(sum(speeds) / 2, rel=0.01, abs=1e-4)
    assert result == replace(importance(model, [TEXT, OTHER]), seconds=result.seconds)


def test_few_directions_give_the_right_length_in_the_mean() -> None:
    width, draws = 97, 400
    vectors = torch.randn(draws, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    squares = [sum(float(s) ** 2 for s in along_directions(v[None])) / float(v.square().sum()) for v in vectors]
    assert len(along_directions(vectors[:1])) == DIRECTIONS
    mean = sum(squares) / draws
    deviation = (2 / DIRECTIONS / draws) ** 0.5  # of the mean of so many chi-squared shares
    assert abs(mean - 1) < 4 * deviation


@pytest.mark.parametrize(
    ("head", "sizes"),
    [
        ("ForSequenceClassification", dict(num_labels=3)),
        ("ForSequenceClassification", dict(num_labels=1)),
        ("ForTokenClassification", dict(num_labels=5)),
    ],
)
def test_a_classifier_is_to_choose_what_it_chooses_itself(head: str, sizes: dict[str, int]) -> None:
    """By cross entropy; one number, as a reranker gives it, is the logit of yes against no."""
    model = built(head, **sizes)

    def logits(text: list[int]) -> Tensor:
        with torch.no_grad():
            made = model(torch.tensor([text])).logits.flatten(0, -2)
        return made if made.shape[-1] > 1 else torch.cat([torch.zeros_like(made), made], -1)

    result = importance(model, [TEXT, OTHER], by=("gradient", "zero"), mask_id=3)
    chosen = [logits(text).argmax(-1) for text in (TEXT, OTHER)]

    def loss() -> list[float]:
        return [float(cross_entropy(logits(t), c)) for t, c in zip((TEXT, OTHER), chosen, strict=True)]

    before = loss()
    assert result.loss == pytest.approx(sum(before) / 2, abs=1e-5)
    names = projections(model)
    for one in result.heads:
        with cut(model, one.module, one.head, 4, 0.0):
            assert one.zero == pytest.approx(sum(loss()) / 2 - result.loss, abs=2e-5)
        assert one.module in names and one.gradient_raw is not None and one.gradient_raw > 0
    lost = ablate(model, TEXT, [(0, 1)], mask_id=3)
    assert lost.kl is None and not lost.places and lost.before == pytest.approx(before[0], abs=1e-5)


def test_what_has_neither_words_nor_classes_nor_an_embedding_is_refused() -> None:
    cases = [
        (built("ForQuestionAnswering"), "the model gave QuestionAnsweringModelOutput"),
        (BY_NAME["Llama GQA"].build().model, "the model gave BaseModelOutputWithPast"),
        (built("ForMaskedLM"), "BertForMaskedLM is an encoder: .* so it has no next token to name"),
    ]
    for model, text in cases:
        with pytest.raises(ValueError, match=text):
            importance(model, TEXT)


def test_a_decoder_with_classes_reads_one_row_at_a_time() -> None:
    """Without a padding id such a class takes no batch of several rows."""
    sizes = BY_NAME["Llama GQA"].sizes | dict(num_labels=3, pad_token_id=None)
    model = Row("Llama", "LlamaForSequenceClassification", "LlamaConfig", 2, sizes=sizes).build()
    assert PAD == 0 and model.config.pad_token_id is None
    with torch.no_grad():
        said = model(torch.tensor([TEXT])).logits
    expected = float(cross_entropy(said, said.argmax(-1)))
    assert importance(model, TEXT, by=("gradient", "zero")).loss == pytest.approx(expected, abs=1e-5)


def test_what_a_head_writes_is_a_mean_over_the_tokens_that_its_layer_reads() -> None:
    """The decoder of an encoder-decoder reads fewer tokens than the encoder, of which the loss is said."""
    model = BY_NAME["T5"].build()
    result = importance(model, [TEXT, OTHER], by="contribution")
    ids = [torch.tensor([text]) for text in (TEXT, OTHER)]
    taken: dict[str, list[Tensor]] = {}
    names = {name: part for name, part in model.named_modules() if name.endswith(".o")}
    hooks = [
        part.register_forward_pre_hook(lambda _, args, name=name: taken.setdefault(name, []).append(args[0][0]))
        for name, part in names.items()
    ]
    with torch.no_grad():
        for text in ids:
            model(text, decoder_input_ids=torch.cat([torch.tensor([[1]]), text[:, :-2]], 1))
    for hook in hooks:
        hook.remove()
    lengths = {rows[0].shape[0] for rows in taken.values()}
    assert lengths == {len(TEXT), len(TEXT) - 1}
    for head in result.heads:
        rows = torch.cat(taken[f"{head.module}.o"])
        H = sum(one.layer == head.layer for one in result.heads)
        D = rows.shape[1] // H
        part = slice(head.head * D, (head.head + 1) * D)
        written = rows[:, part] @ names[f"{head.module}.o"].weight.detach()[:, part].T
        assert head.contribution == pytest.approx(float(written.norm(dim=-1).mean()), rel=1e-4), head
