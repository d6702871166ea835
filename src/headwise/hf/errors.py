"""The one error of this room."""


class ModelError(ValueError):
    """A model that headwise cannot read or see: one line that tells the rule, the values met and a way out."""
