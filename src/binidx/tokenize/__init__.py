"""From text to token ids: what a tokenizer is, the engines that run it, and the proof that they agree."""
