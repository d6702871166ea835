"""Kernels of headwise's own for NVIDIA GPUs, in Triton: attention with its statistics, decoding, int8 caches."""
