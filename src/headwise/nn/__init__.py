"""Modules: composition and state dicts; the arithmetic is in `headwise.ops`."""

from .heads import Head
from .inner import Inner, InnerAttention
from .multihead import MultiHeadAttention
from .probe import AttentionCall, Probe, probe
from .rotary import Rotary, rotate
from .torch_mha import from_torch, mask_from_torch, mask_to_torch, to_torch
from .trace import Stage, Trace, trace, trace_shape

__all__ = [
    "AttentionCall",
    "Head",
    "Inner",
    "InnerAttention",
    "MultiHeadAttention",
    "Probe",
    "Rotary",
    "Stage",
    "Trace",
    "from_torch",
    "mask_from_torch",
    "mask_to_torch",
    "probe",
    "rotate",
    "to_torch",
    "trace",
    "trace_shape",
]
