"""Evaluations of a checkpoint, and simple models for comparison."""

from memcomp import lazy

__all__ = [
  "activations",
  "byte_models",
  "capacity",
  "harness_model",
  "load",
  "mqar",
  "niah",
  "perplexity",
  "recall",
  "run",
  "throughput",
]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
