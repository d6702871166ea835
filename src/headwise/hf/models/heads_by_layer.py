"""Encoders with a separate number of heads in each layer, registered with transformers' Auto classes.

`headwise prune` writes such checkpoints (``model_type`` ``headwise_bert``, ...), because transformers' classes take one
number of heads for all layers and compute the head size from it. Each class here is transformers' class with the
attention projections of each layer cut to ``config.heads_by_layer``; everything else is inherited. Configs are
registered when `headwise.hf` is imported, and models when the first config of their class is created.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from ...plan.config.fields import architectures
from ...plan.model.heads_by_layer import CLASS_PREFIX, HOW, PREFIX, check_heads_by_layer
from ..loading.layouts import layouts


class HeadsByLayerConfig(PreTrainedConfig):
    """The additional fields of such a config: the number of heads of each layer (None keeps all) and how to load it."""

    heads_by_layer: list[int] | None = None
    loads_with: str = HOW

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.heads_by_layer is not None:
            check_heads_by_layer(self.heads_by_layer, self.num_hidden_layers, self.num_attention_heads)
        register_models(type(self))


class HeadsByLayer(PreTrainedModel):
    """The base of such models, which cuts the projections before the weights are initialised."""

    def post_init(self) -> None:
        """Cut the projections, then run transformers' `post_init`."""
        if self.config.heads_by_layer is not None:
            cut_projections(self, self.config)
        super().post_init()


def cut_projections(model: nn.Module, config: Any) -> None:
    """Shorten the projections of each layer's attention to its number of heads, in place.

    Args:
        model: A model with all heads, of an architecture in `layouts`.
        config: Its config, with ``heads_by_layer``.
    """
    about = layouts()["families"][config.model_type.removeprefix(PREFIX)]
    attributes, forms = layouts()["attributes"], layouts()["forms"][about["form"]]
    [path] = about["layers"].values()
    match_of = re.compile(r"(?:.*\.)?" + r"(\d+)".join(map(re.escape, path.split("{}")))).fullmatch
    before = config.num_attention_heads
    head_dim = config.hidden_size // before
    for name, attention in list(model.named_modules()):
        match = match_of(name)
        if match is None:
            continue
        heads = config.heads_by_layer[int(match[1])]
        for tensor, form in forms.items():
            if "(" in form and tensor.endswith(".weight"):
                _cut(attention.get_submodule(tensor.removesuffix(".weight")), form.index("(") > 0, heads * head_dim)
        numbers = {"H": (before, heads), "H q": (before * head_dim, heads * head_dim)}
        for part in attention.modules():
            for attribute, what in attributes.items():
                if what in numbers and getattr(part, attribute, None) == numbers[what][0]:
                    setattr(part, attribute, numbers[what][1])


def _cut(linear: Any, columns: bool, width: int) -> None:
    """Keep the first `width` rows of a linear layer's weight, or the first columns, in place."""
    weight, bias = linear.weight, linear.bias
    cut = weight.detach()[:, :width] if columns else weight.detach()[:width]
    linear.weight = nn.Parameter(cut.clone(), requires_grad=weight.requires_grad)
    if bias is not None and not columns:
        linear.bias = nn.Parameter(bias.detach()[:width].clone(), requires_grad=bias.requires_grad)
    linear.out_features, linear.in_features = linear.weight.shape


# -- registration -----------------------------------------------------------------------------------------------------


def register_configs() -> None:
    """Register a config class for each architecture that has heads by layer; `headwise.hf` does so when imported."""
    for model_type, about in architectures().items():
        if about.get("heads_by_layer"):
            original = CONFIG_MAPPING[model_type]
            cls = _class(original, HeadsByLayerConfig, model_type=PREFIX + model_type)
            AutoConfig.register(cls.model_type, cls, exist_ok=True)


def register_models(config_class: type[HeadsByLayerConfig]) -> None:
    """Register the models and the tokenizer of a config class, once, in each Auto class that has its original."""
    if "_registered" in vars(config_class):
        return
    config_class._registered = True
    original: Any = config_class.__mro__[2]
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and original in mapping:
            auto.register(config_class, model_class(mapping[original]), exist_ok=True)  # type: ignore[attr-defined]
    if original in TOKENIZER_MAPPING:
        AutoTokenizer.register(config_class, tokenizer_class=TOKENIZER_MAPPING[original], exist_ok=True)


def model_class(original: type[PreTrainedModel]) -> Any:
    """Return the class with heads by layer for a class of transformers, such as HeadwiseBertModel for BertModel."""
    known = globals().get(CLASS_PREFIX + original.__name__)
    if known is not None:
        return known
    config_class = CONFIG_MAPPING[PREFIX + original.config_class.model_type]
    return _class(original, HeadsByLayer, config_class=config_class)


def _class(original: type, mixin: type, **attributes: Any) -> Any:
    """Return a new class that is an attribute of this module, so that it can be found by name and pickled."""
    name = CLASS_PREFIX + original.__name__
    text = f"{original.__name__} with its own number of heads in each layer (``config.heads_by_layer``)."
    made = type(name, (mixin, original), {"__module__": __name__, "__doc__": text, **attributes})
    return globals().setdefault(name, made)


def __getattr__(name: str) -> Any:
    """Return a model class by name and create it on first access (pickle needs this in a new process)."""
    original = name.removeprefix(CLASS_PREFIX)
    for model_type, about in architectures().items():
        stem = about["classes"]["config"].removesuffix("Config") if about.get("heads_by_layer") else None
        if stem and name != original and original.startswith(stem):
            transformers = importlib.import_module("transformers")
            cls = getattr(transformers, original, None)
            if isinstance(cls, type) and getattr(cls, "config_class", None) is CONFIG_MAPPING[model_type]:
                return model_class(cls)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
