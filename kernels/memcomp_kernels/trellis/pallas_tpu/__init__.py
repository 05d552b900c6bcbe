"""Pallas TPU kernels for Trellis."""
