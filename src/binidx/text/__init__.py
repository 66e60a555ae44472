"""Documents' text where it lies: jsonl, jsonl.gz, jsonl.zst and parquet, from any store, as buffers and offsets."""
