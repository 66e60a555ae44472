"""The contracts as functions, and small objects that meet them."""
