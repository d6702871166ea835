"""Multi-head attention, head by head: run it, look at it, reshape it, plan it.

The table of contents is `__init__.pyi`; each name is imported when it is first used, so that `import headwise` is
light and the planner starts without torch.
"""

import lazy_loader

from .ops.native.operators import register_with_torch

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
register_with_torch()
