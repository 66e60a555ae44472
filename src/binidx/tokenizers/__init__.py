"""Tokenizers: descriptions, bytes of their tokens, and decoding by the libraries that run them."""
