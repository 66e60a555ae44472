"""Copies of objects in parts with records, and the owner of the target."""
