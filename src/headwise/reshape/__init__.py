"""Reshape models head by head: prune heads, share keys and values in fewer, repair what that changed."""
