"""Transformers models over several ranks."""
