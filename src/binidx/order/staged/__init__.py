"""Orders whose blend or sequence length changes during a run."""
