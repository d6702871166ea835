"""Reshape models head by head: prune heads, share keys and values in fewer, write checkpoints that load anywhere.

>>> import headwise.hf, headwise.models, headwise.reshape
>>> with headwise.hf.checkpoint(headwise.models.tiny_path()) as opened:
...     plan = headwise.reshape.plan_prune(opened, keep_fraction=0.5, scores=headwise.reshape.random_scores())
>>> [len(heads) for heads in plan.gone.values()]
[4, 4, 4, 4]
"""

from ..processes import Processes
from .heal import Curve, Recipe, heal
from .healed import facts_of, write_healed
from .memory import prune_module
from .mend import mend
from .pair import Projections
from .proof import Proof
from .prune import Pruning, plan_prune, prune, write_pruned
from .recover import Repaired, recover
from .regroup import Regrouping, plan_regroup, regroup, repair, write_regrouped
from .scores import Scorer, by_call, by_twins, random_scores
from .select import Budget

__all__ = [
    "Budget",
    "Curve",
    "Processes",
    "Projections",
    "Proof",
    "Pruning",
    "Recipe",
    "Regrouping",
    "Repaired",
    "Scorer",
    "by_call",
    "by_twins",
    "facts_of",
    "heal",
    "mend",
    "plan_prune",
    "plan_regroup",
    "prune",
    "prune_module",
    "random_scores",
    "recover",
    "regroup",
    "repair",
    "write_healed",
    "write_pruned",
    "write_regrouped",
]
