"""Blocks, decoders and their sizes."""
