"""Caches of headwise in transformers' generation and serving."""
