"""Work in parts: engines, parts with records, restart."""
