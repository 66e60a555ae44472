"""Train language models straight from `.bin`/`.idx` token data, wherever it lies, in Megatron Core's exact order.

Names are loaded when they are first used, so `import binidx` is quick and brings no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from binidx.dataset.baked import BakedDataset as BakedDataset
    from binidx.dataset.blended import BlendedDataset as BlendedDataset
    from binidx.dataset.builder import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
    from binidx.dataset.config import BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig
    from binidx.dataset.config import GPTDatasetConfig as GPTDatasetConfig
    from binidx.dataset.config import Split as Split
    from binidx.dataset.gpt import GPTDataset as GPTDataset
    from binidx.dataset.kinds.bert import BERTMaskedWordPieceDataset as BERTMaskedWordPieceDataset
    from binidx.dataset.kinds.bert import BERTMaskedWordPieceDatasetConfig as BERTMaskedWordPieceDatasetConfig
    from binidx.dataset.kinds.best_fit_gpt import BestFitGPTDataset as BestFitGPTDataset
    from binidx.dataset.kinds.chat import ChatTokenizer as ChatTokenizer
    from binidx.dataset.kinds.fim import GPTFIMDataset as GPTFIMDataset
    from binidx.dataset.kinds.fim import GPTFIMDatasetConfig as GPTFIMDatasetConfig
    from binidx.dataset.kinds.masked_sentences import MaskedWordPieceDataset as MaskedWordPieceDataset
    from binidx.dataset.kinds.masked_sentences import MaskedWordPieceDatasetConfig as MaskedWordPieceDatasetConfig
    from binidx.dataset.kinds.mock import MockGPTDataset as MockGPTDataset
    from binidx.dataset.kinds.multimodal import MockMultimodalDataset as MockMultimodalDataset
    from binidx.dataset.kinds.multimodal import MultimodalDataset as MultimodalDataset
    from binidx.dataset.kinds.multimodal import MultimodalDatasetConfig as MultimodalDatasetConfig
    from binidx.dataset.kinds.sft import SFTDataset as SFTDataset
    from binidx.dataset.kinds.sft import SFTDatasetConfig as SFTDatasetConfig
    from binidx.dataset.kinds.t5 import T5MaskedWordPieceDataset as T5MaskedWordPieceDataset
    from binidx.dataset.kinds.t5 import T5MaskedWordPieceDatasetConfig as T5MaskedWordPieceDatasetConfig
    from binidx.dataset.kinds.varlen import VarlenDataset as VarlenDataset
    from binidx.dataset.kinds.varlen import VarlenGPTDataset as VarlenGPTDataset
    from binidx.dataset.megatron_dataset import MegatronDataset as MegatronDataset
    from binidx.dataset.staged.length_stages import LengthStage as LengthStage
    from binidx.dataset.staged.length_stages import LengthStagedDataset as LengthStagedDataset
    from binidx.dataset.staged.staged_blend import Stage as Stage
    from binidx.dataset.staged.staged_blend import StagedBlendedDataset as StagedBlendedDataset
    from binidx.format.idx import DType as DType
    from binidx.format.indexed_dataset import IndexedDataset as IndexedDataset
    from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder as IndexedDatasetBuilder
    from binidx.loader.samplers import HybridCPMegatronPretrainingSampler as HybridCPMegatronPretrainingSampler
    from binidx.loader.samplers import MegatronFullValidationSampler as MegatronFullValidationSampler
    from binidx.loader.samplers import MegatronPretrainingRandomSampler as MegatronPretrainingRandomSampler
    from binidx.loader.samplers import MegatronPretrainingSampler as MegatronPretrainingSampler
    from binidx.loader.samplers import RandomSeedDataset as RandomSeedDataset
    from binidx.loader.torch_loader import build_pretraining_data_loader as build_pretraining_data_loader
    from binidx.packed.packed_dataset import PackedDataset as PackedDataset
    from binidx.packed.packed_files import PackedDatasetBuilder as PackedDatasetBuilder
    from binidx.packed.packed_files import PackedFiles as PackedFiles
    from binidx.prepare.preprocess.job import Job as Job
    from binidx.prepare.preprocess.preprocess import preprocess as preprocess
    from binidx.prepare.tokenizers.describe import describe_tokenizer as describe_tokenizer
    from binidx.run.run_file import Run as Run
    from binidx.storage.open import open_object as open_object
    from binidx.storage.stats import report as report

HOMES = {
    "BERTMaskedWordPieceDataset": "dataset.kinds.bert",
    "BERTMaskedWordPieceDatasetConfig": "dataset.kinds.bert",
    "BakedDataset": "dataset.baked",
    "BestFitGPTDataset": "dataset.kinds.best_fit_gpt",
    "BlendedDataset": "dataset.blended",
    "BlendedMegatronDatasetBuilder": "dataset.builder",
    "BlendedMegatronDatasetConfig": "dataset.config",
    "ChatTokenizer": "dataset.kinds.chat",
    "DType": "format.idx",
    "GPTDataset": "dataset.gpt",
    "GPTDatasetConfig": "dataset.config",
    "GPTFIMDataset": "dataset.kinds.fim",
    "GPTFIMDatasetConfig": "dataset.kinds.fim",
    "HybridCPMegatronPretrainingSampler": "loader.samplers",
    "IndexedDataset": "format.indexed_dataset",
    "IndexedDatasetBuilder": "format.indexed_dataset_builder",
    "Job": "prepare.preprocess.job",
    "LengthStage": "dataset.staged.length_stages",
    "LengthStagedDataset": "dataset.staged.length_stages",
    "MaskedWordPieceDataset": "dataset.kinds.masked_sentences",
    "MaskedWordPieceDatasetConfig": "dataset.kinds.masked_sentences",
    "MegatronDataset": "dataset.megatron_dataset",
    "MegatronFullValidationSampler": "loader.samplers",
    "MegatronPretrainingRandomSampler": "loader.samplers",
    "MegatronPretrainingSampler": "loader.samplers",
    "MockGPTDataset": "dataset.kinds.mock",
    "MockMultimodalDataset": "dataset.kinds.multimodal",
    "MultimodalDataset": "dataset.kinds.multimodal",
    "MultimodalDatasetConfig": "dataset.kinds.multimodal",
    "PackedDataset": "packed.packed_dataset",
    "PackedDatasetBuilder": "packed.packed_files",
    "PackedFiles": "packed.packed_files",
    "RandomSeedDataset": "loader.samplers",
    "Run": "run.run_file",
    "SFTDataset": "dataset.kinds.sft",
    "SFTDatasetConfig": "dataset.kinds.sft",
    "Split": "dataset.config",
    "Stage": "dataset.staged.staged_blend",
    "StagedBlendedDataset": "dataset.staged.staged_blend",
    "T5MaskedWordPieceDataset": "dataset.kinds.t5",
    "T5MaskedWordPieceDatasetConfig": "dataset.kinds.t5",
    "VarlenDataset": "dataset.kinds.varlen",
    "VarlenGPTDataset": "dataset.kinds.varlen",
    "build_pretraining_data_loader": "loader.torch_loader",
    "describe_tokenizer": "prepare.tokenizers.describe",
    "open_object": "storage.open",
    "preprocess": "prepare.preprocess.preprocess",
    "report": "storage.stats",
}

__all__ = sorted(HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'binidx' has no attribute {name!r}")
    value = getattr(import_module(f"binidx.{HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES])
