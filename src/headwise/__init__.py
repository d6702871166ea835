"""Multi-head attention, head by head: run it, look at it, reshape it, plan it.

The table of contents is `__init__.pyi`; each name is imported when it is first used, so that `import headwise` is
light and the planner starts without torch.
"""

from importlib.util import find_spec
from typing import Any

import lazy_loader

from .ops.native.operators import register_with_torch

__version__ = "0.1.0"
_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
register_with_torch()


def __getattr__(name: str) -> Any:
    """Return a name of the table of contents; the other packages are only there once they are imported."""
    try:
        return _listed(name)
    except AttributeError:
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            raise AttributeError(f"headwise.{name} is not imported yet; import headwise.{name} first") from None
        raise AttributeError(f"headwise has no attribute {name!r}") from None
