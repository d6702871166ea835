"""The table of how checkpoints of known architectures store attention (`layouts.json`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def layouts() -> Mapping[str, Any]:
    """Return the table: ``forms`` of attention tensors, ``families`` by model_type, ``attributes`` in memory.

    The table itself does not depend on transformers. `headwise.reshape` reads it.
    """
    return json.loads((Path(__file__).parent / "layouts.json").read_bytes())
