"""Ops over many devices: rows, heads and shards of time."""
