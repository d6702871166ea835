"""Storage of keys and values in int8 or in pages."""
