"""The shape of an attention layer: every size that determines its cost, with defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

BiasOption = bool | Literal["qkv"]
MOST = 10**15  # the largest size accepted; a larger one must be a mistake


@dataclass(frozen=True)
class AttentionShape:
    """The sizes of one attention layer, and the number of such layers in a model if it is known.

    Created by `of`, which fills in the defaults and checks the sizes.

    Attributes:
        d_model: Width of the model.
        num_heads: Query heads H.
        num_kv_heads: Key-value heads K.
        head_dim: D of a query or key.
        value_dim: V of a value.
        bias: False, True (all four projections), or ``"qkv"`` (all but o_proj).
        num_layers: The number of layers; None if it is unknown.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    bias: BiasOption = False
    num_layers: int | None = None

    @classmethod
    def of(
        cls,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: BiasOption = False,
        num_layers: int | None = None,
    ) -> AttentionShape:
        """Return the shape with its defaults: K = H, D = d_model / H, V = D.

        Raises:
            TypeError: a size is not an int.
            ValueError: a size below 1, sizes that are not divisible, or an unknown bias.

        Example:
            >>> AttentionShape.of(512, 8, num_kv_heads=2).head_dim
            64
        """
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        sizes |= {"value_dim": value_dim, "num_layers": num_layers}
        for name, size in sizes.items():
            check_size(name, size, optional=name not in ("d_model", "num_heads"))
        if not isinstance(bias, bool) and not (isinstance(bias, str) and bias == "qkv"):
            raise ValueError(f'bias is False, True (all four projections) or "qkv" (all but o_proj); got {short(bias)}')
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(d_model, num_heads, num_kv_heads, head_dim)
        head_dim = d_model // num_heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        return cls(d_model, num_heads, num_kv_heads, head_dim, value_dim, bias, num_layers)

    def arguments(self) -> dict[str, Any]:
        """Return the sizes as keyword arguments of `headwise.MultiHeadAttention` and `headwise.nn.trace_shape`.

        Example:
            >>> AttentionShape.of(12, 3).arguments()
            {'d_model': 12, 'num_heads': 3, 'num_kv_heads': 3, 'head_dim': 4, 'value_dim': 4, 'bias': False}
        """
        names = ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "bias")
        return {name: getattr(self, name) for name in names}


def check_size(name: str, size: object, *, optional: bool = False) -> None:
    """Check that a size is an int of at least 1, or None if optional; raises TypeError or ValueError with its name."""
    if size is None and optional:
        return
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name} is an int; got {short(size)}")
    if size > MOST:
        raise ValueError(f"{name} is at most {MOST:,}; got a larger number")
    if size < 1:
        raise ValueError(f"{name} is at least 1; got {size if size > -MOST else 'a negative number'}")


def memory_widths(memory_dim: int | tuple[int, int] | None, d_model: int) -> tuple[int, int]:
    """Return the widths of the inputs for keys and values; raise TypeError or ValueError for another `memory_dim`."""
    pair = memory_dim if isinstance(memory_dim, tuple) else (memory_dim, memory_dim)
    if len(pair) != 2 or (memory_dim is not None and any(width is None for width in pair)):
        raise ValueError(f"memory_dim is one width, or a pair (of the keys, of the values); got {short(memory_dim)}")
    for width in pair:
        check_size("memory_dim", width, optional=True)
    key_width, value_width = (d_model if width is None else width for width in pair)
    return key_width, value_width


def check_heads(d_model: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Raise ValueError if K does not divide H, or if H does not divide d_model and no head dim is given."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads: H = {num_heads}, K = {num_kv_heads} leave "
            f"{num_heads % num_kv_heads} over; query head h reads key-value head h // (H / K)"
        )
    if head_dim is None and d_model % num_heads:
        raise ValueError(
            f"d_model must be a multiple of num_heads: {d_model} = {num_heads} x {d_model // num_heads} + "
            f"{d_model % num_heads}; give head_dim to choose the size of a head"
        )


def check_between(name: str, value: object, least: int, most: int) -> None:
    """Raise ValueError unless a value is an int from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is a whole number between {least} and {most}; got {short(value)}")


def short(value: object) -> str:
    """Return a value as a short text of one line for messages."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # The value contains an int with more digits than Python converts to text.
        text = type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."
