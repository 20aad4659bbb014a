"""Kernels: what computes below the model, in C and in MLX."""
