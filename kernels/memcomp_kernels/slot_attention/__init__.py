"""Slot attention: bounded memories read by two softmax passes (GSA, ABC)."""
