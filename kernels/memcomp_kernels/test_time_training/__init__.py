"""Test-time training: a memory that is a small model (arXiv 2407.04620)."""
