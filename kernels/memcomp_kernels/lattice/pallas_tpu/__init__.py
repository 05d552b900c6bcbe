"""Lattice by Pallas TPU kernels."""
