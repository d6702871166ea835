"""Look: what every head of a model does, as plain records.

`at` runs the model on a text and measures, `over` on many; `ROLES` says what heads are called and by whose definition;
the records print as a table and travel as JSON. `annotate` reads text whose syntax and coreference is known.
"""

from . import annotate
from .collect import at
from .corpus import documents, over
from .records import HeadMap, HeadRecord, Look
from .repeats import Repeats
from .roles import ROLES, Role
from .scene import Passage, Vocabulary
from .scores import Evidence, Score

__all__ = [
    "ROLES",
    "Evidence",
    "HeadMap",
    "HeadRecord",
    "Look",
    "Passage",
    "Repeats",
    "Role",
    "Score",
    "Vocabulary",
    "annotate",
    "at",
    "documents",
    "over",
]
