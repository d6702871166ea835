"""Look: what every head of a model does, as plain records.

`at` runs the model and measures; `ROLES` says what heads are called and by whose definition; the records print as a
table and travel as JSON. `annotate` reads annotated text: words with their syntax and coreference.
"""

from . import annotate
from .collect import at
from .records import HeadMap, HeadRecord, Look, RoleScore
from .repeats import Repeats
from .roles import ROLES, Role

__all__ = ["ROLES", "HeadMap", "HeadRecord", "Look", "Repeats", "Role", "RoleScore", "annotate", "at"]
