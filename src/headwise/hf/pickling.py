"""A pickled model that runs on headwise imports `headwise.hf` where it is read.

transformers finds an attention function by the name in a config, in a table of the process. A model from a pickle
(`torch.save(model)`, a worker process, joblib) would name a function that nothing has registered there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .models.own_attention import is_switched
from .models.support import NAME
from .own_code.switch import switch

_OURS = "_imports_headwise"
"""The mark of our method in the place of transformers'."""


def made(make: Callable[..., Any], *args: Any) -> Any:
    """Return ``make(*args)``: a pickle that names this function has imported `headwise.hf` before it calls it."""
    return make(*args)


def import_where_unpickled() -> None:
    """From here on, the pickle of a config with this name imports `headwise.hf`; that of any other is what it was.

    A model with attention in code of its own is then prepared, as it was when it was switched.
    """
    theirs, restored = PreTrainedConfig.__reduce_ex__, PreTrainedModel.__setstate__
    if hasattr(theirs, _OURS):
        return

    @wraps(theirs)
    def __reduce_ex__(self: PreTrainedConfig, protocol: Any) -> Any:
        make, args, *rest = theirs(self, protocol)
        if getattr(self, "_attn_implementation_internal", None) == NAME:
            make, args = made, (make, *args)
        return make, args, *rest

    @wraps(restored)
    def __setstate__(self: PreTrainedModel, state: Any) -> None:
        restored(self, state)
        if is_switched(vars(self).get("config")):
            switch(self, NAME)

    setattr(__reduce_ex__, _OURS, True)
    PreTrainedConfig.__reduce_ex__ = __reduce_ex__
    PreTrainedModel.__setstate__ = __setstate__
