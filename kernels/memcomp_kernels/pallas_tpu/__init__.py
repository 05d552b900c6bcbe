"""Parts of Pallas TPU kernels: layouts, products, activations, scheduling."""
