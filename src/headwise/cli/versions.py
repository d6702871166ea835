"""`headwise --version --verbose`: what an issue about a result or a speed should begin with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from headwise import __version__

PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors")
"""Beside torch: whatever of them is installed is named."""


def versions() -> str:
    """Backend, instruction set and versions, a line each."""
    import torch

    from headwise.ops.native import library

    trouble = library.error_for()
    if trouble:
        backend = f"sdpa; not native: {trouble}"
    else:
        used = torch.ops.headwise.isa()
        others = [name for name in library.isas() if name != used]
        backend = f"native, {used}" + (f" (this CPU also runs {', '.join(others)})" if others else "")
    lines = {
        "headwise": __version__,
        "backend": backend,
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        **{name: number for name in PACKAGES if (number := _installed(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    return "\n".join(f"{name:13}{said}" for name, said in lines.items())


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
