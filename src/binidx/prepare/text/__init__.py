"""Text inputs: JSON Lines and Parquet, read in slices that account for every row."""
