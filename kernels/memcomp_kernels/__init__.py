"""Compressive-memory sequence operations in plain JAX and Pallas.

Each memory is a sub-package with the same files: `types`, `reference`, `api`,
`xla_chunked`, `tilings`. Import the one you need, for example
`from memcomp_kernels.trellis import api as trellis`.
"""
