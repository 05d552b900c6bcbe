"""Pieces that several memories share."""
