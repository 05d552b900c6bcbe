"""Lattice by Pallas kernels for Hopper GPUs."""
