"""What attention costs, as arithmetic on its shape. This room imports no torch."""

from .config import read_config
from .count import attention_flops, kv_bytes_per_token, parameter_count, parameter_counts, projection_flops
from .shape import AttentionShape

__all__ = [
    "AttentionShape",
    "attention_flops",
    "kv_bytes_per_token",
    "parameter_count",
    "parameter_counts",
    "projection_flops",
    "read_config",
]
