"""The exception that `headwise.hf` raises for a model that it cannot read or run."""


class ModelError(ValueError):
    """A model that headwise cannot read or run. The message is one line: the rule, the values found and a remedy."""
