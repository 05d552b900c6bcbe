"""Two-pass delta rule: keys, then values, compressed by regression."""
