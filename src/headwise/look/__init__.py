"""Measure attention heads: the scores of each head of a model, as plain records.

`at` measures one text, `over` measures many; `ROLES` lists the roles of heads with their definitions and sources.
The records print as a table and are stored as JSON. `annotate` reads annotated text; `importance`, `ablate` and
`circuits` measure the effect of heads and the matrices through which they write.
"""

from . import annotate
from .collect.corpus import documents, over
from .collect.text import at
from .collect.training import Watch
from .compare import Comparison, HeadChange, compare
from .curve import Curve, Point, read_curve
from .files import read, write
from .inputs.needles import needles
from .inputs.repeated_tokens import Repeats
from .interventions.ablation import Ablation, ablate
from .interventions.importance import HeadImportance, Importance, importance
from .interventions.patching import HeadPatch, LogitDifference, Patching, patch
from .interventions.similarity import Redundancy, SimilarHead, redundancy
from .records.axes import Axis
from .records.head import HeadMap, HeadRecord
from .records.images import Picture
from .records.scores import Evidence, Score
from .result import Look
from .roles.call_tokens import Passage, Vocabulary
from .roles.catalog import ROLES
from .roles.role import Role
from .views.figures import plot_formation, plot_importance
from .walk import Walk, walk
from .weights.attribution import HeadWrites
from .weights.composition import Circuits, Composition, circuits
from .weights.logit_attribution import Attribution, HeadLogit, attribute
from .weights.norm_weighted import HeadNorms, NormWeighted, norm_weighted, norm_weighted_map

__all__ = [
    "ROLES",
    "Ablation",
    "Attribution",
    "Axis",
    "Circuits",
    "Comparison",
    "Composition",
    "Curve",
    "Evidence",
    "HeadChange",
    "HeadImportance",
    "HeadLogit",
    "HeadMap",
    "HeadNorms",
    "HeadPatch",
    "HeadRecord",
    "HeadWrites",
    "Importance",
    "LogitDifference",
    "Look",
    "NormWeighted",
    "Passage",
    "Patching",
    "Picture",
    "Point",
    "Redundancy",
    "Repeats",
    "Role",
    "Score",
    "SimilarHead",
    "Vocabulary",
    "Walk",
    "Watch",
    "ablate",
    "annotate",
    "at",
    "attribute",
    "circuits",
    "compare",
    "documents",
    "importance",
    "needles",
    "norm_weighted",
    "norm_weighted_map",
    "over",
    "patch",
    "plot_formation",
    "plot_importance",
    "read",
    "read_curve",
    "redundancy",
    "walk",
    "write",
]
