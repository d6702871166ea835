"""Look: what every head of a model does, as plain records."""

from .records import HeadMap, HeadRecord, Look, RoleScore

__all__ = ["HeadMap", "HeadRecord", "Look", "RoleScore"]
