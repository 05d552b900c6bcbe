"""Using a trained model: prefill, sample."""
