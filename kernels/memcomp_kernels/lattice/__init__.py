"""Lattice: slots on the unit sphere, written along tangents (2504.05646)."""
