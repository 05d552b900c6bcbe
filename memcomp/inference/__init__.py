"""Inference with a trained model: prefill, sampling, sessions, chat."""

from memcomp import lazy

__all__ = [
  "chat",
  "complete",
  "generate",
  "prefill",
  "sample",
  "saved",
  "session",
  "stop",
]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
