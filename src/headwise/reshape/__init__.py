"""Reshape: prune heads, regroup them, and write checkpoints that load anywhere."""
