"""Mathematics that several memories share."""
