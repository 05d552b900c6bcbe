"""Pallas kernels for Lattice, for Hopper GPUs."""
