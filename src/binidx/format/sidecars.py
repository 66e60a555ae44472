"""What may stand beside a dataset and tells of its documents: it goes when they do, and comes along with a copy.

PREFIX.lineage.parquet   where each document came from
PREFIX.manifest.json     what the dataset was made of
"""

LINEAGE = ".lineage.parquet"
MANIFEST = ".manifest.json"
SIDECARS = (MANIFEST, LINEAGE)
