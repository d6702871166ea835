"""How checkpoints of the known architectures store attention: `layouts.json`, as it stands there."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def layouts() -> Mapping[str, Any]:
    """The table: ``forms`` of an attention layer's tensors, ``families`` by model_type, ``attributes`` in memory.

    Nothing of transformers is needed to read it; `headwise.reshape` does.
    """
    content: dict[str, Any] = json.loads((Path(__file__).parent / "layouts.json").read_bytes())
    return content
