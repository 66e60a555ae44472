"""pyarrow, which Parquet and lineage need: the error of an install without it names the extra."""

from binidx.errors import MissingDriverError

try:
    import pyarrow as pa
    import pyarrow.parquet as parquet
except ImportError as error:
    way = "pip install 'binidx[parquet]' ('binidx[preprocess]' brings all that text needs), or leave lineage out"
    raise MissingDriverError(f"Parquet and lineage: need pyarrow; {way} (--no-lineage, lineage=False)") from error

__all__ = ["pa", "parquet"]
