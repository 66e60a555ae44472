"""Batches: which samples each rank reads at each step."""
