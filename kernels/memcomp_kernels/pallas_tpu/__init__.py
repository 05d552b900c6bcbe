"""Parts of Pallas TPU kernels: layouts, matmuls, activations, scheduling."""
