"""Quantization of keys and values to 8, 4 or 3 bits, and measurement of its error."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..ops.attention import attention
from ..ops.masks.mask import Mask
from ..ops.native.append import AppendSpan, append_codes
from ..ops.sharding.heads import refuse_dtensors
from ..ops.storage.packed import BITS, encoded, packed_width
from ..ops.storage.quantized import Quantized
from ..shapes import DTYPES, check_attention, describe
from ..shapes.arguments import check_dense, shown

MOST = 127  # symmetric: -128 is not used


def quantize(x: Float[Tensor, "B K S D"], bits: int = 8) -> Quantized:
    """Quantize keys or values to 8, 4 or 3 bits, with a scale for each token and head.

    With 8 bits, an element is `data * scale` with scale = max |x| / 127 of its token and head, rounded to nearest, ties
    to even. So the error is at most half a scale. With 4 and 3 bits, a token is rotated before it is rounded, which
    spreads a large channel over all others (`headwise.ops.storage.packed`). Tokens may differ in magnitude, because
    each token has its own scale.

    Args:
        x: (B, K, S, D), any float dtype and strides.
        bits: 8, 4 or 3. For 4 and 3, D is a multiple of 8.

    Returns:
        `Quantized` on x's device, contiguous. A token of zeros has the scale 0. A token with a NaN or Inf (or a float64
        number beyond float32) has the scale NaN, so that only outputs that may attend this token become NaN.

    Raises:
        TypeError: x is not a tensor.
        ValueError: x is not a float tensor of four axes, or requires grad while gradients are recorded: codes have
            none. Or the bits are others, or D does not fit them.

    >>> k = torch.tensor([[[[1.0, -0.5, 0.25], [0.0, 0.0, 0.0]]]])
    >>> quantize(k).data
    tensor([[[[127, -64,  32],
              [  0,   0,   0]]]], dtype=torch.int8)
    >>> q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 99, 64), torch.randn(1, 2, 99, 64)
    >>> import headwise
    >>> headwise.attention(q, quantize(k), quantize(v)).shape
    torch.Size([1, 8, 1, 64])
    """
    rule = "quantize takes keys or values (B, K, S, D)"
    if not isinstance(x, Tensor):
        raise TypeError(f"{rule} as a float tensor; got {type(x).__name__}")
    check_dense("x", x)
    refuse_dtensors("quantize takes a plain tensor", x=x)
    if x.ndim != 4 or x.dtype not in DTYPES:
        raise ValueError(f"{rule} as a float tensor; got {describe(x)}; split heads with .unflatten(-1, (K, D))")
    if x.shape[3] == 0:
        raise ValueError(f"{rule}, and D is at least 1; got {describe(x)}")
    check_bits(bits, D=x.shape[3])
    check_learns_nothing("x", x, "wrap the call in torch.no_grad(), or pass x.detach()")
    with torch.no_grad():
        size, width = x.shape[:3], packed_width(x.shape[3], bits)
        data = torch.empty((*size, width), dtype=torch.int8 if bits == 8 else torch.uint8, device=x.device)
        scale = torch.empty(size, dtype=torch.float32, device=x.device)
        spans = [AppendSpan(b, 0, b, 0, size[2]) for b in range(size[0])]
        if append_codes(x, None, (data, scale, None, None), spans):
            return Quantized(data, scale, bits)
        return Quantized(*(rounded(x) if bits == 8 else encoded(x, bits)), bits)


def check_bits(bits: int, **widths: int) -> None:
    """Raise ValueError if codes have another number of bits, or rows of a width that is not whole bytes."""
    if isinstance(bits, bool) or bits not in BITS.values():
        raise ValueError(f"keys and values are quantised to 8, 4 or 3 bits; got {shown(bits)}")
    for name, width in widths.items():
        if bits < 8 and width % 8:
            raise ValueError(
                f"rows of {bits}-bit codes are packed into bytes, so {name} is a multiple of 8; got {name} = {width}; "
                "use int8"
            )


def check_learns_nothing(name: str, x: Tensor, way: str) -> None:
    """Raise ValueError if a tensor to be quantised requires a gradient: rounding would lose it silently."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"quantised keys and values carry no gradient; got {name} that requires grad; {way}")


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 data (..., n) and the scales (...) of tokens (..., n)."""
    with torch.no_grad():
        x = x.float()
        scale = x.abs().amax(-1) / MOST
        unit = torch.where(scale > 0, scale, 1.0)
        data = (x / unit[..., None]).round().nan_to_num(0.0).clamp(-MOST, MOST).to(torch.int8)
        return data.contiguous(), torch.where(scale.isfinite(), scale, torch.nan).contiguous()


@dataclass(frozen=True, eq=False)
class QuantizationError:
    """The error of quantised keys and values for each head; `str()` gives a summary.

    Attributes:
        key_rms: (K,) root of the mean square of the difference between dequantised and original keys.
        key_largest: (K,) the largest such difference.
        value_rms: (K,) the same for values.
        value_largest: (K,) the same for values.
        out_rms: (H,) root of the mean square of the difference in the attention output.
        out_largest: (H,) the largest such difference.
        out_relative: (H,) out_rms over the root of the mean square of the output itself.
    """

    key_rms: Float[Tensor, " K"]
    key_largest: Float[Tensor, " K"]
    value_rms: Float[Tensor, " K"]
    value_largest: Float[Tensor, " K"]
    out_rms: Float[Tensor, " H"]
    out_largest: Float[Tensor, " H"]
    out_relative: Float[Tensor, " H"]

    def __str__(self) -> str:
        worst = int(self.out_relative.argmax())
        lines = [
            f"{name}: rms {float(rms.square().mean().sqrt()):.1e}, largest {float(largest.max()):.1e}"
            for name, rms, largest in (
                ("keys", self.key_rms, self.key_largest),
                ("values", self.value_rms, self.value_largest),
                ("output", self.out_rms, self.out_largest),
            )
        ]
        return "\n".join([*lines, f"worst head: {worst}, off by {float(self.out_relative[worst]):.1%} of its output"])


def quantization_error(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    bits: int = 8,
) -> QuantizationError:
    """Measure the error of keeping these keys and values in `bits` (8, 4 or 3) for these queries.

    The other arguments and the errors are those of `headwise.attention`, of keys and values that are not quantised.
    Both outputs are computed in float32, so that the result is the error of `quantize` alone. This needs the memory of
    float32 copies of key and value; some hundred queries are enough.

    >>> source = torch.Generator().manual_seed(0)
    >>> q, k, v = (torch.randn(1, heads, 256, 64, generator=source) for heads in (8, 2, 2))
    >>> print(quantization_error(q, k, v))
    keys: rms 5.9e-03, largest 1.6e-02
    values: rms 5.9e-03, largest 1.8e-02
    output: rms 8.5e-04, largest 6.4e-03
    worst head: 3, off by 0.9% of its output
    """
    check_attention(query, key, value)
    with torch.no_grad():
        q, k, v = query.float(), key.float(), value.float()
        k8, v8 = quantize(k, bits).dequantize(), quantize(v, bits).dequantize()
        exact = attention(q, k, v, mask=mask, scale=scale, softcap=softcap, sinks=sinks)
        ours = attention(q, k8, v8, mask=mask, scale=scale, softcap=softcap, sinks=sinks)
        (key_rms, key_largest), (value_rms, value_largest) = _off(k8 - k), _off(v8 - v)
        out_rms, out_largest = _off(ours - exact)
        size = _off(exact)[0]
        relative = torch.where(size > 0, out_rms / size, torch.where(out_rms > 0, torch.inf, 0.0))
    return QuantizationError(key_rms, key_largest, value_rms, value_largest, out_rms, out_largest, relative)


def _off(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root mean square and the largest magnitude of (B, heads, length, dim), for every head."""
    flat = x.transpose(0, 1).flatten(1).double()
    return flat.square().mean(-1).sqrt().float(), flat.abs().amax(-1).float()
