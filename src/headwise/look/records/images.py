"""Images of the inputs: pictures as the model received them, and sound as a spectrogram."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...shapes.arguments import check_counts, check_numbers, check_texts, shown
from .schema import PlainRecord

MOST_SIDE = 448
"""The most pixels per side that are kept."""

BINS, FRAMES = 96, 400
"""The most rows and columns of a spectrogram computed from a waveform."""

SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture(PlainRecord):
    """A picture, or a sound as a picture: time to the right, frequency upwards.

    Attributes:
        kind: ``"picture"`` or ``"sound"``.
        width: the width in pixels.
        height: the height in pixels.
        data: a PNG file.
        seconds: the duration of a sound, if known.
    """

    CALLED = "a picture is"

    kind: str
    width: int
    height: int
    data: bytes
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_texts(kind=self.kind)
        check_counts(1, width=self.width, height=self.height)
        if not isinstance(self.data, bytes) or not self.data.startswith(SIGNATURE):
            raise ValueError(f"a picture's data is a PNG file, as bytes; got {shown(self.data)}")
        if self.seconds is not None:
            check_numbers(seconds=self.seconds)


def picture_of(pixels_CHW: Tensor) -> Picture | None:
    """Return a model's pixel values as a picture, with the smallest as black and the largest as white.

    None if they are not a picture: not 1 or 3 channels, or a number that is not finite.

    >>> picture_of(torch.tensor([[[0.0, 1.0]]])).width
    2
    """
    x = pixels_CHW.detach().float().cpu()
    if x.ndim != 3 or x.shape[0] not in (1, 3) or 0 in x.shape or not bool(x.isfinite().all()):
        return None
    step = -(-max(x.shape[1:]) // MOST_SIDE)
    x = x[:, : x.shape[1] // step * step, : x.shape[2] // step * step] if min(x.shape[1:]) >= step else x
    if step > 1 and min(x.shape[1:]) >= step:
        x = torch.nn.functional.avg_pool2d(x, step)
    return _drawn("picture", _spread(x).expand(3, -1, -1).movedim(0, -1))


def patched(flat: Tensor, grid: tuple[int, ...], side: int, patch: int) -> Tensor | None:
    """Return the first frame of a picture, (3, rows, columns), from one row of numbers per patch, block by block.

    `flat` is (frames x rows x columns, channels x times x patch x patch), `grid` (frames, rows, columns); None if
    they do not fit.
    """
    _, r, c = grid
    if flat.ndim != 2 or flat.shape[0] < r * c or r % side or c % side or flat.shape[1] % (3 * patch * patch):
        return None
    x = flat[: r * c].view(r // side, c // side, side, side, 3, -1, patch, patch)[:, :, :, :, :, 0]
    return x.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, r * patch, c * patch)


def sound_of(sound: Tensor) -> Picture | None:
    """Return a waveform (N,), or a model's input (bins, frames), as a spectrogram; None for anything else."""
    x = sound.detach().float().cpu()
    if not bool(x.isfinite().all()) or not x.numel():
        return None
    if x.ndim == 1:
        window = min(400, len(x))
        hop = max(1, len(x) // FRAMES)
        spectrum = torch.stft(x, window, hop, window=torch.hann_window(window, device="cpu"), return_complex=True).abs()
        rows = min(BINS, spectrum.shape[0])
        x = torch.nn.functional.adaptive_avg_pool2d(spectrum[None], (rows, min(FRAMES, spectrum.shape[1])))[0]
        x = (x + 1e-4 * float(x.max()) + 1e-12).log()
    elif x.ndim == 2:
        x = torch.nn.functional.adaptive_avg_pool2d(x[None], (min(BINS, len(x)), min(2 * FRAMES, x.shape[1])))[0]
    else:
        return None
    return _drawn("sound", _spread(x.flip(0))[..., None].expand(-1, -1, 3))


def _spread(x: Tensor) -> Tensor:
    """Return the values scaled to 0 to 255, from the smallest to the largest."""
    low, high = x.min(), x.max()
    return (255 * (x - low) / (high - low).clamp(min=1e-12)).round().to(torch.uint8)


def _drawn(kind: str, pixels: Tensor) -> Picture:
    array = pixels.contiguous().numpy()
    return Picture(kind, array.shape[1], array.shape[0], png(array))


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    r"""Return (height, width, 3) bytes as a PNG file.

    >>> png(np.zeros((1, 1, 3), np.uint8))[:4]
    b'\x89PNG'
    """
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # first byte: PNG filter 2, which subtracts the row above
    flat = pixels.reshape(height, 3 * width)
    lines[:, 1:] = flat
    lines[1:, 1:] -= flat[:-1]
    lines[1:, 0] = 2
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
