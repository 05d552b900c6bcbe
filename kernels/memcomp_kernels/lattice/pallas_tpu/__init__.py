"""Pallas TPU kernels for Lattice."""
