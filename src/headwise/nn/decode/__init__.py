"""Decode steps of the modules, one token at a time."""
