"""Merge key-value heads, so that groups of query heads share keys and values."""
