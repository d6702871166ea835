"""Look: what every head of a model does, as plain records.

`at` runs the model and measures; `ROLES` says what heads are called and by whose definition; the records print as a
table and travel as JSON.
"""

from .ablation import Ablation, ablate
from .collect import at
from .importance import HeadImportance, Importance, importance
from .records import HeadMap, HeadRecord, Look, RoleScore
from .repeats import Repeats
from .roles import ROLES, Role

__all__ = [
    "ROLES",
    "Ablation",
    "HeadImportance",
    "HeadMap",
    "HeadRecord",
    "Importance",
    "Look",
    "Repeats",
    "Role",
    "RoleScore",
    "ablate",
    "at",
    "importance",
]
