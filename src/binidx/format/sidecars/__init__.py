"""Files beside a dataset: lineage and manifest."""
