"""Reshape models head by head: prune heads, share keys and values in fewer, write checkpoints that load anywhere."""
