"""The delta rule: DeltaNet (arXiv 2406.06484), Gated DeltaNet (2412.06464)."""
