"""What attention costs, as arithmetic on its shape and on a model's config. This room imports no torch."""

from .chart import svg
from .count import attention_flops, kv_bytes_per_token, parameter_count, parameter_counts, projection_flops
from .over import ModelOverRanks, over
from .plan_data import ContextCost
from .record import AttentionPlan, of
from .rows import csv
from .shape import AttentionShape
from .sources import cards, known, read_config
from .text import card_list, side_by_side
from .units import contexts

__all__ = [
    "AttentionPlan",
    "AttentionShape",
    "ContextCost",
    "ModelOverRanks",
    "attention_flops",
    "card_list",
    "cards",
    "contexts",
    "csv",
    "known",
    "kv_bytes_per_token",
    "of",
    "over",
    "parameter_count",
    "parameter_counts",
    "projection_flops",
    "read_config",
    "side_by_side",
    "svg",
]
