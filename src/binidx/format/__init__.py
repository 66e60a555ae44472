"""Format of tokenized datasets: read and write `.bin`/`.idx` pairs, and read many pairs as one dataset."""
