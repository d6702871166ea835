"""Key-value caches: what is kept of keys and values, and how it is attended as it lies."""

from ..ops.int8 import Quantized
from .quantize import QuantizationError, quantization_error, quantize

__all__ = ["QuantizationError", "Quantized", "quantization_error", "quantize"]
