"""Keys and values that lie in int8 or in pages."""
