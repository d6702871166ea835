"""Loading of models from a local folder or the hub: safetensors only, and code in the folder is never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...files.text import one_line
from ...plan.model.heads_by_layer import CLASS_PREFIX, base_type
from ...shapes.arguments import check_counts, check_texts, shown
from ..errors import ModelError
from ..files.config_fields import class_of_config, known_keys, taken, with_numbers
from ..files.folder import Weights, check_numbers, find_weights, folder_config
from ..files.hub import find_folder
from ..models import heads_by_layer
from ..models.architectures import BOTH_WAYS
from ..models.own_attention import has_own_attention
from ..models.support import attention_modules, require_interface
from .tokenizer import bos_id, delimiters, encode, encode_all, load_tokenizer

TEXT_MODELS = "text models that are decoder-only or encoder-only are read here"


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its tokenizer and the properties that `headwise look` needs; `load` returns it.

    Attributes:
        model: The model in eval mode.
        tokenizer: The tokenizer; None for a model that reads no text.
        name: The name or path that was requested.
        max_positions: The maximum number of tokens; None if the config does not declare one.
        kind: "decoder" (causal attention) or "encoder".
        delimiters: The ids of punctuation, line ends and separators.
        bos_id: The id that begins a text; None if the tokenizer has none.
        folder: The folder of its files.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    max_positions: int | None
    kind: str
    delimiters: tuple[int, ...]
    bos_id: int | None
    folder: Path | None = None

    def encode(self, text: str) -> tuple[torch.Tensor, tuple[str, ...]]:
        """Return the ids of a text, int64 (1, T), and the piece of the text for each id.

        Raises TypeError if `text` is not a str, ModelError if it has no tokens or more than the model takes.
        """
        check_texts(text=text)
        ids, pieces = encode(self.tokenizer, text, self.max_positions)
        return torch.tensor([ids], device=self.model.device), pieces

    def encode_all(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return, for each text, all its ids and the (start, end) character offsets of each id.

        Raises TypeError unless `texts` is a sequence of str, and ModelError if the tokenizer fails or has no offsets
        (as those in plain Python).
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
            raise TypeError(f"texts are a list of texts; got {shown(texts)}")
        for text in texts:
            check_texts(text=text)
        return encode_all(self.tokenizer, texts)

    def names(self) -> list[str]:
        """Return the tokenizer's name of each id of the model, in order; the name of an unknown id is empty."""
        count = self.model.config.get_text_config().vocab_size
        return [name or "" for name in self.tokenizer.convert_ids_to_tokens(range(count))]

    def decode(self, token: int) -> str:
        """Return the text of one id; raise TypeError unless it is an integer, ValueError if it is negative."""
        check_counts(token=index(token) if hasattr(token, "__index__") else token)
        return self.tokenizer.decode([token])

    @property
    def mask_id(self) -> int | None:
        """The id of an encoder's mask token; None for a decoder or if the tokenizer has no mask token."""
        return None if self.kind == "decoder" else self.tokenizer.mask_token_id


def check_inputs(loaded: object, image: object, sound: object, texts: Mapping[str, object]) -> None:
    """Raise TypeError unless these are a `Loaded` and, if not None, a PIL image, a waveform with its rate and texts."""
    if not isinstance(loaded, Loaded):
        raise TypeError(f"prepared takes what headwise.hf.load gives; got {shown(loaded)}")
    if image is not None and not hasattr(image, "convert"):
        raise TypeError(f"image is a picture as PIL opens it; got {shown(image)}")
    wave, rate = sound if isinstance(sound, tuple) and len(sound) == 2 else (None, None)
    if sound is not None and not (isinstance(rate, int) and isinstance(wave, np.ndarray) and wave.ndim == 1):
        raise TypeError(f"sound is a waveform (N,) and the numbers of a second; got {shown(sound)}")
    check_texts(**{name: text for name, text in texts.items() if text is not None})


def load(
    name_or_path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    any_input: bool = False,
) -> Loaded:
    """Load a text model and its tokenizer, in eval mode.

    Args:
        name_or_path: A folder with config.json, *.safetensors and a tokenizer, or the name of a model on the hub. A
            hub model is taken from the local cache, or downloaded if the cache does not hold it.
        device: The torch device of the model.
        dtype: The dtype of the weights, as torch.float32 or "float32". None selects float32 on the CPU, where it makes
            statistics more exact and half precision is slow, and the dtype of the files on other devices.
        any_input: Accept image and audio models, encoder-decoders and models made of several submodels, too; their
            inputs are made by `headwise.hf.prepared`.

    Raises:
        ModelError: One line with the rule, the values and a remedy: the folder or name does not exist; the weights are
            pickled or quantised; config.json is invalid; the model is not on transformers' attention interface or is
            not a text model; weights or tokenizer are missing or do not fit. Code in the folder (`auto_map`) is never
            run, and fields of config.json that select code are not read.

    Example:
        >>> import headwise.hf, headwise.models
        >>> tiny = headwise.hf.load(headwise.models.tiny_path())
        >>> ids, pieces = tiny.encode("import os")
        >>> tiny.kind, tiny.model(ids).logits.shape == (1, len(pieces), 2048)
        ('decoder', True)
    """
    where, kind_of_number = _device(device), _dtype(dtype)
    folder, name, config, cls, weights = checked(name_or_path, any_input=any_input)
    if kind_of_number is None:
        kind_of_number = torch.float32 if where.type == "cpu" else _dtype_of(weights)
    needs_text = not any_input or cls.main_input_name == "input_ids" or config.is_encoder_decoder
    tokenizer = load_tokenizer(folder, config) if needs_text else None
    state = _read(weights, folder)
    model = _fill(cls, config, state, kind_of_number, str(folder)).to(where).eval()
    model.config.name_or_path = name
    vocabulary = 0 if tokenizer is None else _vocabulary(model)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        name=name,
        max_positions=_max_positions(model),
        kind=_kind(model),
        delimiters=() if tokenizer is None else delimiters(tokenizer, vocabulary),
        bos_id=None if tokenizer is None else bos_id(tokenizer, vocabulary),
        folder=folder,
    )


def checked(
    name_or_path: str | Path, *, any_input: bool = False
) -> tuple[Path, str, PreTrainedConfig, type[PreTrainedModel], Weights]:
    """Return what `load` needs before it reads weights: (folder, name, config, class, weights files).

    Raises ModelError for a name, a config.json or weights files that `load` refuses.
    """
    check = partial(describe, any_input=any_input)
    folder, name = find_folder(name_or_path, check)
    config, cls = check(folder)
    weights = find_weights(folder)
    _check_size(cls, config, weights, folder)
    return folder, name, config, cls, weights


def _device(device: torch.device | str) -> torch.device:
    try:
        where = torch.device(device)
        if torch.empty(1, device=where).is_meta:
            raise RuntimeError("it holds shapes, and no numbers to look at")
    except (RuntimeError, AssertionError, UnicodeError) as error:
        raise ModelError(f"device {device!r} cannot be used here ({one_line(error)}); use 'cpu'") from None
    return where


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(resolved, torch.dtype) and resolved.is_floating_point and resolved.itemsize > 1):
        return resolved
    raise ModelError(f"dtype is float32, bfloat16, float16 or float64; got {dtype!r}")


def _dtype_of(weights: Weights) -> torch.dtype:
    order = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return next((dtype for dtype in order if dtype in weights.dtypes), torch.float32)


# -- config and class -------------------------------------------------------------------------------------------------


def describe(folder: Path, *, any_input: bool = False) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the config and the class of the model; raise ModelError before weights are read if it cannot run."""
    raw = folder_config(folder)
    model_type, where = raw["model_type"], f"{folder}/config.json"
    config_class = class_of_config(model_type, where)
    if not any_input:
        if config_class.sub_configs_defaults or raw.get("is_encoder_decoder") is True:
            raise _no_text_model(model_type, "it is made of several models (encoder and decoder, or text and images)")
        check_numbers(raw, config_class.attribute_map, where)
    try:
        if any_input:
            config = config_class.from_dict(with_numbers(taken(raw, where)))
        else:
            config = config_class(**with_numbers({key: raw[key] for key in known_keys(config_class) & raw.keys()}))
    except ModelError:
        raise
    except Exception as error:  # transformers' validation raises many types of exceptions.
        raise ModelError(
            f"{where}: no valid {config_class.__name__} ({one_line(error)}); correct it or download it anew"
        ) from None
    cls = _class_of(raw, config)
    require_interface(cls, model_type)
    if not any_input and config.is_encoder_decoder:
        raise _no_text_model(model_type, "it is an encoder-decoder")
    if not any_input and cls.main_input_name != "input_ids":
        raise _no_text_model(model_type, f"its input is {cls.main_input_name!r}")
    return config, cls


def _no_text_model(model_type: str, why: str) -> ModelError:
    return ModelError(
        f"{TEXT_MODELS}; this one (model_type {model_type!r}) is not: {why}; `headwise look` takes it, or load it with "
        "transformers and use headwise.hf.probe(model) in Python"
    )


def _class_of(raw: dict[str, Any], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that config.json names if it fits the config's class; else the causal or the base model."""
    named = raw.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    auto = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
    base = base_type(config.model_type)
    others = [names.get(base or config.model_type, "") for names in auto]
    for candidate in (name, *(f"{CLASS_PREFIX}{other}" if base else other for other in others)):
        room = heads_by_layer if base else transformers
        cls: Any = getattr(room, candidate, None) if isinstance(candidate, str) else None
        is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
        if is_model and getattr(cls, "config_class", None) is type(config):
            return cls
    raise _no_text_model(config.model_type, f"transformers has no language model of it (architectures: {name[:60]!r})")


# -- the weights ------------------------------------------------------------------------------------------------------


def _check_size(cls: type[PreTrainedModel], config: PreTrainedConfig, weights: Weights, folder: Path) -> None:
    """Raise ModelError before allocation if config.json describes far more numbers than the files hold."""
    text = config.get_text_config()
    experts = max(getattr(text, key, 0) or 0 for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    layers = getattr(text, "num_hidden_layers", 0)
    if layers * experts > 2_000_000:
        raise ModelError(f"{folder}: {layers} layers of {experts} experts; such a model does not exist")
    try:
        with torch.device("meta"):
            empty = cls(config)
    except Exception as error:  # Each model class raises its own exceptions for sizes that do not fit together.
        raise ModelError(
            f"{folder}: config.json describes no {cls.__name__} that can be built ({one_line(error)})"
        ) from None
    wanted = sum(p.numel() for p in empty.parameters())
    buffers = sum(b.numel() for b in empty.buffers())
    if wanted > 2 * weights.numel + 4_000_000 or buffers > weights.numel + 100_000_000:
        raise ModelError(
            f"{folder}: config.json describes {wanted + buffers:,} numbers, the safetensors files hold "
            f"{weights.numel:,}; they do not belong together: download both anew"
        )


def build(config: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """Return the text model of a config (as in `Checkpoint.config`) and its tensors, in float32 and in eval mode.

    Raises:
        ModelError: transformers has no such text model, or tensors are missing or have the wrong size.
    """
    made = CONFIG_MAPPING[config["model_type"]].from_dict(with_numbers(dict(config)))
    return _fill(_class_of(dict(config), made), made, dict(state), torch.float32, "the changed model").eval()


def _read(weights: Weights, folder: Path) -> dict[str, torch.Tensor]:
    try:
        return {name: tensor for file in weights.files.values() for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{folder}: the weights cannot be loaded ({one_line(error)}); download them anew") from None


def _fill(
    cls: type[PreTrainedModel], config: PreTrainedConfig, state: dict[str, torch.Tensor], dtype: torch.dtype, where: str
) -> PreTrainedModel:
    """Return the model with its weights. transformers gets tensors instead of the folder, so it reads no other file."""
    try:
        with _quietly():
            model, report = cls.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # The error below names them.
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{where}: the weights cannot be loaded ({one_line(error)}); download them anew") from None
    if other := sorted(report.get("mismatched_keys", ())):
        name, *sizes = other[0]
        stored, configured = (tuple(size) for size in sizes)
        raise ModelError(
            f"{where}: {len(other)} weights of another size than config.json says, {name[:80]!r} first, {stored} "
            f"and not {configured}; config.json and the files do not belong together: download both anew"
        )
    if names := sorted(map(str, report.get("missing_keys", ()))):
        raise ModelError(
            f"{where}: {len(names)} missing keys, {names[0][:80]!r} first, so those weights would be random; the files "
            f"do not hold a whole {cls.__name__}: download them anew"
        )
    return model


@contextmanager
def _quietly() -> Iterator[None]:
    """Turn off transformers' progress bar and report of keys; the caller raises ModelError for the keys that matter."""
    talk = transformers.utils.logging
    level, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(level)
        if bars:
            talk.enable_progress_bar()


# -- properties of the model ------------------------------------------------------------------------------------------


def _kind(model: PreTrainedModel) -> str:
    default = not any(has_own_attention(type(module)) for module in model.modules()) or _writes(model.config)
    causal = [bool(getattr(module, "is_causal", default)) for module in attention_modules(model).values()]
    return "decoder" if any(causal) and getattr(model.config, "is_causal", True) else "encoder"


def _writes(config: PreTrainedConfig) -> bool:
    """Return whether models of a config generate text, judged by the model heads that transformers has for them."""
    if config.model_type in BOTH_WAYS:
        return False
    if config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return bool(getattr(config, "is_decoder", False))
    return config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _vocabulary(model: PreTrainedModel) -> int:
    """Return the number of ids of the text part."""
    try:
        table: Any = model.get_input_embeddings()
    except NotImplementedError:  # Models with two towers (such as CLIP) have no single input embedding.
        table = None
    rows = getattr(table, "num_embeddings", None)
    return rows if isinstance(rows, int) else int(model.config.get_text_config().vocab_size)


def declared_positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens that a config declares; None if it declares none."""
    names, text = ("max_position_embeddings", "max_seq_len"), config.get_text_config()
    declared = next((getattr(text, name) for name in names if getattr(text, name, None)), None)
    return declared if isinstance(declared, int) and declared > 0 else None


def _max_positions(model: PreTrainedModel) -> int | None:
    """Return the maximum number of tokens. In position tables with a padding id, rows up to that id are unusable."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings") and module.padding_idx is not None:
            rows = module.num_embeddings - module.padding_idx - 1
            return rows if rows > 0 else None
    return declared_positions(model.config)
