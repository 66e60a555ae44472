"""A run as a file, and its global order: which rank reads which sample at which step."""
