"""The C functions over NumPy arrays; no other package imports the compiled module."""
