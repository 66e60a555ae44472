"""Caches of remote bytes: chunks in memory, blocks on the node's disk."""
