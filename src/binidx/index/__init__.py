"""Orders: document, sample, shuffle and blend indices as pure functions of arrays and a seed."""
