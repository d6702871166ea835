"""Read pictures and sound from untrusted files, within limits, or refuse them with one line."""

from __future__ import annotations

import io
import math
import warnings
import wave
from typing import Annotated, Any

import typer

from headwise.extras import missing_extra
from headwise.files.text import one_line

from .texts import read_file

Image = Annotated[
    str | None, typer.Option(help="An image file (PNG, JPEG, ...), in addition to the text if the model reads both.")
]
Audio = Annotated[str | None, typer.Option(help="A sound file (WAV).")]
TargetOption = Annotated[
    str | None, typer.Option(help="The text for the decoder of an encoder-decoder.", show_default="the encoder's text")
]
PairOption = Annotated[str | None, typer.Option(help="A second sentence; the model reads both as a pair.")]
"""The options of `headwise look` for inputs in addition to its text."""

MAX_PIXELS = 50_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LEAST_SOUND = 400
"""The fewest samples of a sound: one window of a spectrogram."""


def read_image(path: str) -> Any:
    """Return the picture in a file as a PIL image in RGB."""
    try:
        from PIL import Image as pil
        from PIL import ImageOps
    except ImportError as error:
        raise missing_extra("--image", "look", error) from None
    content = read_file("--image", path, "give a smaller file")
    where = f"--image {path}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of large pictures; headwise refuses them below
            image: Any = pil.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise typer.BadParameter(
                    f"{where}: {image.width:,} x {image.height:,} pixels, and at most {MAX_PIXELS // 10**6} million "
                    "are supported; scale it down"
                )
            image.load()
            return (ImageOps.exif_transpose(image) or image).convert("RGB")
    except (typer.BadParameter, MemoryError):
        raise
    except Exception as error:  # decoding an untrusted file may raise any exception
        raise typer.BadParameter(
            f"{where}: cannot be read as a picture ({_short(error)}); give a complete {', '.join(FORMATS)} file"
        ) from None


def read_sound(path: str) -> tuple[Any, int]:
    """Return the sound of a WAV file as float32 (N,), the mean of its channels from -1 to 1, and its sample rate."""
    import numpy as np

    content = read_file("--audio", path, "give a smaller file")
    where = f"--audio {path}"
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(len(content))
        whole = len(data) // (width * channels) * (width * channels)
        numbers = _numbers(data[:whole], width).reshape(-1, channels).mean(axis=1, dtype=np.float64)
    except Exception as error:  # wave.Error, EOFError, and arithmetic errors from invalid headers
        raise typer.BadParameter(
            f"{where}: cannot be read as sound ({_short(error)}); give a WAV file of 8, 16, 24 or 32 bit PCM: "
            "ffmpeg -i FILE -ac 1 -ar 16000 out.wav"
        ) from None
    if not 1000 <= rate <= 400_000:
        raise typer.BadParameter(f"{where}: the sample rate is {rate:,} per second; convert the sound to 16,000")
    if len(numbers) < LEAST_SOUND:
        raise typer.BadParameter(f"{where}: {len(numbers)} samples are too few; give at least {LEAST_SOUND}")
    return numbers.astype(np.float32), rate


def _numbers(data: bytes, width: int) -> Any:
    """Return PCM samples as numbers from -1 to 1; 8-bit samples are unsigned, all others signed."""
    import numpy as np

    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        triples = np.frombuffer(data, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(triples), 4), np.uint8)
        wide[:, 1:] = triples
        return wide.view("<i4")[:, 0] / 2.0**31
    if width in (2, 4):
        return np.frombuffer(data, f"<i{width}") / math.ldexp(1.0, 8 * width - 1)
    raise ValueError(f"{8 * width} bits per sample")


def _short(error: Exception) -> str:
    return one_line(ValueError(str(error).partition(" <_io")[0] or type(error).__name__), limit=120)
