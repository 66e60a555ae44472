"""Tokens: `.bin`/`.idx` pairs, read, written, and served many as one."""
