"""What `headwise.hf.prepared` refuses before it reads anything; what it makes is in `test_cli_media.py`."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel, ViTConfig, ViTModel, WhisperConfig, WhisperModel

from headwise import hf, models

SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 8}
WAVE = np.zeros(6400, np.float32)


def loaded(model: PreTrainedModel) -> hf.Loaded:
    return hf.Loaded(model, None, "x", None, "encoder", (), None)


@pytest.mark.unchecked
def test_what_is_no_model_picture_sound_or_text_is_refused() -> None:
    vit = loaded(ViTModel(ViTConfig(**SIZES, image_size=20, patch_size=4)))
    sizes = dict(d_model=12, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3)
    whisper = loaded(
        WhisperModel(WhisperConfig(**sizes, encoder_ffn_dim=8, decoder_ffn_dim=8, max_source_positions=50))
    )
    tiny = hf.load(models.tiny_path())
    sound = "sound is a waveform (N,) and the numbers of a second; got "
    for what, inputs, message in (
        ("folder", {}, "prepared takes what headwise.hf.load gives; got 'folder'"),
        (vit.model, {}, "prepared takes what headwise.hf.load gives; got a value of type ViTModel"),
        (vit, {"image": "p.png"}, "image is a picture as PIL opens it; got 'p.png'"),
        (vit, {"image": torch.zeros(3, 8, 8)}, "image is a picture as PIL opens it; got a tensor, float32 (3, 8, 8)"),
        (whisper, {"sound": WAVE}, sound),
        (whisper, {"sound": (WAVE, "16000")}, sound),
        (whisper, {"sound": ([0.0], 16000)}, sound),
        (whisper, {"sound": (np.zeros((2, 9), np.float32), 16000)}, sound),
        (whisper, {"sound": (WAVE, 16000), "target": 3}, "target is a text; got 3"),
        (tiny, {"text": ["a"]}, "text is a text; got ['a']"),
        (tiny, {"text": "a", "pair": b"b"}, "pair is a text; got b'b'"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            hf.prepared(what, **inputs)  # type: ignore[arg-type]
    with pytest.raises(hf.ModelError, match=r"no preprocessor_config\.json"):  # a picture goes on to be read
        hf.prepared(vit, image=Image.new("RGB", (8, 8)))
