"""Masks as pytrees, so that torch.compile and torch.export find the tensors in a mask."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

C = TypeVar("C", bound=type)


def register(cls: C) -> C:
    """Register a class as a pytree; it is a frozen dataclass, or its decorator makes it one later.

    Tensors (and tuples of rules) are the leaves; the other fields are the context.
    """
    ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]

    def split(rule: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        values = {f.name: getattr(rule, f.name) for f in fields(cls)}
        leaves = {k: v for k, v in values.items() if isinstance(v, Tensor) or type(v) is tuple}
        return leaves, (tuple(leaves), tuple((k, v) for k, v in values.items() if k not in leaves))

    def flatten(rule: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, context = split(rule)
        return list(leaves.values()), context

    def flatten_with_keys(rule: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, context = split(rule)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in leaves.items()], context

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(context[0], leaves, strict=True)), **dict(context[1]))

    def loaded(context: Any) -> tuple[Any, ...]:  # torch.export saves the context as JSON, which has no tuples
        return tuple(context[0]), tuple((name, value) for name, value in context[1])

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"headwise.{cls.__name__}" if ours else f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=loaded,
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls
