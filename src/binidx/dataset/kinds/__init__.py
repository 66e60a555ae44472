"""The other kinds of dataset, one a module: BERT, T5, FIM, SFT, variable length, multimodal, mock."""
