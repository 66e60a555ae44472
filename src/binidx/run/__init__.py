"""Description of a run, saved as a file, and its global order: the rank, step and batch slot of every sample."""
