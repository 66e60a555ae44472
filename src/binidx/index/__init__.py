"""Orders and positions: pure functions of arrays and a seed, and their cache in the store."""
