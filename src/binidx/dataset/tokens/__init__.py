"""Sequences that are not in a `.bin`/`.idx` pair: rows of text files, and computed tokens."""
