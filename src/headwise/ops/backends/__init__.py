"""Backends in PyTorch's own operators: one a file, one signature, limits as data."""
