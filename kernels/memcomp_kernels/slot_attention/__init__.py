"""Slot attention: bounded memories read by two softmax passes (GSA, ABC)."""

from memcomp_kernels.slot_attention.api import (
  gated_slot_attention,
  slot_attention,
)

__all__ = ["gated_slot_attention", "slot_attention"]
