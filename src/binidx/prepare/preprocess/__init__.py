"""The preprocess job: parts of text to datasets; and its estimate."""
