"""Index files in a store: loaded when valid, otherwise built once and published."""
