"""Encoded objects: zstd segments with a seek table, and block checksums."""
