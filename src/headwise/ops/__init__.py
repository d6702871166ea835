"""The attention operator: pure functions of query, key and value."""
