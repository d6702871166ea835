"""Reshape models head by head: prune heads, merge key-value heads, and write checkpoints that transformers loads.

>>> import headwise.hf, headwise.models, headwise.reshape
>>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
...     plan = headwise.reshape.plan_prune(opened, keep_fraction=0.5, scores=headwise.reshape.random_scores())
>>> [len(heads) for heads in plan.gone.values()]
[4, 4, 4, 4]
"""

from ..distributed.workers import Processes
from .pruning.budget import Budget
from .pruning.module import prune_module
from .pruning.pruned_checkpoint import Pruning, plan_prune, prune, write_pruned
from .pruning.scores import Scorer, by_call, by_twins, random_scores
from .regrouping.regrouped_checkpoint import Regrouping, plan_regroup, regroup, write_regrouped
from .repair.distill import DistillConfig, LossCurve, distill
from .repair.distilled_checkpoint import distill_facts, write_distilled
from .repair.paired_models import Projections
from .repair.reconstruct import reconstruct
from .repair.reconstruct_modules import Reconstruction, reconstruct_modules
from .write.verify import Proof

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
