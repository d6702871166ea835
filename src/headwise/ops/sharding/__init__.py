"""Attention over inputs that are sharded over ranks."""
