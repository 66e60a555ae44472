"""Train language models straight from `.bin`/`.idx` token data, wherever it lies, in Megatron Core's exact order.

Names are loaded when they are first used, so `import binidx` is quick and brings no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from binidx.dataset.baked import BakedDataset as BakedDataset
    from binidx.dataset.bert import BERTMaskedWordPieceDataset as BERTMaskedWordPieceDataset
    from binidx.dataset.bert import BERTMaskedWordPieceDatasetConfig as BERTMaskedWordPieceDatasetConfig
    from binidx.dataset.best_fit import BestFitGPTDataset as BestFitGPTDataset
    from binidx.dataset.blended import BlendedDataset as BlendedDataset
    from binidx.dataset.builder import BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder
    from binidx.dataset.chat_tokenizer import ChatTokenizer as ChatTokenizer
    from binidx.dataset.config import BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig
    from binidx.dataset.config import GPTDatasetConfig as GPTDatasetConfig
    from binidx.dataset.fim import GPTFIMDataset as GPTFIMDataset
    from binidx.dataset.fim import GPTFIMDatasetConfig as GPTFIMDatasetConfig
    from binidx.dataset.gpt import GPTDataset as GPTDataset
    from binidx.dataset.length_stages import LengthStage as LengthStage
    from binidx.dataset.length_stages import LengthStagedDataset as LengthStagedDataset
    from binidx.dataset.masked import MaskedWordPieceDataset as MaskedWordPieceDataset
    from binidx.dataset.masked import MaskedWordPieceDatasetConfig as MaskedWordPieceDatasetConfig
    from binidx.dataset.megatron_dataset import MegatronDataset as MegatronDataset
    from binidx.dataset.mock import MockGPTDataset as MockGPTDataset
    from binidx.dataset.multimodal import MockMultimodalDataset as MockMultimodalDataset
    from binidx.dataset.multimodal import MultimodalDataset as MultimodalDataset
    from binidx.dataset.multimodal import MultimodalDatasetConfig as MultimodalDatasetConfig
    from binidx.dataset.packed import PackedDataset as PackedDataset
    from binidx.dataset.sft import SFTDataset as SFTDataset
    from binidx.dataset.sft import SFTDatasetConfig as SFTDatasetConfig
    from binidx.dataset.split import Split as Split
    from binidx.dataset.stage import Stage as Stage
    from binidx.dataset.staged import StagedBlendedDataset as StagedBlendedDataset
    from binidx.dataset.t5 import T5MaskedWordPieceDataset as T5MaskedWordPieceDataset
    from binidx.dataset.t5 import T5MaskedWordPieceDatasetConfig as T5MaskedWordPieceDatasetConfig
    from binidx.dataset.varlen import VarlenDataset as VarlenDataset
    from binidx.dataset.varlen_gpt import VarlenGPTDataset as VarlenGPTDataset
    from binidx.format.builder import IndexedDatasetBuilder as IndexedDatasetBuilder
    from binidx.format.idx import DType as DType
    from binidx.format.indexed_dataset import IndexedDataset as IndexedDataset
    from binidx.format.packed import PackedDatasetBuilder as PackedDatasetBuilder
    from binidx.format.packed import PackedFiles as PackedFiles
    from binidx.loader.full_validation import MegatronFullValidationSampler as MegatronFullValidationSampler
    from binidx.loader.hybrid import HybridCPMegatronPretrainingSampler as HybridCPMegatronPretrainingSampler
    from binidx.loader.run import Run as Run
    from binidx.loader.samplers import MegatronPretrainingRandomSampler as MegatronPretrainingRandomSampler
    from binidx.loader.samplers import MegatronPretrainingSampler as MegatronPretrainingSampler
    from binidx.loader.seeded import RandomSeedDataset as RandomSeedDataset
    from binidx.loader.torch import build_pretraining_data_loader as build_pretraining_data_loader
    from binidx.prepare.preprocess.job import Job as Job
    from binidx.prepare.preprocess.run import preprocess as preprocess
    from binidx.storage.backends import open_object as open_object
    from binidx.storage.report import report as report
    from binidx.tokenize.describe import describe_tokenizer as describe_tokenizer

HOMES = {
    "BERTMaskedWordPieceDataset": "dataset.bert",
    "BERTMaskedWordPieceDatasetConfig": "dataset.bert",
    "BakedDataset": "dataset.baked",
    "BestFitGPTDataset": "dataset.best_fit",
    "BlendedDataset": "dataset.blended",
    "BlendedMegatronDatasetBuilder": "dataset.builder",
    "BlendedMegatronDatasetConfig": "dataset.config",
    "ChatTokenizer": "dataset.chat_tokenizer",
    "DType": "format.idx",
    "GPTDataset": "dataset.gpt",
    "GPTDatasetConfig": "dataset.config",
    "GPTFIMDataset": "dataset.fim",
    "GPTFIMDatasetConfig": "dataset.fim",
    "HybridCPMegatronPretrainingSampler": "loader.hybrid",
    "IndexedDataset": "format.indexed_dataset",
    "IndexedDatasetBuilder": "format.builder",
    "Job": "prepare.preprocess.job",
    "LengthStage": "dataset.length_stages",
    "LengthStagedDataset": "dataset.length_stages",
    "MaskedWordPieceDataset": "dataset.masked",
    "MaskedWordPieceDatasetConfig": "dataset.masked",
    "MegatronDataset": "dataset.megatron_dataset",
    "MegatronFullValidationSampler": "loader.full_validation",
    "MegatronPretrainingRandomSampler": "loader.samplers",
    "MegatronPretrainingSampler": "loader.samplers",
    "MockGPTDataset": "dataset.mock",
    "MockMultimodalDataset": "dataset.multimodal",
    "MultimodalDataset": "dataset.multimodal",
    "MultimodalDatasetConfig": "dataset.multimodal",
    "PackedDataset": "dataset.packed",
    "PackedDatasetBuilder": "format.packed",
    "PackedFiles": "format.packed",
    "RandomSeedDataset": "loader.seeded",
    "Run": "loader.run",
    "SFTDataset": "dataset.sft",
    "SFTDatasetConfig": "dataset.sft",
    "Split": "dataset.split",
    "Stage": "dataset.stage",
    "StagedBlendedDataset": "dataset.staged",
    "T5MaskedWordPieceDataset": "dataset.t5",
    "T5MaskedWordPieceDatasetConfig": "dataset.t5",
    "VarlenDataset": "dataset.varlen",
    "VarlenGPTDataset": "dataset.varlen_gpt",
    "build_pretraining_data_loader": "loader.torch",
    "describe_tokenizer": "tokenize.describe",
    "open_object": "storage.backends",
    "preprocess": "prepare.preprocess.run",
    "report": "storage.report",
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
