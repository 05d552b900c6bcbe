"""Tokens into tiles and pages, and the scan over them."""
