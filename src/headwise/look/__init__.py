"""Look: what every head of a model does, as plain records.

`at` runs the model on a text and measures, `over` on many; `ROLES` says what heads are called and by whose definition;
the records print as a table and travel as JSON.
"""

from .collect import at
from .compare import Comparison, HeadChange, compare
from .corpus import documents, over
from .curve import Curve, Point, read_curve
from .figures import plot_formation, plot_importance
from .files import read, write
from .records import HeadMap, HeadRecord, Look
from .repeats import Repeats
from .roles import ROLES, Role
from .scene import Passage, Vocabulary
from .scores import Evidence, Score
from .watch import Watch

__all__ = [
    "ROLES",
    "Comparison",
    "Curve",
    "Evidence",
    "HeadChange",
    "HeadMap",
    "HeadRecord",
    "Look",
    "Passage",
    "Point",
    "Repeats",
    "Role",
    "Score",
    "Vocabulary",
    "Watch",
    "at",
    "compare",
    "documents",
    "over",
    "plot_formation",
    "plot_importance",
    "read",
    "read_curve",
    "write",
]
