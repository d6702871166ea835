"""Readers of a model's config for the sizes that determine its cost."""
