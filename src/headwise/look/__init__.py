"""Look: what every head of a model does, as plain records.

`at` runs the model and measures; `ROLES` says what heads are called and by whose definition; the records print as a
table and travel as JSON.
"""

from .ablation import Ablation, ablate
from .circuits import Circuits, Composition, circuits
from .collect import at
from .importance import HeadImportance, Importance, importance
from .records import HeadMap, HeadRecord, Look, RoleScore
from .redundancy import Redundancy, Twin, redundancy
from .repeats import Repeats
from .roles import ROLES, Role
from .writes import HeadWrites

__all__ = [
    "ROLES",
    "Ablation",
    "Circuits",
    "Composition",
    "HeadImportance",
    "HeadMap",
    "HeadRecord",
    "HeadWrites",
    "Importance",
    "Look",
    "Redundancy",
    "Repeats",
    "Role",
    "RoleScore",
    "Twin",
    "ablate",
    "at",
    "circuits",
    "importance",
    "redundancy",
]
