"""Functions that make samples of stored tokens, one kind of sample a module."""
