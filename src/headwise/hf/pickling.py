"""Pickling of models that run on headwise: the process that unpickles them imports `headwise.hf`.

transformers finds an attention function by the name in the config, in a table of the process. Without this import, a
model from a pickle (`torch.save(model)`, a worker process, joblib) would name a function that is not registered.
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
"""The attribute that marks a method of transformers as already wrapped."""


def made(make: Callable[..., Any], *args: Any) -> Any:
    """Return ``make(*args)``. To call this function, unpickling first imports `headwise.hf`."""
    return make(*args)


def import_where_unpickled() -> None:
    """Patch transformers so that the pickle of a config with "headwise" imports `headwise.hf`; others do not change.

    A model with its own attention code is prepared again when it is unpickled, as `switch` prepared it before.
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
