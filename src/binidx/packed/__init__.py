"""Packed token files (LITPKDS): files, order, datasets, runs, conversion."""
