"""New objects: published atomically, uploaded in parts, concatenated, copied."""
