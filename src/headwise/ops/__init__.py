"""What attention is: pure functions of query, key and value."""
