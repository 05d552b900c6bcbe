"""State space duality: the memory of Mamba2 (arXiv 2405.21060)."""

from memcomp_kernels.state_space_duality.api import state_space_duality

__all__ = ["state_space_duality"]
