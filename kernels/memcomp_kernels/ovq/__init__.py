"""Online vector quantisation: a growing dictionary of key-value means."""
