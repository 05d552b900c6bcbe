"""Key-Value Means by a Pallas TPU kernel."""
