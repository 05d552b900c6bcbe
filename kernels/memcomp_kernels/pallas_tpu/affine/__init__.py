"""Affine memories by Pallas TPU kernels."""
