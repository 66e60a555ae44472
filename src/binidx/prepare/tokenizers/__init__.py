"""Tokenizer engines, and the proof that they agree."""
