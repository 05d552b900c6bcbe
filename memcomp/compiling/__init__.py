"""What a compiled training step will need and do, without its devices."""
