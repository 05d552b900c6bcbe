"""Models as files that other programs read, and theirs as ours."""
