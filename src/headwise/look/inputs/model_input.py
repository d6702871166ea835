"""The input of one forward pass, and the tokens or patches at the queries and keys of each attention call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn.hooks.probe import AttentionCall
from ..collect.reduce import looks_ahead
from ..records import axes
from ..records.axes import Axis
from ..records.images import Picture, patched, picture_of, sound_of
from ..roles.call_tokens import CallTokens, Passage, Vocabulary
from . import ids as inputs
from .ids import IdFacts

CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)
"""Names of cross-attention modules."""

PIXELS = "pixel_values"
SOUNDS = ("input_features", "input_values")
GRIDS = "image_grid_thw"


def part_of(call: AttentionCall, model: nn.Module, *, pair: bool) -> str:
    """Return the part of a call, ``"encoder"``, ``"decoder"`` or ``"cross"``: by the names of its module, or its mask.

    The last two names identify cross-attention (in torch's own decoder layers ``multihead_attn``); in an
    encoder-decoder (`pair`), "decoder" or "encoder" in the path the other parts.
    """
    path = call.module.split(".")
    parent = model.get_submodule(".".join(path[:-1]))
    of_torch = path[-1] == "multihead_attn" and isinstance(parent, nn.TransformerDecoderLayer)
    if of_torch or CROSS.search(".".join(path[-2:])) or call.query.shape[2] != call.key.shape[2]:
        return "cross"
    if pair:
        for part in ("decoder", "encoder"):
            if any(part in word for word in path):
                return part
    return "encoder" if looks_ahead(call) else "decoder"


class View(NamedTuple):
    """The tokens of a call, with -1 for unknown ids, its two axes by number, and the earlier calls of its module."""

    tokens: CallTokens
    over: tuple[int, int]
    again: int


@dataclass
class Source:
    """The input of one forward pass."""

    model: nn.Module
    texts: tuple[Tensor | None, Tensor | None]  # ids (B, T) of its text part, and those of its decoder
    passages: Sequence[Passage]  # one for each row of the texts; without texts, one for each picture or sound
    call: Mapping[str, Any] = field(default_factory=dict)  # the other arguments of the model
    names: tuple[Sequence[str], Sequence[str]] = ((), ())  # the tokens of the two texts
    own: bool = False  # whether the decoder's text differs from the encoder's
    axes: list[Axis] = field(default_factory=list)  # of the calls so far
    numbers: dict[object, int] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, model: nn.Module, passages: Sequence[Passage], facts: IdFacts, like: Source | None) -> Source:
        """Return the source of texts of equal length; a two-tower model also gets the media of `like`."""
        ids = torch.tensor([[*one.ids] for one in passages], dtype=torch.long, device=inputs.device_of(model))
        call = {} if like is None or like.image_id() is not None else like.beside()
        return cls(model, inputs.rows(model, ids, facts), passages, call)

    @cached_property
    def ids(self) -> tuple[Tensor | None, ...]:
        """The texts on the CPU, copied once for all layers."""
        return tuple(None if ids is None else ids.cpu() for ids in self.texts)

    def beside(self) -> dict[str, Any]:
        """Return the inputs that are not text: pictures and sound."""
        return {name: self.call[name] for name in (PIXELS, GRIDS, *SOUNDS) if name in self.call}

    def run(self) -> None:
        """Run one cheap forward pass."""
        inputs.forward(self.model, *self.texts, self.call)

    # -- views of calls ------------------------------------------------------------------------------------------------

    def view(self, call: AttentionCall, part: str, again: int) -> View:
        """Return the tokens or patches at the queries and keys of a call; raise ValueError if a text has many rows."""
        T, S = call.query.shape[2], call.key.shape[2]
        config = _config(self.model, call.module)
        if PIXELS in self.call and _sees(config) and part != "cross":
            return self._of_pictures(call, config, again)
        if self._hears(config, part):
            return self._view(call, self._sound(config, T), None, 0, again)
        text = 1 if part in ("decoder", "cross") and self.texts[1] is not None else 0
        if part != "cross":
            return self._view(call, self._text(text, T), None, text, again)
        return self._view(call, self._text(text, T), self._memory(call, S), text, again)

    def _view(self, call: AttentionCall, queries: int, keys: int | None, text: int, again: int) -> View:
        """Return the view of a call in which a row is a text."""
        (B, _, T, _), S = call.query.shape, call.key.shape[2]
        if len(self.passages) != B:
            raise ValueError(
                f"module {call.module!r} made {B} rows of {len(self.passages)} text{'s' * (len(self.passages) > 1)}; "
                "look reads models that keep a text in one row"
            )
        before = text if keys is None else 0
        sizes = ((self.ids[text], T), (self.ids[before], S))
        known = all(row is not None and row.shape == (B, n) for row, n in sizes)
        ids = [row if known and row is not None else torch.full((B, n), -1, device="cpu") for row, n in sizes]
        over = (queries, queries if keys is None else keys)
        moved = (0, 0) if self.own else (text, before)
        there = (self.axes[over[0]], self.axes[over[1]])
        about = (tuple(self.passages), moved, known)
        return View(CallTokens(ids[0], ids[1], None, Vocabulary(), *about, axes=there), over, again)

    def _of_pictures(self, call: AttentionCall, config: Any, again: int) -> View:
        """Return the view of a call in the part for pictures: one row per picture, or one call per picture."""
        (B, _, T, _), pixels = call.query.shape, self.call[PIXELS]
        side, count = _side(config), _count(pixels)
        if pixels.ndim >= 4:
            grid = (pixels.shape[-2] // side[0], pixels.shape[-1] // side[1])
            axis, texts = axes.over_patches(grid, T, _whole(config, "num_register_tokens")), range(B)
            fits = count >= B
        else:
            grids = self.grids()
            whole = sum(t * r * c for t, r, c in grids) == T and len(grids) > 1
            merged = _whole(config, "spatial_merge_size") or 1
            now = grids if whole else grids[again : again + 1]
            fits = B == 1 and sum(t * r * c for t, r, c in now) == T
            cells, shapes = axes.cells_of_grids(now, merged) if fits else ((), ())
            axis, texts, again = Axis(axes.PICTURE, T, cells=cells, grids=shapes), range(again, again + 1), 0
        if not fits:
            raise ValueError(
                f"module {call.module!r} attends within windows: {B} row{'s' * (B > 1)} of {T} places for {count} "
                f"picture{'s' * (count > 1)}; look lays maps over models whose layers attend over the whole picture"
            )
        number = self._number((axes.PICTURE, T, axis.grids), axis)
        blank = torch.full((B, T), -1, device="cpu")
        passages = tuple(Passage((), text=n) for n in texts)
        tokens = CallTokens(blank, blank, None, Vocabulary(), passages, known=False, axes=(axis, axis))
        return View(tokens, (number, number), again)

    def _hears(self, config: Any, part: str) -> bool:
        """Return whether a call belongs to the part for sound."""
        if not any(name in self.call for name in SOUNDS):
            return False
        if self.texts[0] is None:
            return part == "encoder" or self.texts[1] is None
        return _whole(config, "num_mel_bins") > 0 and part == "encoder"

    def _sound(self, config: Any, T: int) -> int:
        """Return the number of the axis of frames, or of the patches of a spectrogram."""
        strides = [_whole(config, name) for name in ("frequency_stride", "time_stride")]
        x = next(self.call[name] for name in SOUNDS if name in self.call)
        if all(strides) and x.ndim == 3:
            sizes = zip((x.shape[2], x.shape[1]), _side(config), strides, strict=True)
            rows, columns = ((n - side) // stride + 1 for n, side, stride in sizes)
            return self._number((axes.PICTURE, T), axes.upside_down(axes.over_patches((rows, columns), T)))
        return self._number((axes.SOUND, T), Axis(axes.SOUND, T))

    def _text(self, which: int, T: int) -> int:
        """Return the number of the axis of a text; if the call has another length, its positions have no tokens."""
        ids, names = self.ids[which], self.names[which]
        if ids is None or ids.shape[1] != T:
            return self._number((axes.TEXT, which, T), Axis(axes.TEXT, T))
        row = ids[0].tolist() if self.call or names else []
        axis = axes.in_text(row, names, self.image_id(), self.grids()) if row else Axis(axes.TEXT, T)
        return self._number((axes.TEXT, which, T), axis)

    def _memory(self, call: AttentionCall, S: int) -> int:
        """Return the axis number of cross-attention's keys: the encoder's text, or an axis of equal length."""
        if self.texts[0] is not None and self.texts[0].shape[1] == S:
            return self._text(0, S)
        other = [n for n, axis in enumerate(self.axes) if axis.kind != axes.TEXT and axis.length == S]
        return other[0] if other else self._text(0, S)

    def _number(self, key: object, axis: Axis) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.axes)
            self.axes.append(axis)
        return self.numbers[key]

    def grids(self) -> list[tuple[int, ...]]:
        """Return (frames, rows, columns) of the patches of each picture."""
        if GRIDS in self.call:
            return [tuple(int(n) for n in row) for row in self.call[GRIDS].tolist()]
        pixels = self.call.get(PIXELS)
        config = self._of_patches()
        if pixels is None or pixels.ndim < 4 or config is None:
            return []
        side = _side(config)
        return [(1, pixels.shape[-2] // side[0], pixels.shape[-1] // side[1])] * _count(pixels)

    def _of_patches(self) -> Any:
        """Return the config of the part for pictures, or the model itself; None if nothing has patches."""
        configs = (getattr(part, "config", None) for part in self.model.modules())
        return next((one for one in (*configs, self.model) if _sees(one)), None)

    def image_id(self) -> int | None:
        """Return the token id that stands for a patch of a picture."""
        config = getattr(self.model, "config", None)
        for name in ("image_token_id", "image_token_index"):
            value = getattr(config, name, None)
            if isinstance(value, int) and PIXELS in self.call:
                return value
        return None

    def pictures(self) -> tuple[Picture, ...]:
        """Return the pictures and sounds as the model received them; empty if a picture cannot be restored."""
        pixels, made = self.call.get(PIXELS), []
        if pixels is not None and pixels.ndim in (4, 5):
            made = [picture_of(one) for one in pixels.flatten(0, pixels.ndim - 4)]
        elif pixels is not None and self.grids():
            config, start = self._of_patches(), 0
            for grid in self.grids() if config is not None else ():
                size = grid[0] * grid[1] * grid[2]
                side = _whole(config, "spatial_merge_size") or 1
                whole = patched(pixels[start : start + size], grid, side, _side(config)[0])
                made += [None if whole is None else picture_of(whole)] * grid[0]
                start += size
        for name in SOUNDS:
            if name in self.call:
                x = self.call[name][0]
                made.append(sound_of(x.mT if x.ndim == 2 and name == "input_values" else x))
        return tuple(one for one in made if one is not None) if None not in made else ()


def _sees(config: Any) -> bool:
    return getattr(config, "patch_size", None) is not None and not isinstance(getattr(config, "vocab_size", None), int)


def _count(pixels: Tensor) -> int:
    """Return the number of pictures, (N, C, height, width) or (B, N, C, height, width); 1 for rows of patches."""
    return pixels.shape[:-3].numel() if pixels.ndim in (4, 5) else 1


def _side(config: Any) -> tuple[int, int]:
    """Return height and width of a patch."""
    size = config.patch_size
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    return int(pair[0]), int(pair[-1])


def _whole(config: Any, name: str) -> int:
    return inputs.whole_of(config, name) or 0


def _config(model: nn.Module, name: str) -> Any:
    """Return the config of a module or of its nearest parent that has one; without any, the model itself."""
    while True:
        config = getattr(model.get_submodule(name), "config", None)
        if config is not None or not name:
            return model if config is None else config
        name = name.rpartition(".")[0]
