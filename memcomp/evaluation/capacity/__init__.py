"""How many pairs a memory holds."""
