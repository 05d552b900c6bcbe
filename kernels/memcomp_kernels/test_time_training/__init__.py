"""Test-time training: a memory that is a small model (arXiv 2407.04620)."""

from memcomp_kernels.test_time_training.api import test_time_training

__all__ = ["test_time_training"]
