"""Drop-ins for `torch.nn.MultiheadAttention`: the same call, parameters and numbers, computed by headwise.

A drop-in is the same module object with its class changed: parameters, hooks and names stay, so optimizers, tied
weights and checkpoints work as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.masks.constructors import causal, lengths
from ..ops.masks.mask import Mask, as_mask
from ..ops.nonfinite import is_finite_hint, mask_nonfinite, show
from ..ops.statistics.weights import weights
from ..ops.storage.layout import Cache
from ..shapes import describe
from ..shapes.arguments import check_tensor
from .attention_mode import check_mode
from .inner_attention import InnerAttention
from .torch_multihead import FORWARDS, in_weights, mask_from_torch

Model = TypeVar("Model", bound=nn.Module)


def replace(model: Model) -> Model:
    """Let headwise compute every `torch.nn.MultiheadAttention` of a model, in place, and return the model.

    The modules keep their signature, their numbers and their parameter names, and remain instances of
    `torch.nn.MultiheadAttention`, so calling, training, saving and loading work as before. `headwise.nn.probe` and
    `headwise.look` can then read their heads. torch's encoder layers also call them in eval mode, instead of their
    fused path. To keep the original model unchanged, pass ``copy.deepcopy(model)``.

    There are two differences. For a query whose keys are all hidden, the heads and the weights are zeros; torch gives
    NaN on some code paths. With ``is_causal=True`` and ``add_bias_kv`` or ``add_zero_attn``, the added keys are
    attended according to `attn_mask`; torch hides them if it needs no weights.

    Args:
        model: Any module. Modules that are already drop-ins are not changed.

    Raises:
        TypeError: `model` is not a module, or it has an attention module of a class derived from torch's or with its
            own forward, which may compute something else. In this case no module is replaced.
        ValueError: `model` has no `torch.nn.MultiheadAttention`.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(12, 4, 7, batch_first=True)
        >>> encoder = torch.nn.TransformerEncoder(layer, 2).eval()
        >>> x, padded = torch.randn(2, 5, 12), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> expected = encoder(x, src_key_padding_mask=padded)
        >>> encoder = headwise.nn.replace(encoder)
        >>> torch.allclose(encoder(x, src_key_padding_mask=padded), expected, atol=1e-5)
        True
        >>> with headwise.nn.probe(encoder) as seen:
        ...     out = encoder(x)
        >>> [(call.module, call.query.shape[1]) for call in seen.calls]
        [('layers.0.self_attn', 4), ('layers.1.self_attn', 4)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace takes a torch.nn.Module; got {type(model).__name__}")
    found = {name: part for name, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.MultiheadAttention to replace; attention of a class of its own is "
            "rebuilt with headwise.MultiHeadAttention, and a transformers model takes attn_implementation='headwise'"
        )
    theirs = {name: part for name, part in found.items() if not isinstance(part, DropInMultiheadAttention)}
    for name, part in theirs.items():
        if type(part) is not nn.MultiheadAttention or "forward" in vars(part):
            raise TypeError(
                f"replace takes each torch.nn.MultiheadAttention as it is; {name!r} is a {type(part).__name__} with a "
                "class or a forward of its own and may compute something else; replace first, and wrap or adapt then"
            )
    for part in theirs.values():
        dropout = vars(part).pop("dropout")
        part.__class__ = DropInMultiheadAttention
        part.dropout = dropout
        part.inner.train(part.training)  # type: ignore[union-attr]
    return model


class WeighedAttention(InnerAttention):
    """An `InnerAttention` that can also return its weights."""

    follows_mode = False

    def forward(
        self,
        query: Tensor,
        key: Tensor | Cache,
        value: Tensor | None,
        *,
        mask: Mask | Tensor | None = None,
        gate: Tensor | None = None,
        kept: list[Tensor] | None = None,
    ) -> Tensor:
        """Return (B, H, T, V), computed from the weights (B, H, T, S) after dropout, which are appended to `kept`."""
        if kept is None or not isinstance(key, Tensor) or value is None:
            return super().forward(query, key, value, mask=mask, gate=gate)
        matrix = weights(query, key, mask=mask).to(query.dtype)
        matrix = F.dropout(matrix, self.dropout, self.training)
        kept.append(matrix)
        if is_finite_hint(key, value):
            return matrix @ value
        *_, value, shown = mask_nonfinite(query, key, value, as_mask(mask))  # 0 * NaN is NaN: hide masked values
        return show(matrix @ value, shown[..., None])


class DropInMultiheadAttention(nn.MultiheadAttention):
    """A `torch.nn.MultiheadAttention` computed by headwise; `replace` sets this class.

    Example:
        >>> import torch
        >>> module = replace(torch.nn.MultiheadAttention(12, 3, batch_first=True))
        >>> x = torch.randn(2, 5, 12)
        >>> out, weights = module(x, x, x, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 3, 5, 5]))
    """

    inner: WeighedAttention

    if not TYPE_CHECKING:

        @property
        def dropout(self) -> float:
            """The probability of dropping an attention weight in training, stored in the inner part."""
            return self.inner.dropout

        @dropout.setter
        def dropout(self, dropout: float) -> None:
            if "inner" in self._modules:
                self.inner.dropout = dropout
            else:
                self.inner = WeighedAttention(dropout=dropout)

        @property
        def _qkv_same_embed_dim(self) -> bool:
            """False after construction, so that encoder layers do not take their fused path, which skips this call."""
            return "out_proj" not in self._modules and vars(self)["_qkv_same_embed_dim"]

        @_qkv_same_embed_dim.setter
        def _qkv_same_embed_dim(self, same: bool) -> None:
            vars(self)["_qkv_same_embed_dim"] = same  # stored as in torch, for copies and pickles

    def _reset_parameters(self) -> None:
        """Initialize parameters as torch does; torch's own method would read `_qkv_same_embed_dim`."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for added in (self.bias_k, self.bias_v):
            if added is not None:
                nn.init.xavier_normal_(added)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`; arguments and results are those of torch's module.

        A nested tensor, as `torch.nn.TransformerEncoder` makes for padded input, is supported for self-attention.

        Raises:
            TypeError: an input is not a tensor, or a mask is neither bool nor float.
            ValueError: shapes that do not fit; ``is_causal=True`` without an `attn_mask`; masks with nested tensors.
        """
        check_mode(self.inner)
        if isinstance(query, Tensor) and query.is_nested:
            return self._nested(query, key, value, key_padding_mask, attn_mask, need_weights, average_attn_weights)
        batched = _check_inputs(self, query, key, value)
        if not batched and isinstance(key_padding_mask, Tensor):
            key_padding_mask = key_padding_mask[None]
        three = self._batch_first(query, key, value, batched)
        mask = self._mask(three, key_padding_mask, attn_mask, hint=is_causal, need_weights=need_weights)
        out, matrix = self._attend(*three, mask, need_weights)
        if matrix is not None and average_attn_weights:
            matrix = matrix.mean(1)
        if not batched:
            return out[0], None if matrix is None else matrix[0]
        return (out if self.batch_first else out.transpose(0, 1).contiguous()), matrix

    def _batch_first(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs as (B, T, M) each; inputs that are the same tensor stay the same tensor."""
        turned: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in turned:
                turned[id(x)] = x[None] if not batched else x if self.batch_first else x.transpose(0, 1)
        return turned[id(query)], turned[id(key)], turned[id(value)]

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the output (B, T, M), and the weights (B, H, T, S) if they are needed."""
        q, k, v = self._project(query, key, value)
        kept: list[Tensor] = []
        heads = self.inner(q, k, v, mask=mask, **({"kept": kept} if need_weights else {}))
        if need_weights and not kept:  # a probe has replaced the output
            kept.append(weights(q, k, mask=mask).to(q.dtype))
        return self.out_proj(heads.transpose(1, 2).flatten(2)), kept[0] if kept else None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Compute queries (B, H, T, D), keys and values (B, H, S, D), with added keys and values at the end."""
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and query is key is value:
            parts = list(F.linear(query, self.in_proj_weight, bias).chunk(3, -1))
        else:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            three = zip((query, key, value), in_weights(self), biases, strict=True)
            parts = [F.linear(x, weight, part) for x, weight, part in three]
        for place, added in ((1, self.bias_k), (2, self.bias_v)):
            fused = parts[place]
            ends = [] if added is None else [added.to(fused.dtype).expand(len(fused), 1, -1)]
            ends += [fused.new_zeros(len(fused), 1, fused.shape[2])] if self.add_zero_attn else []
            parts[place] = torch.cat([fused, *ends], dim=1) if ends else fused
        return [x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in parts]

    def _mask(
        self,
        three: tuple[Tensor, Tensor, Tensor],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        *,
        hint: bool,
        need_weights: bool,
    ) -> Mask | None:
        """Return the combined mask; the `is_causal` hint replaces `attn_mask` under the same conditions as in torch."""
        B, T, S, H = *three[0].shape[:2], three[1].shape[1], self.num_heads
        forms = {"attn_mask": (attn_mask, ((T, S), (B * H, T, S))), "key_padding_mask": (key_padding_mask, ((B, S),))}
        for name, (given, shapes) in forms.items():
            if given is not None:
                check_tensor(name, given, "a bool tensor (True = hide) or a float one (added)")
                if tuple(given.shape) not in shapes:
                    wanted = " or ".join(str(shape) for shape in shapes)
                    raise ValueError(f"{name} is {wanted} here, batch first; got {describe(given)}")
        if hint and attn_mask is None:
            raise ValueError(
                "is_causal=True says that attn_mask is causal, and there is none; pass it as well, as "
                "torch.nn.Transformer.generate_square_subsequent_mask(T) makes it"
            )
        added = (self.bias_k is not None) + bool(self.add_zero_attn)
        if hint and key_padding_mask is None and not need_weights and not added:
            return causal() if T == S else causal(offset=0)
        if added:
            attn_mask, key_padding_mask = (
                None if x is None else F.pad(x, (0, added)) for x in (attn_mask, key_padding_mask)
            )
        return mask_from_torch(attn_mask, key_padding_mask, num_heads=H)

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self-attention of a nested tensor: pad it, attend, and nest the result."""
        if not (query is key is value) or key_padding_mask is not None or attn_mask is not None:
            raise ValueError(
                "a nested tensor is taken for self-attention, module(x, x, x), and brings its own padding; leave "
                "key_padding_mask and attn_mask out, or pad it with x.to_padded_tensor(0.0)"
            )
        sizes = [len(row) for row in query.unbind()]
        x = query.to_padded_tensor(0.0)
        mask = lengths(torch.tensor(sizes, device=x.device))
        out, matrix = self._attend(x, x, x, mask, need_weights)
        rows = [row[:size] for row, size in zip(out, sizes, strict=True)]
        if matrix is not None and average_attn_weights:
            matrix = matrix.mean(1)
        return torch.nested.as_nested_tensor(rows, layout=query.layout), matrix


FORWARDS.add(DropInMultiheadAttention.forward)


def _check_inputs(module: DropInMultiheadAttention, query: Any, key: Any, value: Any) -> bool:
    """Check the inputs, and return whether they are batched."""
    widths = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
    for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
        check_tensor(name, x, "a tensor (T, width) or, batched, of three dimensions")
        if x.ndim not in (2, 3) or x.ndim != query.ndim or x.shape[-1] != width or x.is_nested:
            raise ValueError(
                f"query, key and value have two dimensions each, or three with a batch, and widths "
                f"{tuple(widths.values())}; got {describe(x)} for {name}"
            )
    batch = 0 if module.batch_first else 1
    alike = key.shape[:-1] == value.shape[:-1] and (query.ndim == 2 or query.shape[batch] == key.shape[batch])
    if not alike:
        raise ValueError(
            "key and value have one length, and all three one batch size, "
            f"{'the first' if module.batch_first else 'the second'} axis of this module (batch_first="
            f"{module.batch_first}); got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    return bool(query.ndim == 3)
