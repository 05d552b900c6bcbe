"""Synthetic tasks, as plain functions that return arrays."""
