"""Orders: the tokens of each sample, as values that read none."""
