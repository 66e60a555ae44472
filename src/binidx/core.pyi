"""Names of `binidx.core` by the module that defines them. `python tests/structure.py` holds their number to 90."""

# Bytes: objects in any store, read by ranges and written at once
from binidx.storage.adapters import ReadableFile as ReadableFile
from binidx.storage.adapters import WritableFile as WritableFile
from binidx.storage.codecs.checksums import SUMS as SUMS
from binidx.storage.interfaces import Range as Range
from binidx.storage.interfaces import RangeReader as RangeReader
from binidx.storage.interfaces import Writer as Writer
from binidx.storage.location import Location as Location
from binidx.storage.open import codec_named as codec_named
from binidx.storage.open import codec_of as codec_of
from binidx.storage.open import open_object as open_object
from binidx.storage.open import open_stored as open_stored
from binidx.storage.open import read_document as read_document
from binidx.storage.open import read_whole as read_whole
from binidx.storage.open import stream as stream
from binidx.storage.open import suffix_of as suffix_of
from binidx.storage.ranges import cut as cut
from binidx.storage.requests.listing import list_matches as list_matches
from binidx.storage.requests.remote_object import object_exists as object_exists
from binidx.storage.requests.remote_object import object_identity as object_identity
from binidx.storage.requests.remote_object import read_small as read_small
from binidx.storage.settings import ReadSettings as ReadSettings
from binidx.storage.store_protocols import Prices as Prices
from binidx.storage.stores.identity import same_identity as same_identity
from binidx.storage.threads import OPENS as OPENS
from binidx.storage.threads import READS as READS
from binidx.storage.threads import map_in_flight as map_in_flight
from binidx.storage.writing.concatenate import SourcePiece as SourcePiece
from binidx.storage.writing.concatenate import open_join as open_join
from binidx.storage.writing.publish import create_object as create_object
from binidx.storage.writing.publish import delete_object as delete_object
from binidx.storage.writing.publish import put_if_absent as put_if_absent
from binidx.storage.writing.publish import write_object as write_object

# Tokens: pairs of `.bin` and `.idx`, and the files beside them
from binidx.format.bin_file import BinWriter as BinWriter
from binidx.format.bin_file import as_prefix as as_prefix
from binidx.format.idx import DType as DType
from binidx.format.idx import SequenceIndex as SequenceIndex
from binidx.format.index_columns import IndexColumns as IndexColumns
from binidx.format.document_blocks import DocumentBlock as DocumentBlock
from binidx.format.document_blocks import batch_by_size as batch_by_size
from binidx.format.indexed_dataset import IndexedDataset as IndexedDataset
from binidx.format.indexed_dataset import as_pair as as_pair
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder as IndexedDatasetBuilder
from binidx.format.sidecars.lineage import origin_text as origin_text
from binidx.format.sidecars.dataset_manifest import LINEAGE as LINEAGE
from binidx.format.sidecars.dataset_manifest import MANIFEST as MANIFEST
from binidx.format.sidecars.dataset_manifest import RowCounts as RowCounts
from binidx.format.sidecars.dataset_manifest import SIDECARS as SIDECARS
from binidx.format.sidecars.dataset_manifest import read_manifest as read_manifest
from binidx.format.source import DatasetFiles as DatasetFiles
from binidx.format.source import PairSource as PairSource
from binidx.format.source import VirtualSource as VirtualSource
from binidx.format.source import open_source as open_source
from binidx.format.tokens import index_of as index_of
from binidx.format.virtual import PARTS as PARTS
from binidx.format.virtual import check_named as check_named

# Tokenizers: their descriptions, their text
from binidx.tokenizers.describe import describe_tokenizer as describe_tokenizer
from binidx.tokenizers.library import LibraryError as LibraryError
from binidx.tokenizers.library import open_decoder as open_decoder
from binidx.tokenizers.spec import TokenizerSpec as TokenizerSpec
from binidx.tokenizers.token_bytes import token_table as token_table

# Order: the tokens of each sample
from binidx.order.blended_order import BlendedOrder as BlendedOrder
from binidx.order.order_protocols import Numbers as Numbers
from binidx.order.order_protocols import Order as Order
from binidx.order.order_protocols import Source as Source
from binidx.order.reads import OrderReads as OrderReads
from binidx.order.reads import SampleOrigins as SampleOrigins
from binidx.order.reads import TokenReads as TokenReads
from binidx.order.requests import find_blend as find_blend
from binidx.order.source_order import SourceOrder as SourceOrder
from binidx.order.source_order import StoredSource as StoredSource
from binidx.order.source_order import join_ranges as join_ranges
from binidx.order.source_order import sorted_unique as sorted_unique

# Samples, and batches of them
from binidx.dataset.builder import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
from binidx.dataset.config import GPTDatasetConfig as GPTDatasetConfig
from binidx.dataset.config import SpecialTokens as SpecialTokens
from binidx.dataset.config import Split as Split
from binidx.loader.samplers import DataloaderType as DataloaderType

# Work in parts, on processes or machines, and files of JSON
from binidx.forks import cached_property as cached_property
from binidx.jobs.job_folder import JobFolder as JobFolder
from binidx.jobs.stages import JobStage as JobStage
from binidx.jobs.parts import Shard as Shard
from binidx.jobs.parts import Values as Values
from binidx.jobs.parts import Workers as Workers
from binidx.jobs.parts import make_parts as make_parts
from binidx.jobs.stages import run_stages as run_stages
from binidx.jobs.progress import ProgressWatcher as ProgressWatcher
from binidx.jobs.progress import SilentWatcher as SilentWatcher
from binidx.jobs.runner import check_stop as check_stop
from binidx.json_models import Count as Count
from binidx.json_models import JsonFile as JsonFile
