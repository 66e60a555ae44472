"""Whole datasets in, whole datasets out: convert, merge, cut, shuffle, verify, diff."""
