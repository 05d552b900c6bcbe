"""Pallas TPU kernels for affine memories."""
