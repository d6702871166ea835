"""Backends in PyTorch's own operators: one per file, with one signature and a table of limits."""
