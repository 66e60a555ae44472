"""How many tokens a corpus has, and what it costs to make them, out of a sample."""
