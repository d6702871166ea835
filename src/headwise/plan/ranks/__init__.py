"""The cost of a model over several ranks."""
