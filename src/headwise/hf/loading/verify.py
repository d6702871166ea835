"""The check, in a fresh process, that a written checkpoint loads in stock transformers and gives the right output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelError

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


def prove(
    folder: Path, config: Mapping[str, Any] | None, weights: Sequence[Path], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Load a written checkpoint in a fresh process and return its report: see `verify_process.answer`.

    Args:
        folder: The written checkpoint.
        config: The checked config of the original; None to compare with nothing.
        weights: The weights files of the original.
        request: ``gates``, a factor for every head, by layer in the order of execution; ``ids`` of a text and
            ``mask_id``; ``speed``, true to measure the speed; ``same``, false if the outputs may differ.

    Raises:
        ModelError: transformers does not load or run the checkpoint, or the process died.
    """
    source = None if config is None else {"config": dict(config), "weights": [str(file) for file in weights]}
    question = json.dumps({**request, "folder": str(folder), "source": source}).encode()
    script = Path(__file__).with_name("verify_process.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script)], input=question, capture_output=True, env={**os.environ, **QUIET}
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode("utf8", "replace").strip().splitlines() or [""])[-1]
        raise ModelError(f"the process that loads the result ended with {done.returncode} ({last[:200]})") from None
    if "error" in answer:
        raise ModelError(f"transformers does not load or run the result: {' '.join(answer['error'].split())[:300]}")
    return answer
