"""Softmax attention over all tokens, or a window of them (the baseline)."""
