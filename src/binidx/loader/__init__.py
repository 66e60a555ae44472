"""Batches: samplers, read-ahead, and the torch DataLoader with its state."""
