"""Pictures of sounds and curves of training: what stands where, read back from the files and the axes."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.look import Curve, Look, Point
from headwise.look.records.images import picture_of, sound_of


def rows_of(png: bytes) -> np.ndarray:
    """The first channel, (rows, columns)."""
    return np.asarray(Image.open(io.BytesIO(png)), float)[:, :, 0]


def test_low_tones_are_at_the_bottom_and_time_goes_to_the_right() -> None:
    """Of a waveform of two tones after each other, and of the bins and frames that a model is given."""
    n = torch.arange(8000) / 16000
    low, high = (torch.sin(2 * math.pi * hertz * n) for hertz in (700.0, 6000.0))
    bins = torch.zeros(12, 40)
    bins[2, :20] = bins[9, 20:] = 1.0
    for sound in (torch.cat([low, high]), bins):
        drawn = sound_of(sound)
        assert drawn is not None and drawn.kind == "sound"
        rows = rows_of(drawn.data)
        assert rows.shape == (drawn.height, drawn.width)
        half = drawn.width // 2
        first, second = rows[:, : half - 2].mean(1).argmax(), rows[:, half + 2 :].mean(1).argmax()
        assert first > 0.7 * drawn.height and second < 0.3 * drawn.height


def test_rows_and_channels_of_a_picture_stay() -> None:
    pixels = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(1))
    drawn = picture_of(pixels)
    assert drawn is not None and (drawn.width, drawn.height) == (7, 5)
    found = np.asarray(Image.open(io.BytesIO(drawn.data)), float)
    expected = (pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255
    assert np.abs(found - expected.movedim(0, -1).numpy()).max() <= 0.51


@pytest.fixture(scope="module")
def seen() -> Look:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 12), headwise.MultiHeadAttention(12, 3))
    return look.at(model, [1, 2, 3, 5, 8, 1, 3, 4, 2], repeats=None)


def test_the_lines_of_a_formation_have_the_steps_of_their_points(seen: Look) -> None:
    """Numbers that only some points have are drawn at those steps, which are not even."""
    numbers = [{"loss": 3.5}, {}, {"loss": 2.5, "rate": 0.5}, {"rate": 0.25, "loss": 2.25}, {"rate": 0.125}]
    steps = [0, 7, 19, 101, 1009]
    curve = Curve("m", {}, tuple(Point.of(step, seen, some) for step, some in zip(steps, numbers, strict=True)))
    lower = curve.plot_formation().axes[1]
    lines = {str(line.get_label()): line for line in lower.lines}
    for name in ("loss", "rate"):
        expected = [(step, some[name]) for step, some in zip(steps, numbers, strict=True) if name in some]
        assert list(zip(lines[name].get_xdata(), lines[name].get_ydata(), strict=True)) == expected


class Described(nn.Module):
    """A text with places for pictures and sounds, whose ids the config names."""

    def __init__(self, **named: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(**named)
        self.words, self.mha = nn.Embedding(23, 12), headwise.MultiHeadAttention(12, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mha(self.words(input_ids), mask=headwise.causal()) @ self.words.weight.T


@pytest.mark.parametrize(
    ("named", "places"),
    [({}, []), ({"image_token_id": 7}, [7]), ({"image_token_index": 5, "audio_token_id": 11}, [5, 11])],
)
def test_places_of_pictures_and_sounds_are_no_words_to_predict(named: dict[str, int], places: list[int]) -> None:
    torch.manual_seed(3)
    model, ids = Described(**named), [2, 7, 7, 7, 3, 13, 5, 5, 17, 11, 19]
    found = look.importance(model, {"input_ids": torch.tensor([ids])}, by="zero")
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    counted = [-float(logits[i, word]) for i, word in enumerate(ids[1:]) if word not in places]
    assert found.loss == pytest.approx(sum(counted) / len(counted), abs=1e-5) and len(counted) == 10 - sum(
        ids.count(place) for place in places
    )
