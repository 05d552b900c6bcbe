"""Evaluations of a checkpoint, and simple models to compare it with."""
