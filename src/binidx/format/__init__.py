"""Tokens of stored sequences: spans go down, arrays come up."""
