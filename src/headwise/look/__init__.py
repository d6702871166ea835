"""Look: what every head of a model does, as plain records.

`at` runs the model on a text and measures, `over` on many; `ROLES` says what heads are called and by whose definition;
the records print as a table and travel as JSON. `annotate` reads annotated text; `importance`, `ablate` and `circuits`
tell what heads are worth and what they write.
"""

from . import annotate
from .ablation import Ablation, ablate
from .axes import Axis
from .circuits import Circuits, Composition, circuits
from .collect import at
from .compare import Comparison, HeadChange, compare
from .corpus import documents, over
from .curve import Curve, Point, read_curve
from .figures import plot_formation, plot_importance
from .files import read, write
from .head import HeadMap, HeadRecord
from .importance import HeadImportance, Importance, importance
from .needles import needles
from .pictures import Picture
from .records import Look
from .redundancy import Redundancy, Twin, redundancy
from .repeats import Repeats
from .roles import ROLES, Role
from .scene import Passage, Vocabulary
from .scores import Evidence, Score
from .watch import Watch
from .writes import HeadWrites

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
    "Twin",
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
