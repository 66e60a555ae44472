"""Public names of `binidx.packed` by the module that defines them."""

from binidx.packed.packed_files import PackedDataset as PackedDataset
from binidx.packed.packed_files import PackedDatasetBuilder as PackedDatasetBuilder
from binidx.packed.packed_files import PackedFiles as PackedFiles
from binidx.packed.packed_run import Nesting as Nesting
from binidx.packed.packed_run import PackedReading as PackedReading
from binidx.packed.packed_run import PackedRunOrder as PackedRunOrder
from binidx.packed.packed_run import load_packed_run as load_packed_run
