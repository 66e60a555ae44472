"""Our classes under the names, and with the arguments, of libraries that they replace."""
