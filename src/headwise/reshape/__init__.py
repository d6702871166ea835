"""Reshape models head by head: prune heads, share keys and values in fewer, write checkpoints that load anywhere.

>>> import headwise.hf, headwise.models, headwise.reshape
>>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
...     plan = headwise.reshape.plan_prune(opened, keep_fraction=0.5, scores=headwise.reshape.random_scores())
>>> [len(heads) for heads in plan.gone.values()]
[4, 4, 4, 4]
"""

from ..processes import Processes
from .distill import DistillConfig, LossCurve, distill
from .distilled_checkpoint import distill_facts, write_distilled
from .memory import prune_module
from .pair import Projections
from .proof import Proof
from .prune import Pruning, plan_prune, prune, write_pruned
from .reconstruct import reconstruct
from .reconstruct_modules import Reconstruction, reconstruct_modules
from .regroup import Regrouping, plan_regroup, regroup, write_regrouped
from .scores import Scorer, by_call, by_twins, random_scores
from .select import Budget

__all__ = [
    "Budget",
    "DistillConfig",
    "LossCurve",
    "Processes",
    "Projections",
    "Proof",
    "Pruning",
    "Reconstruction",
    "Regrouping",
    "Scorer",
    "by_call",
    "by_twins",
    "distill",
    "distill_facts",
    "plan_prune",
    "plan_regroup",
    "prune",
    "prune_module",
    "random_scores",
    "reconstruct",
    "reconstruct_modules",
    "regroup",
    "write_distilled",
    "write_pruned",
    "write_regrouped",
]
