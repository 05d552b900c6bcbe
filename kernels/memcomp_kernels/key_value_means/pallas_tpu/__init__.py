"""A Pallas TPU kernel for Key-Value Means."""
