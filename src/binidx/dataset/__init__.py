"""Samples: configuration, splits, GPT datasets, blends, and their builder."""
