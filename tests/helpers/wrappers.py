"""Stand-ins for wrappers of libraries that are not installed here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn


class Adapted(nn.Module):
    """As PEFT wraps: the model is `base_model.model`, and other attributes are those of the model inside."""

    def __init__(self, model: nn.Module, learns_a_prompt: bool = False) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.active_peft_config = SimpleNamespace(is_prompt_learning=learns_a_prompt)

    def get_base_model(self) -> nn.Module:
        return self.base_model.model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.model(*args, **kwargs)
