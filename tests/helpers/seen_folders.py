"""Checkpoints of models of pictures, sound and texts, tiny and drawn at random, and files for them to read."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_folders import quiet, tokenizer
from hf_models import VOCAB
from PIL import Image


def wav(numbers: bytes = b"\1\0" * 8000, *, channels: int = 1, width: int = 2, rate: int = 16_000) -> bytearray:
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(channels)
        made.setsampwidth(width)
        made.setframerate(rate)
        made.writeframes(numbers)
    return bytearray(file.getvalue())


def picture(side: int = 30) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


SIZES = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=8)


def write_seen(root: Path) -> None:
    """Models of pictures, sound and texts, a picture and a sound: a folder each, by what the model is called."""
    (root / "p.png").write_bytes(picture())
    (root / "s.wav").write_bytes(bytes(wav((np.sin(np.arange(6400) / 9) * 9000).astype("<i2").tobytes())))
    torch.manual_seed(0)
    vision = SIZES | dict(image_size=20, patch_size=4)
    models: dict[str, Any] = {
        "vit": transformers.ViTModel(transformers.ViTConfig(**vision)),
        "clip": transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config=SIZES | dict(vocab_size=VOCAB, max_position_embeddings=40, bos_token_id=0, eos_token_id=1),
                vision_config=vision,
                projection_dim=7,
            )
        ),
        "llava": transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=transformers.CLIPVisionConfig(**vision),
                text_config=transformers.LlamaConfig(**SIZES, vocab_size=VOCAB, num_key_value_heads=1),
                image_token_id=VOCAB - 1,
            )
        ),
        "wav2vec2": transformers.Wav2Vec2Model(
            transformers.Wav2Vec2Config(
                **SIZES, conv_dim=(5,) * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=3
            )
        ),
        "whisper": transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3,
                encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=VOCAB, num_mel_bins=8, max_source_positions=50,
                decoder_start_token_id=0, pad_token_id=0, bos_token_id=0, eos_token_id=1,
            )
        ),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=24, d_kv=8, num_layers=1, num_heads=3, d_ff=8, vocab_size=VOCAB, decoder_start_token_id=0
            )
        ),
        "bert": transformers.BertModel(transformers.BertConfig(**SIZES, vocab_size=VOCAB)),
    }  # fmt: skip
    half = dict(image_mean=[0.5] * 3, image_std=[0.25] * 3, resample=2)
    settings = {
        "vit": half | {"image_processor_type": "ViTImageProcessor", "size": {"height": 20, "width": 20}},
        "clip": half | {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20}, "crop_size": 20},
        "llava": half | {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 20}, "crop_size": 20},
        "wav2vec2": {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16000},
        "whisper": {
            "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "chunk_length": 1, "n_fft": 400,
            "hop_length": 160, "sampling_rate": 16000,
        },
    }  # fmt: skip
    special = {"bos_token": "<s>", "sep_token": {"__type": "AddedToken", "content": "[SEP]"}}
    for name, model in models.items():
        quiet(lambda model=model, name=name: model.save_pretrained(root / name))
        if name in settings:
            (root / name / "preprocessor_config.json").write_text(json.dumps(settings[name]))
        if name not in ("vit", "wav2vec2"):
            (root / name / "tokenizer.json").write_text(tokenizer())
            (root / name / "tokenizer_config.json").write_text(json.dumps(special))
