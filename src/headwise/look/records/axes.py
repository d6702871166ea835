"""Axes of maps: the tokens, the patches of a picture, or the frames of a sound at the positions of an axis.

The module reads config names that most models share (``patch_size``, ``num_register_tokens``,
``spatial_merge_size``, ...) and the sizes of the inputs. No model library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...shapes.arguments import shown
from .schema import Damaged, PlainRecord, values

TEXT, PICTURE, SOUND, MIXED = "text", "picture", "sound", "text and picture"
"""The kinds of axes. In the last kind, some positions are tokens and some are patches."""

KINDS = (TEXT, PICTURE, SOUND, MIXED)
NOWHERE = (-1, -1, -1)
CLS, REGISTERS = "[CLS]", "registers"
MOST_APART = 64
"""The most positions before the patches that count as the model's own tokens ([CLS], registers)."""


@dataclass(frozen=True)
class Axis(PlainRecord):
    """One axis of maps.

    Attributes:
        kind: one of `KINDS`.
        length: the number of positions.
        names: the text of each token; empty for other kinds.
        cells: picture, row and column of each position, (-1, -1, -1) if it is no patch; empty without patches.
        grids: rows and columns of each picture.
        apart: positions that are neither patches nor text tokens, by name: ``"[CLS]"``, ``"registers"``.
        label: the name of the axis, if a look has several of a kind.

    >>> over_patches((2, 3), 8).cells[2:5]     # two places come before the patches
    ((0, 0, 0), (0, 0, 1), (0, 0, 2))
    """

    CALLED = "an axis is"

    kind: str
    length: int
    names: tuple[str, ...] = ()
    cells: tuple[tuple[int, int, int], ...] = ()
    grids: tuple[tuple[int, int], ...] = ()
    apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        try:
            for name, value in values(Axis, vars(self)).items():
                object.__setattr__(self, name, value)
        except Damaged as error:
            raise ValueError(f"an axis's {error}") from None
        if self.kind not in KINDS:
            raise ValueError(f"an axis is one of {', '.join(KINDS)}; got {shown(self.kind)}")
        for name, listed in (("names", self.names), ("cells", self.cells)):
            if listed and len(listed) != self.length:
                raise ValueError(
                    f"an axis of {self.length} places has as many {name}, or none; got {len(listed)}; give one each"
                )
        for grid in self.grids:
            if min(grid) < 1:
                raise ValueError(f"an axis's grids have a row and a column at least; got {grid}")
        for cell in self.cells:
            picture, row, column = cell
            rows, columns = self.grids[picture] if 0 <= picture < len(self.grids) else (0, 0)
            if cell != NOWHERE and not (0 <= row < rows and 0 <= column < columns):
                raise ValueError(
                    f"an axis's cells are (picture, row, column) in its grids {self.grids}, or {NOWHERE}; got {cell}"
                )
        for name, places in self.apart.items():
            if wrong := [place for place in places if not 0 <= place < self.length]:
                raise ValueError(
                    f"an axis of {self.length} places has no place {wrong[0]}, which apart calls {shown(name)}"
                )

    @property
    def known(self) -> bool:
        """True if the patch of each position is known."""
        return bool(self.cells)


PatchCells = tuple[tuple[int, int, int], ...]
PictureGrids = tuple[tuple[int, int], ...]


def in_blocks(rows: int, columns: int, side: int = 1, picture: int = 0) -> list[tuple[int, int, int]]:
    """Return the cells of a grid row after row, in blocks of `side` x `side`.

    >>> [cell[1:] for cell in in_blocks(2, 4, 2)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    """
    tops, lefts = range(0, rows, side), range(0, columns, side)
    return [(picture, r + i, c + j) for r in tops for c in lefts for i in range(side) for j in range(side)]


def over_patches(grid: tuple[int, int], length: int, registers: int = 0) -> Axis:
    """Return the axis of an encoder of one picture: the model's own tokens, then the patches row by row.

    If there are fewer positions than patches, or too many more, the patches have no known positions.
    """
    rows, columns = grid
    before = length - rows * columns
    if rows < 1 or columns < 1 or not 0 <= before <= MOST_APART:
        return Axis(PICTURE, length)
    apart: dict[str, tuple[int, ...]] = {}
    if before:
        apart[CLS] = (0,)
    last = min(1 + registers, before)
    if last > 1:
        apart[REGISTERS] = tuple(range(1, last))
    if last < before and before > 1:
        apart["further token"] = tuple(range(max(last, 1), before))
    cells = (*[NOWHERE] * before, *in_blocks(rows, columns))
    return Axis(PICTURE, length, cells=cells, grids=(grid,), apart=apart)


def upside_down(axis: Axis) -> Axis:
    """Return the axis of a spectrogram in patches, flipped so that its first row (lowest tones) is at the bottom."""
    cells = tuple(
        cell if cell == NOWHERE else (cell[0], axis.grids[0][0] - 1 - cell[1], cell[2]) for cell in axis.cells
    )
    return replace(axis, cells=cells)


def in_text(ids: Sequence[int], names: Sequence[str], image: int | None, grids: Sequence[tuple[int, ...]]) -> Axis:
    """Return the axis of a text; positions with the id `image` are patches of pictures of (frames, rows, columns)."""
    places = [place for place, i in enumerate(ids) if i == image]
    if not places:
        return Axis(TEXT, len(ids), names=tuple(names))
    laid, shapes = _laid(len(places), grids)
    cells = [NOWHERE] * len(ids)
    for place, cell in zip(places, laid, strict=False):
        cells[place] = cell
    return Axis(MIXED, len(ids), names=tuple(names), cells=tuple(cells), grids=shapes)


def _laid(places: int, grids: Sequence[tuple[int, ...]]) -> tuple[PatchCells, PictureGrids]:
    """Return cells and grids of so many positions; all grids are divided by one integer. Empty if nothing fits."""
    patches = sum(t * r * c for t, r, c in grids)
    for side in range(1, 17):
        fits = all(r % side == 0 and c % side == 0 for _, r, c in grids)
        if fits and patches == places * side * side:
            return cells_of_grids([(t, r // side, c // side) for t, r, c in grids])
    return (), ()


def cells_of_grids(grids: Iterable[tuple[int, ...]], side: int = 1) -> tuple[PatchCells, PictureGrids]:
    """Return the cells and grids of a picture's frames of (frames, rows, columns) patches, as `in_blocks` does."""
    frames = tuple((r, c) for t, r, c in grids for _ in range(t))
    return tuple(cell for n, (r, c) in enumerate(frames) for cell in in_blocks(r, c, side, n)), frames
