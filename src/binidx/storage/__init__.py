"""Bytes of objects: ranges go down, views come up."""
