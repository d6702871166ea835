"""The cost of attention, computed from its shape and from a model's config. This package does not import torch."""

from .costs.formulas import attention_flops, kv_bytes_per_token, parameter_count, parameter_counts, projection_flops
from .costs.plan_data import ContextCost
from .ranks.rank_plan import ModelOverRanks, over
from .result import AttentionPlan, of
from .shape import AttentionShape
from .show.chart import svg
from .show.csv import csv
from .show.tables import card_list, side_by_side
from .sources import cards, known, read_config
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
