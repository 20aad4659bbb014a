"""Kernels: matrix products, attention and row operations, in C and in MLX."""
