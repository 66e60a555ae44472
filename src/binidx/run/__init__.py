"""A run as a file, and its global order: the rank, step and slot of every sample."""
