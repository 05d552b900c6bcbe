"""State space duality: the memory of Mamba2 (arXiv 2405.21060)."""
