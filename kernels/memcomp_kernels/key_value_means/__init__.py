"""Key-Value Means: an expandable block-recurrent memory (arXiv 2605.09877)."""
