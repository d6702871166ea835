"""Modules: composition and state dicts; the arithmetic is in `headwise.ops`."""

from .heads import Head
from .inner import Inner, InnerAttention
from .multihead import MultiHeadAttention
from .probe import AttentionCall, Probe, probe
from .rotary import Rotary, rotate

__all__ = [
    "AttentionCall",
    "Head",
    "Inner",
    "InnerAttention",
    "MultiHeadAttention",
    "Probe",
    "Rotary",
    "probe",
    "rotate",
]
