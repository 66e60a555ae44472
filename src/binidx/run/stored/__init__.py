"""A run written again in the order in which it reads: its tokens (a bake), or their places (a read plan)."""
