"""Ops over many devices: shards of batch, heads and time."""
