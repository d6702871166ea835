"""Checks of the arguments of `headwise.reshape`'s public functions; each error is one line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..shapes import INTEGERS
from ..shapes.arguments import check_functions, check_paths, check_tensor, shown
from .write.verify import Proof


def check_kind(kind: type, made_by: str, /, **values: Any) -> None:
    """Check that each value is an instance of `kind`, which `made_by` returns; raise TypeError otherwise."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {kind.__name__}, as {made_by} makes it; got {shown(value)}")


def check_models(**models: Any) -> None:
    """Check that each value is a `torch.nn.Module`; raise TypeError otherwise."""
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} is a loaded model, a torch.nn.Module; got {shown(model)}")


def check_writing(destination: Any, proof: Any, **functions: Any) -> None:
    """Check a destination path, a proof and callbacks; a callback may be None. Raise TypeError otherwise."""
    check_paths(destination=destination)
    if proof is not None and not isinstance(proof, Proof):
        raise TypeError(f"proof is a headwise.reshape.Proof, or None to prove nothing; got {shown(proof)}")
    check_told(**functions)


def check_told(**functions: Any) -> None:
    """Check that each callback is a function or None; raise TypeError otherwise."""
    check_functions(**{name: function for name, function in functions.items() if function is not None})


def check_rows(rows: Any, least: int) -> None:
    """Check for a list of at least `least` tensors of ids (B, T); raise TypeError or ValueError otherwise."""
    if isinstance(rows, Tensor | str | bytes) or not isinstance(rows, Sequence):
        raise TypeError(f"rows are a list of tensors of ids (B, T); got {shown(rows)}")
    for row in rows:
        check_tensor("each of rows", row, "a tensor of ids (B, T)")
        if row.dim() != 2 or row.dtype not in INTEGERS or not row.numel():
            raise ValueError(
                f"each of rows is a tensor of ids (B, T), whole numbers; got {row.dtype} {tuple(row.shape)}"
            )
    if len(rows) < least:
        raise ValueError(f"rows are {least} at least, some to fit to and some to check by; got {len(rows)}")


def check_groups_by_layer(groups: Any, layers: Collection[str]) -> None:
    """Check that `groups` is None or a mapping by layer; raise TypeError or ValueError. `merge` checks the lists."""
    if groups is None:
        return
    if not isinstance(groups, Mapping):
        raise TypeError(f"groups are lists of heads by layer, such as {{'0': [[0, 1], [2, 3]]}}; got {shown(groups)}")
    unknown = [name for name in groups if name not in layers]
    if unknown:
        raise ValueError(f"groups name layers, {', '.join(layers)}; got {shown(unknown[0])}")
