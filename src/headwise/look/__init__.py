"""Look: what every head of a model does, as plain records.

`at` runs the model on a text and measures, `over` on many; `ROLES` says what heads are called and by whose definition;
the records print as a table and travel as JSON. `annotate` reads annotated text; `importance`, `ablate` and `circuits`
tell what heads are worth and what they write.
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
from .interventions.similarity import Redundancy, SimilarHead, redundancy
from .records.axes import Axis
from .records.head import HeadMap, HeadRecord
from .records.images import Picture
from .records.scores import Evidence, Score
from .result import Look
from .roles.call_tokens import Passage, Vocabulary
from .roles.catalog import ROLES, Role
from .views.figures import plot_formation, plot_importance
from .weights.attribution import HeadWrites
from .weights.composition import Circuits, Composition, circuits

__all__ = [
    "ROLES",
    "Ablation",
    "Axis",
    "Circuits",
    "Comparison",
    "Composition",
    "Curve",
    "Evidence",
    "HeadChange",
    "HeadImportance",
    "HeadMap",
    "HeadRecord",
    "HeadWrites",
    "Importance",
    "Look",
    "Passage",
    "Picture",
    "Point",
    "Redundancy",
    "Repeats",
    "Role",
    "Score",
    "SimilarHead",
    "Vocabulary",
    "Watch",
    "ablate",
    "annotate",
    "at",
    "circuits",
    "compare",
    "documents",
    "importance",
    "needles",
    "over",
    "plot_formation",
    "plot_importance",
    "read",
    "read_curve",
    "redundancy",
    "write",
]
