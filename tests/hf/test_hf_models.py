"""Every kind of model gives eager's logits through headwise: padded or not, and headwise was really called."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hf_measure import counted, distance, forward_distance
from hf_models import BY_NAME, ROWS, Row, T, inputs, logits, padding, real_rows
from torch import Tensor
from transformers import PreTrainedModel

from headwise.hf import returned

MODELS: dict[str, PreTrainedModel] = {}


def model_of(row: Row) -> PreTrainedModel:
    """Built once; every test leaves it under eager."""
    if row.name not in MODELS:
        MODELS[row.name] = row.build()
    return MODELS[row.name]


@pytest.fixture(params=ROWS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


def sides(row: Row) -> tuple[str, ...]:
    return ("none",) if row.kind == "vision" else ("none", "left", "right", "holes")


def test_logits_are_those_of_eager(row: Row) -> None:
    for side in sides(row):
        error = forward_distance(row, model_of(row), side)
        assert error.ours <= error.budget, f"{row.name}, padding {side}: {error}"
        assert error.to_eager <= 1e-5 * error.scale, f"{row.name}, padding {side}: {error}"


def test_without_any_attention_mask(row: Row) -> None:
    error = forward_distance(row, model_of(row), "none", masked=False)
    assert error.ours <= error.budget, f"{row.name}: {error}"


def test_every_call_comes_through_headwise_and_each_counts(row: Row) -> None:
    """Zeroing head 0 of any one call moves the logits: no call is made and then not used."""
    model, arguments = model_of(row), inputs(row)
    model.set_attn_implementation("headwise")
    try:
        with counted() as calls:
            before = logits(model, arguments)
        assert len(calls) == row.calls
        for one in range(row.calls):

            def gate(call: int, query: Tensor, one: int = one) -> Tensor | None:
                return torch.tensor([0.0] + [1.0] * (query.shape[1] - 1)) if call == one else None

            with counted(gate):
                moved = (logits(model, arguments) - before).abs().max()
            assert moved > 1e-3 * before.abs().max(), f"{row.name}: gating call {one} of {row.calls} changes nothing"
    finally:
        model.set_attn_implementation("eager")
    with counted() as calls:
        logits(model, arguments)
    assert calls == []


def test_attentions_asked_for_are_the_real_weights(row: Row) -> None:
    model, arguments = model_of(row), inputs(row, "none" if row.kind == "vision" else "left")
    outputs: dict[str, Any] = {}
    for name in ("eager", "headwise"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            outputs[name] = model(**arguments, output_attentions=True)
    model.set_attn_implementation("eager")
    parts = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    count = 0
    for eager, ours in (
        _both(outputs, "text_model_output"),
        _both(outputs, "vision_model_output"),
        _both(outputs, None),
    ):
        for part in parts:
            if eager is None or eager.get(part) is None:
                continue
            assert len(ours[part]) == len(eager[part]), f"{row.name}: {part}"
            for layer, (a, b) in enumerate(zip(ours[part], eager[part], strict=True)):
                count += 1
                assert a.shape == b.shape
                real = _real_queries(b)
                torch.testing.assert_close(a * real, b * real, atol=2e-6, rtol=1e-5, msg=f"{row.name} {part} {layer}")
    assert count == row.calls


def _both(outputs: dict[str, Any], part: str | None) -> tuple[Any, Any]:
    eager, ours = outputs["eager"], outputs["headwise"]
    return (eager, ours) if part is None else (eager.get(part), ours.get(part))


def _real_queries(weights: Tensor) -> Tensor:
    """(B, 1, T, 1): queries of padding mean nothing, and eager fills those without any key by a mean."""
    length = weights.shape[2]
    return padding("left", length).bool()[:, None, :, None] if length in (T, 7) else torch.ones(1, 1, 1, 1)


def test_attentions_are_computed_only_when_asked_for() -> None:
    row = BY_NAME["Llama GQA"]
    model = model_of(row)
    model.set_attn_implementation("headwise")
    with mock.patch.object(returned, "weights", side_effect=AssertionError("nobody asked")):
        logits(model, inputs(row))
    model.set_attn_implementation("eager")


FAULTS = {
    "mask": ("Mistral window", "left"),
    "sinks": ("gpt-oss sinks", "none"),
    "softcap": ("Gemma2 softcap", "none"),
    "scale": ("Gemma2 softcap", "none"),
}


@pytest.mark.parametrize("dropped", FAULTS)
def test_an_argument_that_were_dropped_would_show(dropped: str) -> None:
    """The tolerance is far below what any argument does: each fault planted moves the logits by a hundred budgets."""
    name, side = FAULTS[dropped]
    row, real = BY_NAME[name], returned.attention

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs | {dropped: None})

    with mock.patch.object(returned, "attention", faulty):
        error = distance(model_of(row), lambda m: logits(m, inputs(row, side)), real_rows(row, side))
    assert error.ours > 100 * error.budget, f"{dropped}: {error}"


def test_a_window_is_shorter_than_the_text() -> None:
    """Or the rows with windows would prove nothing about them."""
    for row in ROWS:
        window = row.sizes.get("sliding_window") or row.sizes.get("attention_chunk_size")
        assert window is None or window < T / 2


@pytest.mark.parametrize("name", ["Llama GQA", "BERT", "Gemma2 softcap", "gpt-oss sinks", "T5"])
def test_training_gives_eagers_gradients(name: str) -> None:
    row = BY_NAME[name]
    model = row.build().train()
    for part in model.modules():  # dropout draws other numbers in another order
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for key in ("attention_dropout", "dropout"):
            if isinstance(getattr(part, key, None), float):
                setattr(part, key, 0.0)
    grads: dict[str, list[Tensor]] = {}
    for implementation in ("eager", "headwise"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs(row, "right")).logits[real_rows(row, "right")].square().mean().backward()
        grads[implementation] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(grads["eager"]) == len(grads["headwise"]) > 10
    for a, b in zip(grads["headwise"], grads["eager"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype) -> None:
    for name in ("Llama GQA", "gpt-oss sinks", "T5"):
        row = BY_NAME[name]
        model = row.build().to(dtype)
        model.set_attn_implementation("headwise")
        out = logits(model, inputs(row, "left"))
        assert out.dtype == dtype
        exact = logits(model_of(row), inputs(row, "left"))
        real = real_rows(row, "left")
        assert (out.float() - exact)[real].abs().max() < 40 * torch.finfo(dtype).eps * exact.abs().max()
