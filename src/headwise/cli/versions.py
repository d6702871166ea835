"""`headwise --version`: the versions that a report of a wrong result or a slow run needs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from headwise import __version__

PACKAGES = ("numpy", "transformers", "tokenizers", "safetensors")
"""The packages that are listed in addition to torch, if installed."""


def versions() -> str:
    """Return backend, instruction set and versions, one per line."""
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
