"""The inputs of a transformers model, made from an image, a sound and texts.

transformers' own processors make the inputs if they run (image processors need PIL or torchvision). Otherwise an image
is resized and normalised here, as preprocessor_config.json specifies. The number of image tokens in a text is computed
by the model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...files.text import one_line
from ..errors import ModelError
from ..files.reader import read_json
from .model import Loaded, check_inputs
from .tokenizer import encode

SETTINGS = ("preprocessor_config.json", "processor_config.json")
MAX_SETTINGS = 1 << 20
LARGEST = 4096
"""The maximum width and height, in pixels, of a resized image."""

BOUNDS = {"n_fft": 8192, "hop_length": 8192, "chunk_length": 3600, "sampling_rate": 1_000_000, "max_length": 1_000_000}
"""The maximum of settings from which an audio processor makes tables."""

MOST_SAID = 48
"""The maximum number of decoder tokens, with the start token, that are generated if no target is given."""

START = "(start)"
CAPTION = "A picture."
"""The text for a model that reads a text together with an image, if no text is given."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """The inputs of a model call.

    Attributes:
        values: The tensors by name, as `headwise.look.at` takes them.
        tokens: The tokens of the texts, by the name of the tensor of ids.
        seconds: The duration of the sound's time axis, in seconds; None without a sound.
    """

    values: dict[str, Any]
    tokens: dict[str, tuple[str, ...]]
    seconds: float | None = None


def prepared(
    loaded: Loaded,
    text: str | None = None,
    *,
    image: Any = None,
    sound: tuple[npt.NDArray[np.float32], int] | None = None,
    target: str | None = None,
    pair: str | None = None,
) -> Prepared:
    """Return the inputs of a model for an image, a sound and texts.

    Args:
        loaded: The model, loaded with ``any_input=True``.
        text: The text for the text part or the encoder. The image is inserted at the image token in it, or at the
            beginning if it has none.
        image: A PIL image.
        sound: A waveform (N,) from -1 to 1, and its sampling rate in Hz.
        target: The text that the decoder of an encoder-decoder reads. Without it, the decoder reads the encoder's
            text, or, for a sound, the tokens that it generates itself, the likeliest at each step.
        pair: A second sentence, which the tokenizer appends to the first.

    Raises:
        ModelError: The model does not take such an input, its folder has no valid processor settings, or the sound has
            another sampling rate.
        TypeError: An argument has the wrong type.
    """
    check_inputs(loaded, image, sound, {"text": text, "target": target, "pair": pair})
    takes = inspect.signature(loaded.model.forward).parameters
    _check_takes(loaded, takes, image=image, sound=sound, target=target, text=text, pair=pair)
    values: dict[str, Any] = {}
    tokens: dict[str, tuple[str, ...]] = {}
    seconds = None
    if image is not None:
        values |= _pixels(loaded, image, takes)
    if sound is not None:
        heard, seconds = _heard(loaded, *sound, takes)
        values |= heard
    if "input_ids" in takes and (text is not None or loaded.model.main_input_name == "input_ids"):
        ids, pieces, segments = _text(loaded, text if text is not None else CAPTION, pair)
        if image is not None:
            ids, pieces = _with_picture(loaded, ids, pieces, values)
        values["input_ids"], tokens["input_ids"] = torch.tensor([ids], device="cpu"), tuple(pieces)
        if segments is not None:
            values["token_type_ids"] = torch.tensor([segments], device="cpu")
        elif image is not None and "token_type_ids" in takes:
            values["token_type_ids"] = torch.zeros(1, len(ids), dtype=torch.long, device="cpu")
        if image is not None and "mm_token_type_ids" in takes:
            values["mm_token_type_ids"] = (values["input_ids"] == _image_id(loaded)).long()
    if "decoder_input_ids" in takes and (target is not None or "input_ids" not in values):
        said = _said(loaded, values) if target is None else _target(loaded, target)
        values["decoder_input_ids"], tokens["decoder_input_ids"] = torch.tensor([said[0]], device="cpu"), said[1]
    return Prepared(values, tokens, seconds)


def _check_takes(loaded: Loaded, takes: Mapping[str, object], **inputs: Any) -> None:
    """Raise ModelError if the model does not take a given input, or if a required image or sound is missing."""
    name = f"{loaded.name} ({type(loaded.model).__name__})"
    needs = loaded.model.main_input_name
    hears = [one for one in ("input_features", "input_values") if one in takes]
    for needed, there, option in ((["pixel_values"], "image", "--image"), (hears, "sound", "--audio")):
        if needs in needed and inputs[there] is None:
            raise ModelError(f"{name} reads {needs!r}; give {option} FILE")
    for what, there, wanted in (
        ("a picture", inputs["image"], "pixel_values" in takes),
        ("a sound", inputs["sound"], bool(hears)),
        ("a text", inputs["text"], "input_ids" in takes),
        ("a second sentence", inputs["pair"], "token_type_ids" in takes),
        ("a text of its decoder's own", inputs["target"], "decoder_input_ids" in takes),
    ):
        if there is not None and not wanted:
            raise ModelError(f"{name} does not read {what}; it takes {', '.join(list(takes)[:4])}; leave that out")


# -- images ------------------------------------------------------------------------------------------------------------


def _pixels(loaded: Loaded, image: Any, takes: Mapping[str, object]) -> dict[str, Any]:
    """Return the image as input tensors, made by its processor or, if that fails, by `resized` with its settings."""
    settings = _settings(loaded, "image_processor")
    size = settings.get("size")
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        _new_size(image.size, size, f"{loaded.folder}")  # Raises if the longer side would be too large.
    try:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(
            str(loaded.folder), local_files_only=True, trust_remote_code=False, use_fast=False
        )
        made = processor(images=image, return_tensors="pt")
    except Exception as error:  # A missing library, class or setting raises different exceptions.
        if "patch_size" in settings or "merge_size" in settings:
            raise ModelError(f"{loaded.folder}: its picture processor does not run here ({one_line(error)})") from None
        made = {"pixel_values": resized(image, settings, f"{loaded.folder}")}
    return {name: value for name, value in made.items() if isinstance(value, Tensor) and name in takes}


def resized(image: Any, settings: Mapping[str, Any], where: str) -> Tensor:
    """Return an image as (1, 3, height, width), float32: resized, cropped, rescaled and normalised by `settings`."""
    size, crop = settings.get("size"), settings.get("crop_size")
    if settings.get("do_resize", True) and size is not None:
        image = image.resize(_new_size(image.size, size, where), int(settings.get("resample", 2)))
    if settings.get("do_center_crop") and crop is not None:
        width, height = _new_size(image.size, crop, where)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels: Any = np.asarray(image.convert("RGB"), dtype=np.float32)
    if settings.get("do_rescale", True):
        pixels = pixels * float(settings.get("rescale_factor", 1 / 255))
    if settings.get("do_normalize", True):
        mean, std = (settings.get(name, 0.5) for name in ("image_mean", "image_std"))
        pixels = (pixels - np.array(mean, np.float32)) / np.array(std, np.float32)
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None].float()


def _new_size(now: tuple[int, int], size: Any, where: str) -> tuple[int, int]:
    """Return the (width, height) that a setting gives: one number, both sides, or the shorter side."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, dict) and isinstance(size.get("height"), int) and isinstance(size.get("width"), int):
        return size["width"], size["height"]
    if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
        scale = size["shortest_edge"] / min(now)
        width, height = (max(1, round(n * scale)) for n in now)
        if max(width, height) <= LARGEST:
            return width, height
    raise ModelError(f"{where}: its processor makes pictures of size {str(size)[:60]}; give another picture or model")


def _settings(loaded: Loaded, part: str) -> dict[str, Any]:
    """Return the processor settings of the folder, with every number within its bounds."""
    folder = loaded.folder
    for name in SETTINGS:
        if folder is not None and (folder / name).exists():
            settings = read_json(folder, name, MAX_SETTINGS)
            settings = settings.get(part, settings)
            if isinstance(settings, dict):
                _check_bounds(settings, f"{folder}/{name}")
                return settings
    raise ModelError(
        f"{folder}: no preprocessor_config.json, which says how a picture or a sound becomes numbers; put the model's "
        "beside config.json"
    )


def _check_bounds(value: Any, where: str, key: str = "") -> None:
    """Raise ModelError for a setting that would allocate gigabytes or divide by zero."""
    if isinstance(value, dict):
        for name, one in value.items():
            _check_bounds(one, where, name if not key.endswith("size") else f"{name} of {key}")
    elif isinstance(value, list):
        for one in value[:1000]:
            _check_bounds(one, where, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        side = "size" in key or key in ("height", "width", "num_mel_bins")
        pixels = "pixels" in key or "edge" in key  # In some processors an edge is the total number of pixels.
        most = LARGEST**2 if pixels else LARGEST if side else BOUNDS.get(key, 10_000_000)
        if not -most <= value <= most or (value == 0 and key in ("image_std", "sampling_rate", "hop_length")):
            raise ModelError(f"{where}: {key} is {str(value)[:40]}, beyond what makes sense; download the file anew")


def _image_id(loaded: Loaded) -> int | None:
    """Return the id of the image token, which stands for an image patch; None if the config has none."""
    for name in ("image_token_id", "image_token_index"):
        value = getattr(loaded.model.config, name, None)
        if isinstance(value, int):
            return value
    return None


def _with_picture(
    loaded: Loaded, ids: list[int], pieces: list[str], values: Mapping[str, Any]
) -> tuple[list[int], list[str]]:
    """Return ids and pieces of a text with one image token per image vector; unchanged if there is no image token."""
    image = _image_id(loaded)
    if image is None:
        return ids, pieces
    count = _places(loaded, values)
    config = loaded.model.config
    marks = [getattr(config, f"vision_{end}_token_id", None) for end in ("start", "end")]
    if image in ids:
        place = ids.index(image)
        if ids.count(image) == count:
            return ids, pieces
        before, after = (ids[:place], pieces[:place]), (ids[place + 1 :], pieces[place + 1 :])
        inner = ([image] * count, [PATCH] * count)
    else:
        place = int(bool(ids) and ids[0] == loaded.bos_id)
        before, after = (ids[:place], pieces[:place]), (ids[place:], pieces[place:])
        opened, closed = ([mark] if isinstance(mark, int) else [] for mark in marks)
        names = [loaded.tokenizer.convert_ids_to_tokens(one) for one in (opened, closed)]
        inner = ([*opened, *[image] * count, *closed], [*names[0], *[PATCH] * count, *names[1]])
    return [*before[0], *inner[0], *after[0]], [*before[1], *map(str, inner[1]), *after[1]]


PATCH = "\u25a2"
"""The piece that is shown for an image patch."""


def _places(loaded: Loaded, values: Mapping[str, Any]) -> int:
    """Return the number of image tokens: the number of vectors that the model computes from the images."""
    model: Any = loaded.model
    takes = inspect.signature(model.get_image_features).parameters
    with torch.no_grad():
        made = model.get_image_features(**_moved(model, {name: x for name, x in values.items() if name in takes}))
    made = getattr(made, "pooler_output", made)
    parts = made if isinstance(made, (list, tuple)) else [made]
    return sum(part.shape[:-1].numel() for part in parts)


def _moved(model: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors on the model's device, those of floats in its dtype."""
    return {name: x.to(model.device, model.dtype if x.is_floating_point() else None) for name, x in values.items()}


# -- sound -------------------------------------------------------------------------------------------------------------


def _heard(
    loaded: Loaded, wave: npt.NDArray[np.float32], rate: int, takes: Mapping[str, object]
) -> tuple[dict[str, Any], float]:
    """Return the sound as input tensors, and the duration of their time axis in seconds."""
    _settings(loaded, "feature_extractor")
    try:
        from transformers import AutoFeatureExtractor

        extractor = AutoFeatureExtractor.from_pretrained(
            str(loaded.folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelError(f"{loaded.folder}: no processor of sound that can be read ({one_line(error)})") from None
    wanted = int(extractor.sampling_rate)
    if rate != wanted:
        raise ModelError(
            f"the sound has {rate:,} numbers a second, and the model takes {wanted:,}; convert it first: "
            f"ffmpeg -i in.wav -ar {wanted} out.wav"
        )
    longest = getattr(extractor, "n_samples", None)
    if isinstance(longest, int) and len(wave) > longest:
        raise ModelError(
            f"the sound has {len(wave) / rate:.1f} s, and the model hears {longest / rate:.0f} s; give a part of it"
        )
    try:
        made = extractor(wave, sampling_rate=rate, return_tensors="pt")
    except Exception as error:  # For example, the sound is shorter than one window.
        raise ModelError(f"the model's processor makes nothing of this sound ({one_line(error)})") from None
    values = {name: value for name, value in made.items() if name in takes and not name.endswith("mask")}
    if not values:
        makes = ", ".join(repr(name) for name in made if not name.endswith("mask"))
        raise ModelError(
            f"{loaded.folder}: its processor of sound ({type(extractor).__name__}) makes {makes}, which "
            f"{type(loaded.model).__name__} does not read; put the model's own preprocessor_config.json there"
        )
    first = next(iter(values.values()))
    if first.ndim == 2:
        return values, first.shape[1] / rate
    frames = first.shape[2] if "input_features" in values else first.shape[1]
    return values, frames * getattr(extractor, "hop_length", rate // 100) / rate


# -- texts -------------------------------------------------------------------------------------------------------------


def _text(loaded: Loaded, text: str, pair: str | None) -> tuple[list[int], list[str], list[int] | None]:
    """Return the ids, their pieces and, for a pair, the sentence (0 or 1) of each id."""
    ids, pieces = encode(loaded.tokenizer, text, loaded.max_positions)
    if pair is None:
        return ids, list(pieces), None
    encode(loaded.tokenizer, pair, loaded.max_positions)  # Raises if the pair is too long or takes too much time.
    both = loaded.tokenizer(text, pair, return_token_type_ids=True)
    ids, segments = list(both["input_ids"]), list(both["token_type_ids"])
    if loaded.max_positions is not None and len(ids) > loaded.max_positions:
        raise ModelError(
            f"both sentences have {len(ids):,} tokens, and the model takes {loaded.max_positions:,}; give shorter ones"
        )
    if not any(segments):  # The tokenizer gives no token types, so they are made from its sequence ids.
        sequences = both.sequence_ids() if loaded.tokenizer.is_fast else [None] * len(ids)
        segments = [int(one == 1) for one in sequences]
    return ids, _pieces(loaded, both, (text, pair)), segments


def _pieces(loaded: Loaded, both: Any, texts: tuple[str, str]) -> list[str]:
    names = loaded.tokenizer.convert_ids_to_tokens(both["input_ids"])
    if not loaded.tokenizer.is_fast:
        return list(names)
    pieces, done = [], [0, 0]
    for place, which in enumerate(both.sequence_ids()):
        span = both.token_to_chars(place) if which is not None else None
        if which is None or span is None:
            pieces.append(names[place])
            continue
        pieces.append(texts[which][done[which] : span.end] if span.end > done[which] else "\ufffd")
        done[which] = max(done[which], span.end)
    return pieces


def _start(loaded: Loaded) -> int:
    config = loaded.model.config
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(config.get_text_config(), name, None) if name != "decoder_start_token_id" else None
        value = getattr(config, name, None) if value is None else value
        if isinstance(value, int):
            return value
    return 0


def _target(loaded: Loaded, text: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the decoder's input for a text: the start token, then the text without a final EOS or SEP token."""
    ids, pieces = encode(loaded.tokenizer, text, loaded.max_positions)
    start = _start(loaded)
    if ids[0] == start:
        return ids, pieces
    last = len(ids) - (ids[-1] in (loaded.tokenizer.eos_token_id, loaded.tokenizer.sep_token_id))
    return [start, *ids[:last]], (START, *pieces[:last])


def _said(loaded: Loaded, values: Mapping[str, Any]) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids that the decoder generates, the likeliest token at each step, and their pieces."""
    model: Any = loaded.model
    end = model.config.eos_token_id
    ids, ends = [_start(loaded)], {loaded.tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
    limit = getattr(model.config, "max_target_positions", None) or MOST_SAID
    with torch.no_grad():
        memory = model.get_encoder()(**_moved(model, values))
        while len(ids) < min(MOST_SAID, limit):
            decoder = torch.tensor([ids], device=model.device)
            out = model(encoder_outputs=memory, decoder_input_ids=decoder, use_cache=False)
            logits = getattr(out, "logits", None)
            following = None if logits is None else int(logits[0, -1].argmax())
            if following is None or following in ends:
                break
            ids.append(following)
    names = loaded.tokenizer.convert_ids_to_tokens(ids)
    pieces = [loaded.tokenizer.decode([i]) or str(name) for i, name in zip(ids[1:], names[1:], strict=True)]
    return ids, (START, *pieces)
