"""What a tiny model takes: texts, images, sounds, by the names of its forward's arguments and the rules' data."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from hf_table_build import FIRST_MARK, RULES, special
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

B, T, T_DECODER, STEPS = 2, 11, 7, (1, 3)
FORMS = 4
Arguments = dict[str, Any]


def sizes(config: PreTrainedConfig, more: dict[str, int]) -> dict[str, int]:
    """The letters in which the rules write shapes."""
    known = {
        "B": B,
        "T": T,
        "K": 1,
        "U": T_DECODER,
        "C": 3,
        "I": 32,
        "F": 64,
        "mel": 80,
        "N": 2000,
        "frames": 2,
        "M": 64,
        "P": 8,
        "L": 32,
    }
    fields = (
        ("C", "num_channels"),
        ("I", "image_size"),
        ("mel", "num_mel_bins"),
        ("M", "hidden_size"),
        ("C", "in_channels"),
        ("P", "patch_size"),
        ("L", "context_length"),
    )
    for part in ("", "audio_config", "vision_config", "encoder_config", "backbone_config"):
        inner = getattr(config, part, None) if part else config
        for letter, name in fields:
            value = getattr(inner, name, None)
            if isinstance(value, list | tuple) and value:
                value = None if name == "in_channels" else value[0]
            if isinstance(value, int) and value > 0 and letter not in more:
                known[letter] = value
    return known | {"V": smallest_vocabulary(config)} | more


def smallest_vocabulary(config: PreTrainedConfig) -> int:
    """One above the largest id that texts may have: below the ids with a meaning, and in all vocabularies."""
    inner = [x for x in vars(config).values() if isinstance(x, PreTrainedConfig)]
    own = getattr(config, "vocab_size", None)
    return min([FIRST_MARK, *([own] if isinstance(own, int) and own > 9 else []), *map(smallest_vocabulary, inner)])


def made(spec: list[Any], letters: dict[str, int], noise: torch.Generator) -> Any:
    """An argument from its rule: ["float", shape], ["int", shape, below], ["ones", shape], ["is", value]."""
    kind, value = spec[0], spec[1]
    if kind == "is":
        return torch.tensor(value) if isinstance(value, list) else value
    shape = [eval(x, {}, dict(letters)) if isinstance(x, str) else x for x in value]
    if kind == "float":
        return torch.randn(shape, generator=noise)
    if kind == "int":
        return torch.randint(3, spec[2] if len(spec) > 2 else letters["V"], shape, generator=noise)
    if kind == "box":  # left, top, right, bottom
        corners = torch.randint(1, 100, [*shape, 2], generator=noise)
        return torch.cat([corners, corners + 20], -1)
    if kind == "patches":  # pixels after the number of a row and a column, from 1
        at = torch.arange(shape[1]).expand(shape)
        pixels = torch.randn([*shape, spec[2] - 2], generator=noise)
        return torch.cat([torch.stack([at // 4 + 1, at % 4 + 1], -1).float(), pixels], -1)
    if kind == "grid":  # the columns and rows of patches, row by row
        at = torch.arange(shape[1])
        return torch.stack([at % spec[2], at // spec[2]], -1).expand(*shape, 2).clone()
    if kind in RULES["tokens"]:  # a text with so many places of an image, or the like
        ids = torch.randint(3, FIRST_MARK, shape, generator=noise)
        return places(ids, FIRST_MARK + RULES["tokens"].index(kind), spec[2])
    return {"ones": torch.ones, "zeros": torch.zeros}[kind](shape, dtype=torch.long)


def inputs(model: PreTrainedModel, model_type: str) -> Arguments:
    """The arguments of a forward, unpadded, without an attention mask: the first that the model takes.

    At first what its forward requires; then all that the rules know by name, too; each in the shapes of the rules, one
    after another.
    """
    case = special(model_type)
    letters = sizes(model.config, case.get("letters", {}))
    first: Exception | None = None
    for all_known in (False, True):
        for form in range(FORMS):
            arguments = some_inputs(model, case, letters, all_known, form)
            try:
                with torch.no_grad():
                    model(**arguments)
            except Exception as error:
                first = first or error
                continue
            return arguments if "inputs" in case else arguments | with_image(model, arguments, letters)
        if "inputs" in case:
            break
    assert first is not None
    raise first


def some_inputs(
    model: PreTrainedModel, case: dict[str, Any], letters: dict[str, int], all_known: bool, form: int
) -> Arguments:
    """The arguments that are required, or all that are known, in the first form of the rules or a later one."""
    noise = torch.Generator().manual_seed(7)
    parameters = inspect.signature(model.forward).parameters
    main = model.main_input_name
    wanted = [
        name
        for name, x in parameters.items()
        if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)
        and (x.default is x.empty or name == main or (all_known and name in RULES["inputs"]))
    ]
    if "input_ids" in parameters and main not in ("pixel_values", "input_features", "input_values"):
        wanted.append("input_ids")
    if "decoder_input_ids" in parameters:
        wanted.append("decoder_input_ids")
    rules = {name: forms[min(form, len(forms) - 1)] for name, forms in RULES["inputs"].items()}
    if "grid_thw" in wanted or "image_grid_thw" in wanted:
        rules["pixel_values"] = RULES["packed"][form]
    rules |= case.get("inputs", {})
    wanted += case.get("inputs", {})
    arguments = {
        name: made(rules[name], letters, noise) for name in dict.fromkeys(wanted) if rules.get(name) is not None
    }
    return arguments


def with_image(model: PreTrainedModel, arguments: Arguments, letters: dict[str, int]) -> Arguments:
    """An image, and its places in the text, for a model that says how many places it takes."""
    noise = torch.Generator().manual_seed(7)
    token = getattr(model.config, "image_token_id", None) or getattr(model.config, "image_token_index", None)
    if token is None or "input_ids" not in arguments or not hasattr(model, "get_image_features"):
        return {}
    parameters = inspect.signature(model.forward).parameters
    for form in RULES["images"]:
        image = {name: made(spec, letters, noise) for name, spec in form.items() if name in parameters}
        try:
            with torch.no_grad():
                features = model.get_image_features(**image)
            features = getattr(features, "pooler_output", features)
            if isinstance(features, list | tuple):
                features = torch.cat([x.reshape(-1, x.shape[-1]) for x in features])
            count = features.numel() // features.shape[-1] // B
            ids = places(arguments["input_ids"], token, count)
            if "mm_token_type_ids" in parameters:
                image["mm_token_type_ids"] = (ids == token).long()
            with torch.no_grad():
                model(input_ids=ids, **image)
        except Exception:
            continue
        return {"input_ids": ids, **image}
    return {}  # its images have a form of their own: the text alone


def places(ids: Tensor, token: int, count: int) -> Tensor:
    """Texts with `count` places of an image after their second token."""
    return torch.cat([ids[:, :2], torch.full((len(ids), count), token), ids[:, 2:]], 1)


def padded(model: PreTrainedModel, arguments: Arguments, side: str) -> Arguments:
    """The same with the second text padded by 3 tokens on a side; its pads are ids of the text.

    The decoder's text of an encoder-decoder is padded on the right alone.
    """
    parameters, text = inspect.signature(model.forward).parameters, dict(arguments)
    pairs = [("input_ids", "attention_mask")]
    if side == "right" and {"decoder_attention_mask", "encoder_outputs"} <= parameters.keys():
        pairs.append(("decoder_input_ids", "decoder_attention_mask"))
    for ids, mask in pairs:
        if ids in arguments and len(arguments[ids]) == B:
            real = torch.ones(arguments[ids].shape[:2], dtype=torch.long)
            real[1:, slice(0, 3) if side == "left" else slice(real.shape[1] - 3, None)] = 0
            text[mask] = real
    return text
