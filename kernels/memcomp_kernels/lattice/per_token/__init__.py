"""Lattice with gradients at each token: exact solvers."""
