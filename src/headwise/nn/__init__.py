"""The attention modules, which compose the operations of `headwise.ops`."""

from .drop_in import replace
from .gated import GatedMultiHeadAttention, OutputGate, headwise_gate
from .head_views import Head
from .hooks.output_projections import output_projections
from .hooks.probe import AttentionCall, Probe, probe
from .hooks.trace import Stage, Trace, trace, trace_shape
from .hooks.unwrap import split_over, unwrap
from .inner_attention import Inner, InnerAttention
from .latent import LatentAttention, LatentCache
from .max_logit_attention import MaxLogitAttention
from .multihead import MultiHeadAttention
from .rotary import Rotary, rotate
from .torch_multihead import from_torch, mask_from_torch, mask_to_torch, to_torch
from .yarn import yarn_frequencies, yarn_scale

__all__ = [
    "AttentionCall",
    "GatedMultiHeadAttention",
    "Head",
    "Inner",
    "InnerAttention",
    "LatentAttention",
    "LatentCache",
    "MaxLogitAttention",
    "MultiHeadAttention",
    "OutputGate",
    "Probe",
    "Rotary",
    "Stage",
    "Trace",
    "from_torch",
    "headwise_gate",
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
