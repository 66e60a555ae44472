"""python -m helpers.release_process FOLDER: samples that one release of Megatron makes.

FOLDER holds the release, unpacked or as a tree of Megatron-LM; "installed" is the one beside torch. Each line of stdin
names a file with a pickle of `Case`s and, after a tab, one to write: a pickle of the length of each split and some
samples. Its name is printed when it is there.
"""

from __future__ import annotations

import gc
import importlib.util
import pickle
import sys
import sysconfig
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.release_oracle import Case, Found


def main(folder: str) -> None:
    gc.disable()  # a third of the time of its imports
    warnings.simplefilter("ignore")
    do_not_compile()
    if folder != "installed":
        put_in_front(Path(folder))

    with tempfile.TemporaryDirectory() as group:
        torch.distributed.init_process_group("gloo", init_method=f"file://{group}/group", rank=0, world_size=1)
        for line in sys.stdin:
            cases, found = map(Path, line.rstrip("\n").split("\t"))
            given: list[Case] = pickle.loads(cases.read_bytes())
            found.write_bytes(pickle.dumps([_build(case) for case in given]))
            print(found, flush=True)
        torch.distributed.destroy_process_group()


def do_not_compile() -> None:
    """Leave the functions of models as they are: no dataset calls one, and torch's compiler takes 2 s to import."""
    torch.compile = lambda function: function


def put_in_front(folder: Path) -> None:
    """Let imports of `megatron` find a release.

    `triton`, which 0.19 imports beside its datasets, need not be installed: call `do_not_compile` before.
    `megatron.training` begins with modules of a trainer, which ask for Python 3.12 and for GPUs: its `datasets` are
    imported without them.
    """
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("triton") is None:
        sys.modules |= {name: _Anything(name) for name in ("triton", "triton.language")}
        sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
    if not [*(folder / "megatron/core/datasets").glob("helpers_cpp*.so")]:  # a tree, in which nothing is compiled
        _take_over("megatron.core.datasets.helpers_cpp")
    training = types.ModuleType("megatron.training")
    training.__path__ = [str(folder / "megatron/training")]
    sys.modules["megatron.training"] = training


def _take_over(name: str) -> None:
    """Import a compiled module of the installed release."""
    [path] = Path(sysconfig.get_path("purelib"), *name.split(".")[:-1]).glob(f"{name.rpartition('.')[2]}*.so")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


class _Anything(types.ModuleType):
    """Module whose names are all a decorator that changes nothing."""

    __version__ = "3.4.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **options: given[0] if given and callable(given[0]) else lambda function: function


HOMES = {
    "GPTDataset": ("core.datasets.gpt_dataset", "GPTDatasetConfig"),
    "BERTMaskedWordPieceDataset": ("core.datasets.bert_dataset", "BERTMaskedWordPieceDatasetConfig"),
    "T5MaskedWordPieceDataset": ("core.datasets.t5_dataset", "T5MaskedWordPieceDatasetConfig"),
    "GPTFIMDataset": ("training.datasets.fim_dataset", "GPTFIMDatasetConfig"),
    "SFTDataset": ("training.datasets.sft_dataset", "GPTDatasetConfig"),
    "VarlenDataset": ("training.datasets.varlen_dataset", "GPTDatasetConfig"),
}


def _build(case: Case) -> list[Found | None]:
    home, config = HOMES[case.kind]
    module = importlib.import_module(f"megatron.{home}")
    builder = importlib.import_module("megatron.core.datasets.blended_megatron_dataset_builder")
    kind = getattr(module, case.kind)
    if case.kind == "GPTFIMDataset":
        kind = _with_draws_of_samples(kind)
    configured = getattr(module, config)(blend=case.blend, path_to_cache=case.cache, **case.options)
    build = builder.BlendedMegatronDatasetBuilder(kind, case.sizes, lambda: True, configured).build
    return [None if dataset is None else _read(dataset, case) for dataset in build()]


def _with_draws_of_samples(kind: Any) -> Any:
    """Draw the cuts of a sample from its own state, as binidx does; Megatron's depend on all samples before it."""
    from binidx.dataset.assemble.fill_in_middle import seed_sample

    class Seeded(kind):  # type: ignore[misc]
        def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
            self.np_rng = seed_sample(self.config.random_seed, idx)
            return super()._query_document_sample_shuffle_indices(idx)

    return Seeded


def _read(dataset: Any, case: Case) -> Found:
    # With its cache of masks, what Megatron serves depends on which sample it served first: see test_gpt.py.
    for member in [dataset, *vars(dataset).get("datasets", [])]:
        member.masks_and_position_ids_are_cacheable = False
    numbers = case.choose(len(dataset))
    samples = [{name: np.asarray(value) for name, value in dataset[number].items()} for number in numbers]
    return Found(len(dataset), samples)


if __name__ == "__main__":
    main(sys.argv[1])
