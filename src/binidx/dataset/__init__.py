"""Samples: what training sees, in Megatron Core's order."""
