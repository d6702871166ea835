"""Ground truth for measuring heads on images: an encoder of patches with handmade weights, one job for each head.

>>> import headwise
>>> from headwise.testing.pictures import constructed_picture
>>> model, jobs = constructed_picture([["right neighbour", "same row"]], (5, 7))
>>> seen = headwise.look.at(model, {"pixel_values": model.sample()})
>>> [head.role for head in seen.heads] == list(jobs.values())
True
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.nn import Head, MultiHeadAttention
from headwise.shapes.arguments import check_counts, shown

__all__ = ["JOBS", "ConstructedPicture", "constructed_picture", "picture_targets"]

Jobs = Sequence[Sequence[str]]
SHARP = 40.0
STEPS = {"left neighbour": (0, -1), "right neighbour": (0, 1), "upper neighbour": (-1, 0), "lower neighbour": (1, 0)}
JOBS = (*STEPS, "self", "surroundings", "same row", "same column", "[CLS] sink", "register sink", "patch sink", "alike")
"""All jobs. An "alike" head attends to patches of the same colour, so its targets depend on the image."""

COLOURS = 3


def constructed_picture(
    layers: Jobs, grid: tuple[int, int], *, registers: int = 0, summary: bool = True, patch: int = 4
) -> tuple[ConstructedPicture, dict[tuple[int, int], str]]:
    """Build an attention-only image encoder, and return it with the job of each head: ``{(layer, head): job}``.

    The targets of a job (`picture_targets`) get more than 0.99 of the weight of a patch; a patch without targets, at
    the edge of the image, attends to all positions equally. The output of every head is zero.

    Args:
        layers: The jobs of the heads, one list per layer.
        grid: Rows and columns of patches.
        registers: Number of register tokens after [CLS].
        summary: True if the first token is [CLS].
        patch: Side length of a patch in pixels.

    Raises:
        TypeError, ValueError: a job is unknown, or needs a token that the model does not have; sizes below 1.

    Example:
        >>> model, jobs = constructed_picture([["self", "same row"]], (3, 5), registers=2)
        >>> model(model.sample()).shape, jobs
        (torch.Size([1, 18, 22]), {(0, 0): 'self', (0, 1): 'same row'})
    """
    rows, columns = grid
    check_counts(1, rows=rows, columns=columns, patch=patch)
    check_counts(0, registers=registers)
    for job in (job for row in layers for job in row):
        if job not in JOBS:
            raise ValueError(f"a job is one of {', '.join(JOBS)}; got {shown(job)}")
        if (job == "[CLS] sink" and not summary) or (job == "register sink" and not registers):
            raise ValueError(f"{job!r} attends a token that the model does not have; give it summary= or registers=")
    if registers and not summary:
        raise ValueError("registers stand behind [CLS]; give summary=True")
    model = ConstructedPicture(layers, (rows, columns), registers, int(summary), patch)
    return model, {(layer, head): job for layer, row in enumerate(layers) for head, job in enumerate(row)}


def picture_targets(job: str, grid: tuple[int, int], before: int, registers: int = 0) -> Tensor:
    """Return the positions that each patch attends to for a job, (T, T) bool; the first `before` are not patches."""
    rows, columns = grid
    P = rows * columns
    r, c = torch.arange(P) // columns, torch.arange(P) % columns
    down, right = r[None] - r[:, None], c[None] - c[:, None]  # from the query to the key
    wanted = torch.zeros(before + P, before + P, dtype=torch.bool)
    inner = wanted[before:, before:]
    if job in STEPS:
        inner |= (down == STEPS[job][0]) & (right == STEPS[job][1])
    elif job == "self":
        inner |= (down == 0) & (right == 0)
    elif job == "surroundings":
        inner |= (down.abs() <= 1) & (right.abs() <= 1)
    elif job == "same row":
        inner |= (down == 0) & (right.abs() > 1)
    elif job == "same column":
        inner |= (right == 0) & (down.abs() > 1)
    elif job == "[CLS] sink":
        wanted[before:, 0] = True
    elif job == "register sink":
        wanted[before:, 1 : 1 + registers] = True
    elif job == "patch sink":
        wanted[before:, before + P // 3] = True
    return wanted


class ConstructedPicture(nn.Module):
    """An image encoder: ``model(pixel_values)``, (N, 3, height, width). Build one with `constructed_picture`."""

    main_input_name = "pixel_values"

    def __init__(self, layers: Jobs, grid: tuple[int, int], registers: int, summary: int, patch: int) -> None:
        super().__init__()
        self.grid, self.patch, self.before = grid, patch, summary + registers
        self.config = SimpleNamespace(
            patch_size=patch, image_size=(grid[0] * patch, grid[1] * patch), num_register_tokens=registers
        )
        self.layers = nn.ModuleList(
            MultiHeadAttention.from_heads([self._head(job, registers) for job in row]) for row in layers
        )

    @property
    def places(self) -> int:
        """The number of tokens: [CLS], registers and patches."""
        return self.before + self.grid[0] * self.grid[1]

    def _head(self, job: str, registers: int) -> Head:
        """Build a head with scores by position; for an "alike" head, by minus the squared distance of colours."""
        T = self.places
        width, D = T + COLOURS + 1, T + COLOURS + 1
        W_Q, W_K = torch.zeros(width, D), torch.zeros(width, D)
        place, colour, square = torch.arange(T), torch.arange(T, T + COLOURS), T + COLOURS
        W_K[place, place] = 1
        if job == "alike":
            W_Q[colour, colour], W_K[colour, colour] = 2 * SHARP, 1
            W_Q[place, square], W_K[square, square] = -SHARP, 1
        else:
            W_Q[place[:, None], place] = SHARP * picture_targets(job, self.grid, self.before, registers).float()
        return Head(W_Q * D**0.5, W_K, torch.zeros(width, 1), torch.zeros(1, width))

    def forward(self, pixel_values: Float[Tensor, "N 3 height width"]) -> Float[Tensor, "N T M"]:
        """Compute the residual stream (N, T, M) of images (N, 3, height, width)."""
        colours = nn.functional.avg_pool2d(pixel_values, self.patch).flatten(2).mT
        N, T = len(colours), self.places
        x = pixel_values.new_zeros(N, T, T + COLOURS + 1)
        x[:, torch.arange(T), torch.arange(T)] = 1
        x[:, self.before :, T : T + COLOURS] = colours
        x[:, self.before :, T + COLOURS] = colours.square().sum(-1)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def sample(self, *, seed: int = 0) -> Float[Tensor, "1 3 height width"]:
        """Return an image of random pixels."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(1, 3, self.grid[0] * self.patch, self.grid[1] * self.patch, generator=draw)
