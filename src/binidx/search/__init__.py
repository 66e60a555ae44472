"""Search in stored tokens: documents with a text, and n-grams of queries."""
