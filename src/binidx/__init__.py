"""Train language models straight from `.bin`/`.idx` token data, wherever it lies, in Megatron Core's exact order.

Names are loaded when they are first used, so `import binidx` is quick and brings no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from binidx.dataset.assemble.bert_sentences import (
        BERTMaskedWordPieceDatasetConfig as BERTMaskedWordPieceDatasetConfig,
    )
    from binidx.dataset.assemble.chat import ChatTokenizer as ChatTokenizer
    from binidx.dataset.assemble.chat_rows import SFTDatasetConfig as SFTDatasetConfig
    from binidx.dataset.assemble.fill_in_middle import GPTFIMDatasetConfig as GPTFIMDatasetConfig
    from binidx.dataset.assemble.masking import MaskedWordPieceDatasetConfig as MaskedWordPieceDatasetConfig
    from binidx.dataset.assemble.t5_sentences import T5MaskedWordPieceDatasetConfig as T5MaskedWordPieceDatasetConfig
    from binidx.dataset.assemble.text_and_images import MultimodalDatasetConfig as MultimodalDatasetConfig
    from binidx.dataset.assemble.text_and_images import image_bytes as image_bytes
    from binidx.dataset.baked import BakedDataset as BakedDataset
    from binidx.dataset.builder import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
    from binidx.dataset.config import BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig
    from binidx.dataset.config import GPTDatasetConfig as GPTDatasetConfig
    from binidx.dataset.config import SpecialTokens as SpecialTokens
    from binidx.dataset.config import Split as Split
    from binidx.dataset.megatron.bert import BERTMaskedWordPieceDataset as BERTMaskedWordPieceDataset
    from binidx.dataset.megatron.blended import BlendedDataset as BlendedDataset
    from binidx.dataset.megatron.gpt import GPTDataset as GPTDataset
    from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset as BestFitGPTDataset
    from binidx.dataset.megatron.gpt_variants import GPTFIMDataset as GPTFIMDataset
    from binidx.dataset.megatron.gpt_variants import VarlenGPTDataset as VarlenGPTDataset
    from binidx.dataset.megatron.masked_sentences import MaskedWordPieceDataset as MaskedWordPieceDataset
    from binidx.dataset.megatron.megatron_dataset import MegatronDataset as MegatronDataset
    from binidx.dataset.megatron.mock import MockGPTDataset as MockGPTDataset
    from binidx.dataset.megatron.multimodal import MockMultimodalDataset as MockMultimodalDataset
    from binidx.dataset.megatron.multimodal import MultimodalDataset as MultimodalDataset
    from binidx.dataset.megatron.sft import SFTDataset as SFTDataset
    from binidx.dataset.megatron.sft import VarlenDataset as VarlenDataset
    from binidx.dataset.megatron.t5 import T5MaskedWordPieceDataset as T5MaskedWordPieceDataset
    from binidx.dataset.planned import PlannedDataset as PlannedDataset
    from binidx.dataset.staged.length_stages import LengthStage as LengthStage
    from binidx.dataset.staged.length_stages import LengthStagedDataset as LengthStagedDataset
    from binidx.dataset.staged.staged_blend import Stage as Stage
    from binidx.dataset.staged.staged_blend import StagedBlendedDataset as StagedBlendedDataset
    from binidx.dataset.torch_bridge import find_topology as find_topology
    from binidx.format.idx import DType as DType
    from binidx.format.indexed_dataset import IndexedDataset as IndexedDataset
    from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder as IndexedDatasetBuilder
    from binidx.jobs.parts import Shard as Shard
    from binidx.jobs.parts import Workers as Workers
    from binidx.loader.device_batches import DeviceBatches as DeviceBatches
    from binidx.loader.metrics_server import MetricsServer as MetricsServer
    from binidx.loader.metrics_server import serve_metrics as serve_metrics
    from binidx.loader.samplers import HybridCPMegatronPretrainingSampler as HybridCPMegatronPretrainingSampler
    from binidx.loader.samplers import MegatronFullValidationSampler as MegatronFullValidationSampler
    from binidx.loader.samplers import MegatronPretrainingRandomSampler as MegatronPretrainingRandomSampler
    from binidx.loader.samplers import MegatronPretrainingSampler as MegatronPretrainingSampler
    from binidx.loader.samplers import RandomSeedDataset as RandomSeedDataset
    from binidx.loader.torch_loader import build_pretraining_data_loader as build_pretraining_data_loader
    from binidx.order.order_options import OrderOption as OrderOption
    from binidx.order.order_options import register_order as register_order
    from binidx.order.view import View as View
    from binidx.packed.packed_files import PackedDataset as PackedDataset
    from binidx.packed.packed_files import PackedDatasetBuilder as PackedDatasetBuilder
    from binidx.packed.packed_files import PackedFiles as PackedFiles
    from binidx.packed.packed_run import Nesting as Nesting
    from binidx.packed.packed_run import PackedRunOrder as PackedRunOrder
    from binidx.packed.packed_run import load_packed_run as load_packed_run
    from binidx.prepare.preprocess.job import Job as Job
    from binidx.prepare.preprocess.preprocess import preprocess as preprocess
    from binidx.prepare.tokenizers.describe import describe_tokenizer as describe_tokenizer
    from binidx.run.load import load_dataset as load_dataset
    from binidx.run.provenance.accounts import account as account
    from binidx.run.provenance.bake_plan import plan_bake as plan_bake
    from binidx.run.provenance.baking import bake as bake
    from binidx.run.provenance.read_planning import plan_reads as plan_reads
    from binidx.run.provenance.read_planning import write_read_plan as write_read_plan
    from binidx.run.provenance.run_order import RunOrder as RunOrder
    from binidx.run.run_file import Run as Run
    from binidx.storage.open import open_object as open_object
    from binidx.storage.open import register_codec as register_codec
    from binidx.storage.stats import report as report
    from binidx.storage.stores.registry import register_store as register_store

NAMES = {
    "dataset.assemble.bert_sentences": ["BERTMaskedWordPieceDatasetConfig"],
    "dataset.assemble.t5_sentences": ["T5MaskedWordPieceDatasetConfig"],
    "dataset.assemble.fill_in_middle": ["GPTFIMDatasetConfig"],
    "dataset.assemble.masking": ["MaskedWordPieceDatasetConfig"],
    "dataset.assemble.text_and_images": ["MultimodalDatasetConfig", "image_bytes"],
    "dataset.assemble.chat_rows": ["SFTDatasetConfig"],
    "dataset.baked": ["BakedDataset"],
    "dataset.megatron.blended": ["BlendedDataset"],
    "dataset.builder": ["BlendedMegatronDatasetBuilder"],
    "dataset.config": ["BlendedMegatronDatasetConfig", "GPTDatasetConfig", "SpecialTokens", "Split"],
    "dataset.megatron.gpt": ["GPTDataset"],
    "dataset.megatron.bert": ["BERTMaskedWordPieceDataset"],
    "dataset.assemble.chat": ["ChatTokenizer"],
    "dataset.megatron.gpt_variants": ["BestFitGPTDataset", "GPTFIMDataset", "VarlenGPTDataset"],
    "dataset.megatron.masked_sentences": ["MaskedWordPieceDataset"],
    "dataset.megatron.mock": ["MockGPTDataset"],
    "dataset.megatron.multimodal": ["MockMultimodalDataset", "MultimodalDataset"],
    "dataset.megatron.sft": ["SFTDataset", "VarlenDataset"],
    "dataset.megatron.t5": ["T5MaskedWordPieceDataset"],
    "dataset.megatron.megatron_dataset": ["MegatronDataset"],
    "dataset.staged.length_stages": ["LengthStage", "LengthStagedDataset"],
    "dataset.staged.staged_blend": ["Stage", "StagedBlendedDataset"],
    "dataset.planned": ["PlannedDataset"],
    "dataset.torch_bridge": ["find_topology"],
    "format.idx": ["DType"],
    "format.indexed_dataset": ["IndexedDataset"],
    "format.indexed_dataset_builder": ["IndexedDatasetBuilder"],
    "jobs.parts": ["Shard", "Workers"],
    "loader.device_batches": ["DeviceBatches"],
    "loader.metrics_server": ["MetricsServer", "serve_metrics"],
    "loader.samplers": [
        "HybridCPMegatronPretrainingSampler",
        "MegatronFullValidationSampler",
        "MegatronPretrainingRandomSampler",
        "MegatronPretrainingSampler",
        "RandomSeedDataset",
    ],
    "loader.torch_loader": ["build_pretraining_data_loader"],
    "order.order_options": ["OrderOption", "register_order"],
    "order.view": ["View"],
    "packed.packed_files": ["PackedDataset", "PackedDatasetBuilder", "PackedFiles"],
    "packed.packed_run": ["Nesting", "PackedRunOrder", "load_packed_run"],
    "prepare.preprocess.job": ["Job"],
    "prepare.preprocess.preprocess": ["preprocess"],
    "prepare.tokenizers.describe": ["describe_tokenizer"],
    "run.load": ["load_dataset"],
    "run.provenance.accounts": ["account"],
    "run.provenance.bake_plan": ["plan_bake"],
    "run.provenance.baking": ["bake"],
    "run.provenance.read_planning": ["plan_reads", "write_read_plan"],
    "run.provenance.run_order": ["RunOrder"],
    "run.run_file": ["Run"],
    "storage.open": ["open_object", "register_codec"],
    "storage.stats": ["report"],
    "storage.stores.registry": ["register_store"],
}
"""Public names by the module that defines them."""

HOMES = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'binidx' has no attribute {name!r}")
    value = getattr(import_module(f"binidx.{HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*HOMES, "__version__", "errors"])
