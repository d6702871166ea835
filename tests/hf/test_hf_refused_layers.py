"""What a cache of headwise would lose: layers of transformers' caches that keep more than keys and values."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
from hf_models import BY_NAME
from transformers import DynamicCache, cache_utils

import headwise.hf as hf

pytestmark = pytest.mark.unchecked
TAKEN = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


def below(kind: type) -> list[type]:
    return [
        one for sub in kind.__subclasses__() for one in (sub, *below(sub)) if one.__module__ == cache_utils.__name__
    ]


def test_layers_that_keep_more_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every class that transformers derives from those that headwise keeps, and of a user's own."""
    model = BY_NAME["Llama GQA"].build()

    class Own(cache_utils.DynamicLayer):  # type: ignore[misc]
        """Keeps something else, too."""

    room = sys.modules[hf.make_cache.__module__]
    first = DynamicCache(config=model.config).layers[0]
    assert type(first) in TAKEN
    names = []
    for kind in (*dict.fromkeys(below(cache_utils.DynamicLayer)), Own):
        if kind in TAKEN or "LinearAttention" in kind.__name__ or inspect.isabstract(kind):  # states are kept, too
            continue
        layers = [first, kind.__new__(kind)]
        monkeypatch.setattr(room, "DynamicCache", lambda config, some=layers: SimpleNamespace(layers=some))
        with pytest.raises(hf.ModelError, match=rf"layer 1 keeps a {kind.__name__}, and headwise's caches keep keys"):
            hf.make_cache(model)
        names.append(kind.__name__)
    assert "Own" in names and len(names) >= 3
