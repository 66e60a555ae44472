"""Datasets of stored runs: the constructors over their orders."""
