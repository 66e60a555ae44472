"""Orders of runs that are stored: baked, or as the places of their tokens."""
