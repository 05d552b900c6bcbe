"""Trellis by Pallas TPU kernels."""
