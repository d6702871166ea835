"""Hooks that record or replace the attention of a running model."""
