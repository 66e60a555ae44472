"""Provenance of steps, down to documents: trace, where, account, export, bake."""
