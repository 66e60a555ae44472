"""Pages about a run or a dataset in a browser: local, read-only, rendered by the server."""
