"""Parts of Pallas TPU kernels: layouts, matmuls, activations, scheduling."""

SUBLANES, LANES = 8, 128
"""Shape of a TPU's registers, in 32-bit numbers."""
