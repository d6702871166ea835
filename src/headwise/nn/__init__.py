"""Modules: composition and state dicts; the arithmetic is in `headwise.ops`."""

from .drop_in import replace
from .heads import Head
from .inner import Inner, InnerAttention
from .latent import LatentAttention, LatentCache
from .multihead import MultiHeadAttention, from_torch, to_torch
from .outputs import output_projections
from .probe import AttentionCall, Probe, probe
from .rotary import Rotary, rotate
from .torch_mha import mask_from_torch, mask_to_torch
from .trace import Stage, Trace, trace, trace_shape
from .unwrap import split_over, unwrap
from .yarn import yarn_frequencies, yarn_scale

__all__ = [
    "AttentionCall",
    "Head",
    "Inner",
    "InnerAttention",
    "LatentAttention",
    "LatentCache",
    "MultiHeadAttention",
    "Probe",
    "Rotary",
    "Stage",
    "Trace",
    "from_torch",
    "mask_from_torch",
    "mask_to_torch",
    "output_projections",
    "probe",
    "replace",
    "rotate",
    "split_over",
    "to_torch",
    "trace",
    "trace_shape",
    "unwrap",
    "yarn_frequencies",
    "yarn_scale",
]
