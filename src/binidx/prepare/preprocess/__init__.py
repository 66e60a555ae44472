"""Text -> `.bin`/`.idx` in parts that know nothing of each other, on one machine or many."""
