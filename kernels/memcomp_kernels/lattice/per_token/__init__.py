"""Lattice with gradients per token: exact solvers."""
