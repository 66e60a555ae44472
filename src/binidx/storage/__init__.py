"""Bytes: byte ranges of objects, in any store."""
