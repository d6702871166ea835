"""The inner attention, between the projections, as a module that is passed to an attention module."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..ops.attention import attention
from ..ops.masks.mask import Mask
from ..ops.storage.layout import Cache
from ..shapes import check_gate, check_options, check_sinks
from ..shapes.arguments import check_texts
from .attention_mode import current_mode


class Inner(nn.Module):
    """The base class of inner parts, called between the projections as ``inner(query, key, value, *, mask, gate)``.

    Takes query (B, H, T, D), key (B, K, S, D), value (B, K, S, V) and returns (B, H, T, V). Subclasses that define
    `options` can be used with `headwise.nn.probe` and `headwise.trace`.

    Example:
        >>> import torch, headwise
        >>> class Sharp(headwise.nn.Inner):
        ...     def forward(self, query, key, value, *, mask=None, gate=None):
        ...         return headwise.attention(query, key, value, mask=mask, gate=gate, **self.options())
        ...     def options(self):
        ...         return {"scale": 1.0}
        >>> mha = headwise.MultiHeadAttention(12, 3, inner=Sharp())
        >>> with headwise.nn.probe(mha) as seen:
        ...     out = mha(torch.randn(2, 5, 12))
        >>> seen.calls[0].scale
        1.0
    """

    follows_mode = False
    """True if the part attends by the current `AttentionMode`; `headwise.parallel.context` refuses others."""

    def options(self) -> dict[str, Any]:
        """Return the keywords of the `headwise.attention` call that this part computes (``scale``, ``softcap``, ...).

        Raises:
            NotImplementedError: the subclass does not define this method.
        """
        raise NotImplementedError(
            f"the inner part {type(self).__name__} does not say what it computes; "
            "define options() to return the keywords of the headwise.attention call it stands for"
        )


def options_of(inner: nn.Module) -> dict[str, Any] | None:
    """Return the options of an inner part; None if it does not define them."""
    try:
        return inner.options() if isinstance(inner, Inner) else None
    except NotImplementedError:
        return None


class InnerAttention(Inner):
    """`headwise.attention` with its options fixed.

    Args:
        scale: Factor on the scores; None means ``D ** -0.5``.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sinks: (H,) logits added to the softmax of each row, without a value; they become a parameter.
        dropout: Probability of dropping an attention weight in training; no dropout in eval mode.
        backend: The kernel to run; ``"auto"`` chooses one.

    Example:
        >>> import torch
        >>> inner = InnerAttention(softcap=50.0)
        >>> inner(torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 8)).shape
        torch.Size([2, 6, 5, 8])
    """

    follows_mode = True

    def __init__(
        self,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_options(None, scale, softcap, None, dropout)
        check_texts(backend=backend)
        if sinks is not None:
            check_sinks(sinks)
        self.scale = scale
        self.softcap = softcap
        self.sinks = None if sinks is None else nn.Parameter(sinks)
        self.dropout = dropout
        self.backend = backend

    def forward(
        self,
        query: Tensor,
        key: Tensor | Cache,
        value: Tensor | None,
        *,
        mask: Mask | Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Return (B, H, T, V) from query (B, H, T, D), key (B, K, S, D), value (B, K, S, V), or a cache without value.

        See `headwise.attention`.
        """
        mode = current_mode()
        attend = attention if mode is None else mode.attend
        return attend(query, key, value, mask=mask, gate=gate, backend=self.backend, **self.options())

    def options(self) -> dict[str, Any]:
        """Return the keywords of the `headwise.attention` call; dropout is 0 in eval mode."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout": self.dropout if self.training else 0.0,
        }

    def extra_repr(self) -> str:
        """Return the options that differ from the defaults."""
        shown: dict[str, object] = {"scale": self.scale, "softcap": self.softcap, "dropout": self.dropout or None}
        shown["sinks"] = None if self.sinks is None else len(self.sinks)
        shown["backend"] = None if self.backend == "auto" else self.backend
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)


class InnerFunction(Inner):
    """An inner part made from a callable ``(query, key, value, *, mask) -> out``; a gate multiplies its output."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the function, multiplied by the gate."""
        out = self.function(query, key, value, mask=mask)
        return out if gate is None else out * check_gate(gate, out.shape, out.device).to(out.dtype)

    def options(self) -> dict[str, Any]:
        """Raise NotImplementedError: the options of a plain function are unknown."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        raise NotImplementedError(
            f"the inner part {name} is a bare function and cannot say what it computes; derive one from "
            "headwise.nn.Inner, or give headwise.nn.InnerAttention(...)"
        )

    def extra_repr(self) -> str:
        """Return the function's repr."""
        return repr(self.function)


def as_inner(inner: Callable[..., Tensor] | None) -> nn.Module:
    """Convert an inner part to a module: modules stay, ``partial(headwise.attention, ...)`` becomes `InnerAttention`.

    Raises:
        TypeError: `inner` is not callable.
        ValueError: the partial sets an argument that is not an option of the module (the mask, for example).
    """
    if inner is None or inner is attention:
        return InnerAttention()
    if isinstance(inner, nn.Module):
        return inner
    if isinstance(inner, partial) and inner.func is attention:
        allowed = ("scale", "softcap", "sinks", "dropout", "backend")
        wrong = [f"argument {n}" for n in range(len(inner.args))] + [k for k in inner.keywords if k not in allowed]
        if wrong:
            raise ValueError(
                f"inner=partial(headwise.attention, ...) may fix {', '.join(allowed)}; it fixes {', '.join(wrong)}; "
                "give mask and gate to the module's call instead"
            )
        return InnerAttention(**inner.keywords)
    if not callable(inner):
        raise TypeError(
            f"inner is a callable (query, key, value, *, mask) such as headwise.nn.InnerAttention(softcap=50.0); "
            f"got {type(inner).__name__}"
        )
    return InnerFunction(inner)
