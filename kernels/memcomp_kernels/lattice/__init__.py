"""Lattice: slots on the unit sphere, written along tangents (2504.05646)."""

from memcomp_kernels.lattice.api import lattice

__all__ = ["lattice"]
