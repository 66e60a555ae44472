"""WHO SAW WHAT: which sample is read at which step, by whom, and which documents are in it."""
