"""Draws a picture and makes a sound to look at: shapes by PIL, tones by a formula; nothing is downloaded.

    python scripts/draw_scene.py scene.png tones.wav
    python scripts/draw_scene.py scene.png --report scene.html     # the report of heads that do one job each, on it

The picture has a sky, a sun, a house, a tree and a path; the sound a rising tone, silence, and a chord.
"""

from __future__ import annotations

import argparse
import math
import struct
import wave
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIDE, RATE, SECONDS = 448, 16_000, 2.0


def scene(side: int = SIDE) -> Image.Image:
    """A house in the country, (side, side)."""
    image = Image.new("RGB", (side, side))
    draw = ImageDraw.Draw(image)
    unit = side / 14

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return left * unit, top * unit, right * unit, bottom * unit

    for y in range(side):  # a sky that grows pale towards the ground, and a meadow
        part = y / side
        colour = (90 + int(120 * part), 150 + int(80 * part), 235) if part < 0.64 else (70, 140 + int(40 * part), 60)
        draw.line((0, y, side, y), fill=colour)
    draw.ellipse(box(10, 1, 13, 4), fill=(255, 214, 40))
    for cloud in (1.0, 2.2, 3.2):
        draw.ellipse(box(cloud, 1.6 - 0.3 * (cloud == 2.2), cloud + 1.8, 3.1), fill=(250, 250, 250))
    draw.rectangle(box(2, 6, 7, 11), fill=(190, 80, 60))
    draw.polygon([(1.3 * unit, 6 * unit), (4.5 * unit, 3.4 * unit), (7.7 * unit, 6 * unit)], fill=(110, 50, 45))
    draw.rectangle(box(4, 8.4, 5.2, 11), fill=(80, 45, 30))
    for left in (2.5, 5.6):
        draw.rectangle(box(left, 7, left + 1, 8), fill=(200, 230, 255), outline=(60, 40, 30), width=max(1, side // 150))
    draw.rectangle(box(10.2, 8, 10.9, 11.4), fill=(100, 65, 35))
    draw.ellipse(box(8.8, 5, 12.4, 8.8), fill=(30, 110, 45))
    draw.polygon(
        [(4 * unit, 11 * unit), (5.2 * unit, 11 * unit), (8 * unit, 14 * unit), (5 * unit, 14 * unit)],
        fill=(200, 180, 130),
    )
    return image


def tones(seconds: float = SECONDS, rate: int = RATE) -> list[float]:
    """A tone that rises from 200 to 1,200 Hz, a silence, and a chord; from -1 to 1."""
    numbers, count = [], int(seconds * rate)
    for n in range(count):
        t, part = n / rate, n / count
        if part < 0.5:
            value = 0.6 * math.sin(2 * math.pi * (200 * t + 500 * t * t / (0.5 * seconds)))
        elif part < 0.65:
            value = 0.0
        else:
            value = 0.25 * sum(math.sin(2 * math.pi * f * t) for f in (262, 330, 392))
        numbers.append(value)
    return numbers


def write_sound(path: Path, numbers: list[float], rate: int = RATE) -> None:
    """A WAV file of 16 bit."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(struct.pack(f"<{len(numbers)}h", *(int(32_000 * one) for one in numbers)))


def look(image: Image.Image) -> Any:
    """A look at heads that do one job each while they see the picture."""
    import numpy as np
    import torch

    import headwise
    from headwise.testing.pictures import constructed_picture

    side = 14
    model, _ = constructed_picture(
        [
            ["left neighbour", "right neighbour", "upper neighbour", "lower neighbour"],
            ["surroundings", "same row", "same column", "alike"],
            ["[CLS] sink", "register sink", "patch sink", "self"],
        ],
        (side, side),
        registers=4,
        patch=image.width // side,
    )
    pixels = torch.from_numpy(np.asarray(image).copy()).float().movedim(-1, 0)[None] / 127.5 - 1
    return headwise.look.at(model, {"pixel_values": pixels}, name="one job a head")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path, help="the picture to write (.png)")
    parser.add_argument("sound", type=Path, nargs="?", help="the sound to write (.wav)")
    parser.add_argument("--report", type=Path, help="a report of heads that do one job each, on the picture")
    arguments = parser.parse_args()
    image = scene()
    image.save(arguments.image)
    if arguments.sound is not None:
        write_sound(arguments.sound, tones())
    if arguments.report is not None:
        import headwise.report

        headwise.report.write(look(image), arguments.report)


if __name__ == "__main__":
    main()
