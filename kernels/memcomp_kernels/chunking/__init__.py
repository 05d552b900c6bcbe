"""Chunk forms: tokens are laid into tiles and pages, and a scan runs them."""
